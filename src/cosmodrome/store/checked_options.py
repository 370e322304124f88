"""Settings without which no store can be opened."""

from __future__ import annotations

from cosmodrome.env.options import StoreOptions
from cosmodrome.errors import ConfigError


def check_options(options: StoreOptions) -> None:
    if not options.store_path_root_dir:
        raise ConfigError("storePathRootDir is not set; name the directory of the store")
    if options.flush_disk_type not in ("SYNC_FLUSH", "ASYNC_FLUSH"):
        raise ConfigError(
            f"flushDiskType={options.flush_disk_type}: SYNC_FLUSH or ASYNC_FLUSH is expected"
        )
    if options.broker_role not in ("ASYNC_MASTER", "SYNC_MASTER", "SLAVE"):
        raise ConfigError(
            f"brokerRole={options.broker_role}: ASYNC_MASTER, SYNC_MASTER or SLAVE is expected"
        )
    least = {
        "mappedFileSizeCommitLog": (options.mapped_file_size_commit_log, 1024),
        "mappedFileSizeConsumeQueue": (options.mapped_file_size_consume_queue, 20),
        "maxHashSlotNum": (options.max_hash_slot_num, 1),
        "maxIndexNum": (options.max_index_num, 2),
        "maxMessageSize": (options.max_message_size, 1),
        "syncFlushTimeout": (options.sync_flush_timeout, 1),
    }
    for name, (value, minimum) in least.items():
        if value < minimum:
            raise ConfigError(f"{name}={value} is too small; at least {minimum} is needed")
