"""The log that the settings ask for."""

from __future__ import annotations

import os.path
from collections.abc import Callable

from cosmodrome.env.base import Env
from cosmodrome.env.options import StoreOptions
from cosmodrome.store.commit_log.log import Log, Pool
from cosmodrome.store.commit_log.segment import OpenFiles, Warming

POOL_BYTES_MAX = 256 * 1024 * 1024


def make_log(
    options: StoreOptions, env: Env, files: OpenFiles, next_offset: Callable[[str, int], int]
) -> Log:
    warm_below_percent = options.disk_space_clean_forcibly_ratio
    return Log(
        options.store_path_commit_log or os.path.join(options.store_path_root_dir, "commitlog"),
        options.mapped_file_size_commit_log,
        env,
        files,
        next_offset,
        pool=pool_of(options),
        warming=Warming(warm_below_percent) if options.warm_maped_file_enable else None,
        zeros_ahead_bytes=_zeros_ahead_bytes(options),
        fail_fast=options.fast_fail_if_no_buffer_in_store_pool,
    )


def _zeros_ahead_bytes(options: StoreOptions) -> int:
    # Syncs now and then, and files that are full of zeros already, gain nothing by it.
    if options.flush_disk_type != "SYNC_FLUSH" or options.warm_maped_file_enable:
        return 0
    return options.commit_log_zeros_ahead


def pool_of(options: StoreOptions) -> Pool | None:
    # Compat: upstream ignores the setting unless it is a master that flushes asynchronously.
    if (
        not options.transient_store_pool_enable
        or options.flush_disk_type != "ASYNC_FLUSH"
        or options.broker_role == "SLAVE"
    ):
        return None
    size_bytes = options.transient_store_pool_size * options.mapped_file_size_commit_log
    return Pool(min(size_bytes, POOL_BYTES_MAX), options.commit_interval_commit_log / 1000)
