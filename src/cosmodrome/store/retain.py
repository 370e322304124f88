"""What goes: old commit-log files, then the queue and index files that only named their records.

Every `cleanResourceInterval` the oldest log files go when they have expired by their time of
last write and it is the hour for it (`deleteWhen`), or the disk is fuller than
`diskMaxUsedSpaceRatio`, or somebody asked (`request`, good for twenty looks). Above
`diskSpaceCleanForciblyRatio` the oldest go even if they have not expired, until the disk is
below it again, and only then those that a linked slave still needs (`hold_back`).
Never the last file, never one that is not synced and dispatched, at most
`deleteFileBatchMax` per look, always the oldest first, so the log never has a hole.

The log's first offset moves before a file is removed, and a slice of a removed file stays
valid, so a reader sees a message whole or not at all. Two tasks: the removal of queue files,
of which there may be thousands, never holds up the log, and neither holds up the disk check.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable

from cosmodrome.env.base import Env
from cosmodrome.env.options import StoreOptions
from cosmodrome.errors import ConfigError
from cosmodrome.store.commit_log.segment import segment_path
from cosmodrome.store.parts import StoreParts
from cosmodrome.store.upkeep import Upkeep

FIRST_LOOK_SECONDS = 60.0
REQUESTED_LOOKS = 20  # Compat: what one administrator's request is good for
QUEUES_PER_STEP = 32
HOUR_MS = 3_600_000

_log = logging.getLogger(__name__)


def hours_of(text: str) -> frozenset[int]:
    """The hours that `deleteWhen` lists."""
    hours = set()
    for word in text.split(";"):
        if not word.strip():
            continue
        if not word.strip().isdecimal() or not 0 <= int(word) <= 23:
            raise ConfigError(
                f"deleteWhen={text}: {word.strip()!r} is no hour; list hours from 00 to 23,"
                " separated by ;"
            )
        hours.add(int(word))
    return frozenset(hours)


class Retention:
    def __init__(
        self,
        options: StoreOptions,
        env: Env,
        root: str,
        parts: StoreParts,
        upkeep: Upkeep,
        hold_back: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._options = options
        self._env = env
        hours_of(options.delete_when)  # refused at once rather than at the first look
        self._root = root
        self._log = parts.log
        self._flush = parts.flush
        self._dispatch = parts.dispatch
        self._queues = parts.queues
        self._index = parts.index
        self._upkeep = upkeep
        self._hold_back = hold_back  # what is needed elsewhere begins there
        self._kept = -1  # the last file that was kept for that
        self._requested = 0
        self._stuck: int | None = None  # a log file that could not be removed, and when to retry
        self._retry_at = 0.0
        self._cleaned_to = -1  # queues and index name nothing below this log offset
        self._wake_log = asyncio.Event()
        self._wake_derived = asyncio.Event()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._stopping = False
        self._cleaned_to = self._log.min_offset
        self._tasks = [
            asyncio.create_task(
                self._repeat(self._wake_log, self.clean_log), name="store-retention-log"
            ),
            asyncio.create_task(
                self._repeat(self._wake_derived, self.clean_derived),
                name="store-retention-derived",
            ),
        ]

    async def stop(self) -> None:
        """Ends between two files, never within one."""
        self._stopping = True
        self._wake_log.set()
        self._wake_derived.set()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            await task

    def request(self) -> None:
        """Remove what has expired now, whatever the hour."""
        self._requested = REQUESTED_LOOKS
        self._wake_log.set()

    def request_derived(self) -> None:
        """Remove queue and index files now whose messages are gone."""
        self._wake_derived.set()

    async def clean_log(self) -> int:
        """One look at the log; how many files went."""
        loop = asyncio.get_running_loop()
        stuck = self._stuck
        if stuck is not None and (loop.time() < self._retry_at or not await self._remove(stuck)):
            return 0
        space, at_once = await self._judge_space()
        due = self._requested > 0 or space or self._hour() in hours_of(self._options.delete_when)
        self._requested = max(0, self._requested - 1)
        removed = 0
        while due and removed < self._options.delete_file_batch_max and not self._stopping:
            base = self._log.min_offset
            if not self._removable(base):
                break
            if not at_once and (not await self._expired(base) or self._is_needed(base)):
                break
            if not await self._remove(base):
                break
            removed += 1
            await self._pause(self._options.delete_commit_log_files_interval)
            if at_once:
                _, at_once = await self._judge_space()
        if removed:
            await self._upkeep.check_disk()
        return removed

    async def clean_derived(self) -> int:
        """Follow the log's first offset with queues and index; how many files went."""
        log_min = self._log.min_offset
        if log_min == self._cleaned_to:
            return 0
        removed = 0
        for at, queue in enumerate(self._queues):
            if self._stopping:
                return removed
            if at % QUEUES_PER_STEP == 0:
                await asyncio.sleep(0)
            queue.forget_below(log_min)
            while (base := queue.expired_file(log_min)) is not None and not self._stopping:
                path = segment_path(queue.directory, base)
                async with self._upkeep.lock:
                    # A batch under way may write files, and a dropped queue's name may be reused.
                    if self._queues.get(queue.topic, queue.queue_id) is not queue:
                        break
                    self._queues.let_go(path)
                    if not await self._try(functools.partial(self._env.disk.remove, path), path):
                        return removed  # tried again at the next look
                    queue.first = base + queue.file_bytes
                removed += 1
                await self._pause(self._options.delete_consume_queue_files_interval)
        while self._index is not None and not self._stopping:
            async with self._upkeep.lock:
                oldest = self._index.take_expired(log_min)
                if oldest is None:
                    break
                if not await self._try(functools.partial(self._env.disk.remove, oldest), oldest):
                    break  # the next start finds it again
            removed += 1
        self._cleaned_to = log_min
        return removed

    # --- inside ------------------------------------------------------------------------------
    async def _repeat(self, wake: asyncio.Event, look: Callable[[], Awaitable[int]]) -> None:
        seconds = FIRST_LOOK_SECONDS
        while True:
            try:
                async with asyncio.timeout(seconds):
                    await wake.wait()
            except TimeoutError:
                pass
            wake.clear()
            if self._stopping:
                return
            try:
                await look()
            except Exception:
                _log.exception("retention_failed next=%s", "tried again by itself")
            seconds = self._options.clean_resource_interval / 1000

    def _removable(self, base: int) -> bool:
        end = base + self._log.segment_bytes
        last = self._log.base_of(self._log.written_end)
        return end <= min(last, self._flush.synced_end, self._dispatch.cursor)

    def _is_needed(self, base: int) -> bool:
        needed_from = self._hold_back()
        if needed_from is None or base + self._log.segment_bytes <= needed_from:
            return False
        if base != self._kept:
            self._kept = base
            path = self._log.path_of(base)
            _log.warning("log_file_kept_for_slave path=%s slave_at=%d", path, needed_from)
        return True

    async def _expired(self, base: int) -> bool:
        path = self._log.path_of(base)
        try:
            written_ms = await self._env.offload(functools.partial(self._env.disk.mtime_ms, path))
        except FileNotFoundError:
            return True  # removed by hand
        except OSError as error:
            _log.error("log_file_unreadable path=%s error=%s", path, error)
            return False
        kept_ms = self._options.file_reserved_time * HOUR_MS
        return self._env.clock.now_ms() >= written_ms + kept_ms

    async def _remove(self, base: int) -> bool:
        path = self._log.path_of(base)
        self._log.expire(base)
        self._wake_derived.set()
        if await self._try(functools.partial(self._env.disk.remove, path), path):
            self._stuck = None
            return True
        self._stuck = base
        retry_seconds = self._options.redelete_hanged_file_interval / 1000
        self._retry_at = asyncio.get_running_loop().time() + retry_seconds
        return False

    async def _try(self, remove: Callable[[], None], path: str) -> bool:
        try:
            await self._env.offload(remove)
        except OSError as error:
            _log.error("file_not_removed path=%s error=%s next=%s", path, error, "tried again")
            return False
        _log.info("file_removed path=%s", path)
        return True

    async def _judge_space(self) -> tuple[bool, bool]:
        """Whether expired files must go at any hour, and whether any file may."""
        ratio = await self._env.offload(self._fullest)
        if ratio is None:
            return True, False
        self._upkeep.note_cleaning(ratio)
        options = self._options
        at_once = ratio * 100 > min(
            options.disk_space_clean_forcibly_ratio, options.disk_space_warning_level_ratio
        )
        space = ratio * 100 > min(95, max(10, options.disk_max_used_space_ratio))
        return space or at_once, at_once and options.clean_file_forcibly_enable

    def _fullest(self) -> float | None:
        """The used part of the fuller disk, None when it cannot be told."""
        try:
            return max(
                self._env.disk.usage(path).ratio for path in (self._log.directory, self._root)
            )
        except OSError as error:
            _log.error("disk_usage_unknown error=%s", error)
            return None

    def _hour(self) -> int:
        return time.localtime(self._env.clock.now_ms() // 1000).tm_hour

    async def _pause(self, interval_ms: int) -> None:
        await asyncio.sleep(interval_ms / 1000)
