"""Batches of a stream into a lake, each exactly once.

Spark plans a batch, writes the plan down, runs it, and writes down that it is done; a crash makes
it run the same plan again. In between, `Archiver` puts the rows into the lake under the number of
the batch (a repetition replaces them) and then writes the progress file. A batch whose progress is
there is complete and is not written again. That holds only while checkpoint and lake belong
together, so a checkpoint that is missing, strange or older than the lake is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from cosmodrome.env.base import Env
from cosmodrome.errors import ConfigError, StoreCorrupt
from cosmodrome.spark import json_values
from cosmodrome.spark.lake.compaction import Compaction, Merged
from cosmodrome.spark.lake.layout import CHECKPOINT, VALUE, Lake, Progress, later
from cosmodrome.spark.lake.lock import LakeLock
from cosmodrome.spark.read.rows import COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)


class Archiver:
    """What the stream calls for every batch. `before` is called ahead of each step, for tests."""

    def __init__(
        self,
        lake: Lake,
        lock: LakeLock,
        env: Env,
        *,
        compression: str = "zstd",
        compact_after: int = 32,
        before: Callable[[str], None] = lambda step: None,
    ) -> None:
        self.lake = lake
        self.busy = False  # a batch is running
        self.rows = 0  # written by this run
        self.batches = 0
        self.merged = Merged()
        self._lock = lock
        self._env = env
        self._compression = compression
        self._compact_after = compact_after
        self._before = before
        self._values = json_values.load(lake) if lake.info.json else None
        self.progress: Progress | None = lake.progress()

    def check_checkpoint(self) -> None:
        """Refuse to go on with a checkpoint that is not this lake's."""
        if self.progress is None:
            return
        found = self.lake.checkpoint_id()
        if found != self.progress.query:
            what = "is missing" if found is None else "belongs to another stream"
            raise ConfigError(
                f"the checkpoint of this archive {what} ({self.lake.files.path(CHECKPOINT)});"
                " going on would double or replace rows. Restore it, or start a new archive in"
                " another directory"
            )

    def recover(self) -> None:
        """Finish what a killed writer left undone. The caller holds the lock."""
        self.lake.sweep()
        self.compaction().finish_interrupted()

    def __call__(self, frame: DataFrame, batch: int) -> None:
        self.busy = True
        try:
            self._lock.check()
            if not self._is_complete(batch):
                # No more files than tasks that run at once, however many queues there are.
                tasks = self.lake.spark.sparkContext.defaultParallelism
                self._take(frame.select(*COLUMNS).coalesce(max(1, tasks)), batch)
            self.compact()
        finally:
            self.busy = False

    def compact(self, *, everything: bool = False) -> Merged:
        """Merge small directories; with `everything` wherever there are two."""
        if self.progress is None:
            return Merged()
        merged = self.compaction().run(
            self.progress.batch,
            more_than=1 if everything else self._compact_after,
            everything=everything,
        )
        self.merged = Merged(
            self.merged.merges + merged.merges,
            self.merged.directories + merged.directories,
            self.merged.rows + merged.rows,
        )
        return merged

    def compaction(self) -> Compaction:
        column = self._values.column if self._values is not None else None
        return Compaction(
            self.lake, value=column, compression=self._compression, before=self._before
        )

    def _is_complete(self, batch: int) -> bool:
        last = self.progress
        if last is None or batch > last.batch:
            return False
        planned = self.lake.planned_ends(batch) or {}
        if batch < last.batch or last.ends != {**last.ends, **planned}:
            raise StoreCorrupt(
                f"the checkpoint is older than the archive: it runs batch {batch} again, and"
                f" {self.lake.files.root} holds {last.batch} already; restore the checkpoint that"
                " belongs to it, or start a new archive in another directory"
            )
        return True

    def _take(self, frame: DataFrame, batch: int) -> None:
        if self._values is None:
            self._write(frame, batch)
            return
        frame.persist()
        try:
            self._write(self._with_values(frame, batch), batch)
        finally:
            frame.unpersist()

    def _with_values(self, frame: DataFrame, batch: int) -> DataFrame:
        assert self._values is not None
        wider = self._values.widened(json_values.infer(frame))
        if wider is not self._values:
            if self._values.exact and not wider.exact:
                log.warning(
                    "event=json-types-differ batch=%d: fields have other types than before; the"
                    " column keeps the first ones, cosmodrome.spark.lake.table reads the bodies",
                    batch,
                )
            json_values.save(self.lake, wider, batch)
            self._values = wider
        column = wider.column
        return frame if column is None else frame.withColumn(VALUE, json_values.parsed(column))

    def _write(self, frame: DataFrame, batch: int) -> None:
        self._before("rows")
        written = self.lake.write(
            frame, batch, compression=self._compression, merge_schema=self._values is not None
        )
        self._before("progress")
        last = self.progress
        before = last.ends if last is not None else {}
        # The plan counts even where an end goes back: such a queue was made anew.
        ends = self.lake.planned_ends(batch)
        if ends is None:
            ends = later(before, self.lake.written_ends(batch))
        query = last.query if last is not None else self.lake.checkpoint_id()
        progress = Progress(
            batch=batch,
            query=query or "",
            ends={**before, **ends},
            rows=(last.rows if last is not None else 0) + written.rows,
            newest_ms=max(written.newest_ms, last.newest_ms if last is not None else 0),
            at_ms=self._env.clock.now_ms(),
        )
        self.lake.record(progress)
        self.progress = progress
        self.rows += written.rows
        self.batches += 1
        self._before("done")
