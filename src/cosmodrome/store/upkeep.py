"""What the store does beside taking messages: derived data to disk, checkpoint, disk space.

One task, so nothing here runs twice at once. Queue and index data is written every
`flushIntervalConsumeQueue`, sooner when much has gathered, later when it is little of many
queues; it is synced and vouched for in the checkpoint every
`flushConsumeQueueThoroughInterval`. A failed write is tried again with the next batch. A failed
sync of derived data ends checkpoints for this run: what the kernel dropped cannot be known, so
the next start builds it again.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence

from cosmodrome.env.base import Env
from cosmodrome.env.options import StoreOptions
from cosmodrome.errors import reason_of
from cosmodrome.store.checkpoint import Checkpoint, save_checkpoint
from cosmodrome.store.commit_log.segment import sync_files, write_files
from cosmodrome.store.parts import StoreParts

BATCH_BYTES = 1024 * 1024  # this much in memory starts a batch early
RECOVERY_BATCH_BYTES = 16 * 1024 * 1024  # larger: each batch may carry a whole slot table
# A busy index costs its whole slot table with every batch, so it is written now and then only.
BUSY_INDEX_SECONDS = 5.0
BUSY_INDEX_BYTES = 16 * 1024 * 1024
# A batch opens and writes a file per queue, so many queues with little each are written rarely.
MANY_QUEUES = 256
MANY_QUEUES_SECONDS = 5.0
QUEUE_BATCH_BYTES = 16_384  # of each queue, when they are many
BACKLOG_BYTES_MAX = 64 * 1024 * 1024  # this much in memory refuses messages
DISK_CHECK_SECONDS = 5.0  # so that sends resume well within 10 s after space came back

_log = logging.getLogger(__name__)


class Upkeep:
    def __init__(
        self,
        options: StoreOptions,
        env: Env,
        directories: Sequence[str],
        checkpoint_path: str,
        parts: StoreParts,
    ) -> None:
        self.disk_ratio = 0.0
        self.lock = asyncio.Lock()  # held while derived files are written; hold it to remove one
        self._options = options
        self._env = env
        self._directories = directories
        self._checkpoint_path = checkpoint_path
        self._flush = parts.flush
        self._dispatch = parts.dispatch
        self._queues = parts.queues
        self._index = parts.index
        self._wake = asyncio.Event()
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self._sync_failed = False
        self._disk_full = False
        self.backlog: str | None = None  # why nothing more can be derived
        self.trouble: str | None = None  # why messages are refused for now

    async def start(self) -> None:
        self._stopping = False
        await self.check_disk()
        self._task = asyncio.create_task(self._run(), name="store-upkeep")

    async def stop(self) -> None:
        """Ends between batches, never within one."""
        self._stopping = True
        self._wake.set()
        task, self._task = self._task, None
        if task is not None:
            await task

    def nudge(self) -> None:
        """Cheap; call it whenever derived data grew."""
        size_bytes = self._queues.tail_bytes
        if size_bytes > BATCH_BYTES and size_bytes > self._batch_bytes():
            self._wake.set()

    async def relieve(self) -> None:
        """Write a batch now if much has gathered, during recovery."""
        if self._memory_bytes() > RECOVERY_BATCH_BYTES:
            await self.write_derived()

    async def write_derived(self, *, index_too: bool = True) -> bool:
        """One batch; False when part of it failed and stays in memory."""
        async with self.lock:
            queue_batch = self._queues.pending()
            index_batch = self._index.pending() if self._index is not None and index_too else []
            writes = [item[1] for item in queue_batch] + [item[1] for item in index_batch]
            results: list[OSError | None] = []
            try:
                if writes:
                    results = await self._env.offload(
                        functools.partial(write_files, self._env.disk, writes)
                    )
            finally:
                if len(results) != len(writes):  # cancelled: nothing is known to be written
                    results = [OSError("interrupted")] * len(writes)
                failure = self._queues.written(queue_batch, results[: len(queue_batch)])
                if self._index is not None:
                    index_results = results[len(queue_batch) :]
                    failure = self._index.written(index_batch, index_results) or failure
            self._judge(failure)
            return failure is None

    async def write_checkpoint(self) -> bool:
        """Write and sync derived data, then say so in the checkpoint; False if that failed."""
        log_ms, derived_ms = self._flush.synced_ms, self._dispatch.last_ms
        if self._sync_failed or not await self.write_derived():
            return False
        paths = set(self._queues.unsynced)
        if self._index is not None:
            paths |= self._index.unsynced
        fresh = Checkpoint(log_ms, derived_ms, derived_ms)
        try:
            await self._env.offload(functools.partial(self._vouch, sorted(paths), fresh))
        except OSError as error:
            self._sync_failed = True
            _log.error("checkpoint_failed error=%s next=%s", error, "check the disk")
            return False
        self._queues.unsynced -= paths
        if self._index is not None:
            self._index.unsynced -= paths
        return True

    async def check_disk(self) -> None:
        """Look how full the disk is, and take or refuse messages accordingly."""
        self.disk_ratio = await self._env.offload(self._fullest)
        self._disk_full = self.disk_ratio * 100 > self._options.disk_space_warning_level_ratio
        self._conclude()

    def note_cleaning(self, ratio: float) -> None:
        """What a look for files to remove found; it says "full" or "fine", or leaves it open."""
        self.disk_ratio = ratio
        if ratio * 100 > self._options.disk_space_warning_level_ratio:
            self._disk_full = True
        elif ratio * 100 < self._options.disk_space_clean_forcibly_ratio:
            self._disk_full = False
        self._conclude()

    # --- inside ------------------------------------------------------------------------------
    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        interval = max(0.01, self._options.flush_interval_consume_queue / 1000)
        thorough = max(0.01, self._options.flush_consume_queue_thorough_interval / 1000)
        checkpoint_at = loop.time() + thorough
        index_at = queues_at = 0.0
        disk_at = loop.time() + DISK_CHECK_SECONDS
        while True:
            try:
                async with asyncio.timeout(interval):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            if self._stopping:
                return
            try:
                if loop.time() >= checkpoint_at:
                    checkpoint_at = loop.time() + thorough
                    await self.write_checkpoint()
                elif loop.time() >= queues_at or self._queues_are_due():
                    queues_at = loop.time() + MANY_QUEUES_SECONDS
                    index_too = loop.time() >= index_at or self._index_is_due()
                    if index_too:
                        index_at = loop.time() + BUSY_INDEX_SECONDS
                    await self.write_derived(index_too=index_too)
                if loop.time() >= disk_at:
                    disk_at = loop.time() + DISK_CHECK_SECONDS
                    await self.check_disk()
            except Exception as error:
                _log.exception("upkeep_failed")
                self._flush.fail(
                    f"the store's upkeep failed ({reason_of(error)}); see the log file"
                )
                return

    def _vouch(self, paths: list[str], fresh: Checkpoint) -> None:
        sync_files(self._env.disk, paths)
        save_checkpoint(self._env.disk, self._checkpoint_path, fresh)

    def _queues_are_due(self) -> bool:
        few = self._queues.dirty_count <= MANY_QUEUES
        return few or self._queues.tail_bytes > self._batch_bytes()

    def _batch_bytes(self) -> int:
        """How much the queues that grew should have together before a file of each is opened."""
        return min(QUEUE_BATCH_BYTES * self._queues.dirty_count, BACKLOG_BYTES_MAX // 4)

    def _index_is_due(self) -> bool:
        index = self._index
        return index is not None and (not index.busy or index.memory_bytes > BUSY_INDEX_BYTES)

    def _memory_bytes(self) -> int:
        index_bytes = self._index.memory_bytes if self._index is not None else 0
        return self._queues.tail_bytes + index_bytes

    def _judge(self, failure: OSError | None) -> None:
        self.backlog = None
        if failure is not None:
            _log.error("queue_write_failed error=%s next=%s", failure, "retried by itself")
            if self._memory_bytes() > BACKLOG_BYTES_MAX:
                self.backlog = (
                    f"queue files cannot be written ({reason_of(failure)}); free disk"
                    " space, sends resume by themselves"
                )
        self._conclude()

    def _conclude(self) -> None:
        before, self.trouble = self.trouble, self.backlog
        if self.backlog is None and self._disk_full:
            percent_max = self._options.disk_space_warning_level_ratio
            self.trouble = (
                f"the disk of the store is {self.disk_ratio:.1%} used, sends"
                f" stop at {percent_max}%; free space or raise diskSpaceWarningLevelRatio"
            )
        if before is None and self.trouble is not None:
            _log.error("sends_refused directory=%s reason=%s", self._directories[0], self.trouble)
        elif before is not None and self.trouble is None:
            _log.warning("sends_taken_again")

    def _fullest(self) -> float:
        return max(self._env.disk.usage(path).ratio for path in self._directories)
