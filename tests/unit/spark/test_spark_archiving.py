"""What an archiver writes down about a batch, over a lake made of dictionaries."""

from __future__ import annotations

from typing import Any, cast

import pytest

pytest.importorskip("pyspark")

from cosmodrome.env.real import real_env
from cosmodrome.errors import ConfigError, StoreCorrupt
from cosmodrome.spark.jobs import archive
from cosmodrome.spark.lake.archiving import Archiver
from cosmodrome.spark.lake.compaction import Merged
from cosmodrome.spark.lake.layout import ArchiveInfo, Lake, Progress, Written
from cosmodrome.spark.read.offsets import Offsets
from cosmodrome.wire.bodies import MessageQueue


def queue(number: int) -> MessageQueue:
    return MessageQueue(topic="t", broker_name="b", queue_id=number)


class Frame:
    def select(self, *columns: str) -> Frame:
        return self

    def coalesce(self, count: int) -> Frame:
        return self


class Session:
    class sparkContext:
        defaultParallelism = 2


class Files:
    root = "/lake"


class FakeLake:
    def __init__(self, planned: dict[int, Offsets]) -> None:
        self.info = ArchiveInfo(id="1", lake="delta", subject={}, filters={})
        self.spark = Session()
        self.files = Files()
        self.planned = planned
        self.written: list[int] = []
        self.kept: Progress | None = None

    def progress(self) -> Progress | None:
        return self.kept

    def record(self, progress: Progress) -> None:
        self.kept = progress

    def planned_ends(self, batch: int) -> Offsets | None:
        return self.planned.get(batch)

    def written_ends(self, batch: int) -> Offsets:
        return {queue(0): 3}

    def checkpoint_id(self) -> str:
        return "q"

    def write(self, frame: Any, batch: int, **how: Any) -> Written:
        self.written.append(batch)
        return Written(1, 1)


class Lock:
    def check(self) -> None:
        pass


def archiver(lake: FakeLake) -> Archiver:
    return Archiver(cast(Any, lake), cast(Any, Lock()), real_env())


def run(lake: FakeLake, batch: int) -> Offsets:
    archiver(lake)(cast(Any, Frame()), batch)
    assert lake.kept is not None
    return lake.kept.ends


def test_the_seam_follows_the_plan() -> None:
    lake = FakeLake({0: {queue(0): 100, queue(1): 7}, 1: {queue(0): 5}, 2: {queue(0): 9}})
    assert run(lake, 0) == {queue(0): 100, queue(1): 7}
    # Queue 0 was made anew, and queue 1 is gone: what the lake has of it stays there.
    assert run(lake, 1) == {queue(0): 5, queue(1): 7}
    assert run(lake, 1) == {queue(0): 5, queue(1): 7}
    assert run(lake, 2) == {queue(0): 9, queue(1): 7}
    assert lake.written == [0, 1, 2]


def test_without_a_plan_the_rows_say_it_and_never_go_back() -> None:
    lake = FakeLake({0: {queue(0): 2, queue(1): 7}})
    run(lake, 0)
    assert run(lake, 1) == {queue(0): 3, queue(1): 7}
    assert run(lake, 2) == {queue(0): 3, queue(1): 7}


def test_a_checkpoint_that_is_not_this_lakes() -> None:
    lake = FakeLake({0: {queue(0): 2}, 1: {queue(0): 4}})
    run(lake, 0)
    run(lake, 1)
    for batch, end in ((0, 2), (1, 6), (1, 3)):
        lake.planned[batch] = {queue(0): end}
        with pytest.raises(StoreCorrupt, match="older than the archive"):
            run(lake, batch)
    assert lake.written == [0, 1]


@pytest.mark.parametrize("path", ["/lake/[1]", "/lake/{a}", "/lake/a*", "/lake/a?"])
def test_a_path_that_spark_could_not_read_again(path: str) -> None:
    info = ArchiveInfo(id="1", lake="parquet", subject={}, filters={})
    with pytest.raises(ConfigError, match="pattern"):
        Lake.create(cast(Any, None), path, info)


class FakeQuery:
    """A stream that never ends by itself."""

    lastProgress = None

    def __init__(self) -> None:
        self.waits = 0
        self.stopped_at = 0

    def awaitTermination(self, timeout: float) -> bool:
        self.waits += 1
        return self.waits > 10

    def stop(self) -> None:
        self.stopped_at = self.waits


class BusyArchiver:
    """It is in the middle of a batch until the fourth look."""

    progress = None
    rows = 5
    merged = Merged()

    def __init__(self, query: FakeQuery) -> None:
        self._query = query

    @property
    def busy(self) -> bool:
        return self._query.waits < 4


def test_a_stream_that_is_to_stop_ends_after_its_running_batch() -> None:
    query: Any = FakeQuery()
    archiver: Any = BusyArchiver(query)
    beats: list[int] = []
    seen: list[archive.Status] = []
    status = archive._follow(
        query,
        archiver,
        beat=lambda: beats.append(query.waits),
        watch=seen.append,
        stop=lambda: query.waits >= 2,
        env=real_env(),
    )
    assert query.stopped_at == 4
    assert beats == [1, 2, 3, 4] and len(seen) == 4
    assert (status.rows, status.batch, status.lag) == (5, -1, None)
