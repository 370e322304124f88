"""Syncing off the loop, by both twins of the thread and under both event loops."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import gc
import importlib
import logging
import operator
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.store.store_kit import bodies, draft, put, small

from cosmodrome.env.real import (
    LoopSyncer,
    PythonSyncThread,
    RealDisk,
    SyncThread,
    new_syncer,
    real_env,
)
from cosmodrome.store.store import Store

Make = Callable[[], SyncThread]


@pytest.fixture(params=["native", "pure"])
def twin(request: pytest.FixtureRequest) -> Make:
    if request.param == "pure":
        return PythonSyncThread
    try:
        made: Make = importlib.import_module("cosmodrome.speed.syncer").SyncThread
    except ImportError:
        if os.environ.get("COSMODROME_REQUIRE_NATIVE"):
            raise
        pytest.skip("the compiled twin is not built")
    return made


@pytest.fixture(params=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    factory = asyncio.new_event_loop
    if request.param == "uvloop":
        factory = pytest.importorskip("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        yield runner


@pytest.fixture
def good(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "good", os.O_RDWR | os.O_CREAT)
    os.write(descriptor, b"data")
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def bad() -> Iterator[int]:
    """A descriptor that cannot be synced."""
    ends = os.pipe()
    yield ends[1]
    for end in ends:
        os.close(end)


def never() -> None:
    raise AssertionError("nothing failed")


def outcome(thread: SyncThread) -> int:
    readable, _, _ = select.select([thread.bell], [], [], 60)
    assert readable, "the bell did not ring within a minute"
    error_number = thread.end()
    assert error_number is not None
    return error_number


def threads_and_descriptors() -> tuple[int, int]:
    """How many there are that sync, and of all; those of earlier tests may be ending."""
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("this system does not tell its threads")
    return len(syncing()), len(os.listdir("/proc/self/fd"))


def soon(check: Callable[[], bool]) -> bool:
    """A thread that has ended is seen for a moment longer."""
    for _ in range(500):
        if check():
            return True
        select.select([], [], [], 0.01)
    return False


def nothing_left(before: tuple[int, int]) -> bool:
    return soon(lambda: all(map(operator.le, threads_and_descriptors(), before)))


def syncing() -> list[str]:
    """The threads of both twins that are there."""
    found = [thread.name for thread in threading.enumerate()]
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            found.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return [name for name in found if name == "cosmo-sync"]


# --- the thread --------------------------------------------------------------------------------
def test_the_bell_rings_once_per_sync(twin: Make, good: int) -> None:
    thread = twin()
    assert thread.end() is None
    for count in (1, 0, 300):
        thread.begin([good] * count, never)
        assert outcome(thread) == 0
        assert thread.end() is None
        assert select.select([thread.bell], [], [], 0)[0] == []
    thread.close()


def test_a_failure_is_told_off_the_loop_before_the_bell(twin: Make, good: int, bad: int) -> None:
    thread = twin()
    heard: list[tuple[bool, bool]] = []

    def failed() -> None:
        rung = bool(select.select([thread.bell], [], [], 0.02)[0])
        heard.append((threading.get_ident() == threading.main_thread().ident, rung))

    thread.begin([good, bad, good], failed)
    assert outcome(thread) == errno.EINVAL
    assert heard == [(False, False)]
    thread.begin([good], never)
    assert outcome(thread) == 0
    thread.close()


def test_who_was_told_of_a_failure_may_fail_too(
    twin: Make, bad: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reported: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: reported.append(found.exc_value))
    thread = twin()
    with caplog.at_level(logging.ERROR):
        thread.begin([bad], never)
        assert outcome(thread) == errno.EINVAL
    assert [str(error) for error in reported] == ["nothing failed"] or "listener" in caplog.text
    thread.close()


def test_one_sync_at_a_time_and_none_after_close(twin: Make, good: int) -> None:
    thread = twin()
    thread.begin([good], never)
    with pytest.raises(RuntimeError, match="one sync at a time"):
        thread.begin([good], never)
    assert outcome(thread) == 0
    thread.close()
    thread.close()
    assert thread.end() is None
    with pytest.raises(RuntimeError, match="none after close"):
        thread.begin([good], never)


@pytest.mark.parametrize("way", ["closed", "dropped", "closed under way", "dropped under way"])
def test_nothing_is_left_behind(twin: Make, good: int, way: str) -> None:
    before = threads_and_descriptors()
    for _ in range(20):
        thread = twin()
        thread.begin([good], never)
        if "under way" not in way:
            assert outcome(thread) == 0
        if "closed" in way:
            thread.close()
            if "under way" not in way:
                assert threads_and_descriptors()[1] <= before[1]
        del thread
    gc.collect()
    assert nothing_left(before)


def test_a_listener_is_let_go_when_the_sync_has_ended(twin: Make, good: int) -> None:
    def failed() -> None:
        raise AssertionError

    thread = twin()
    count = sys.getrefcount(failed)
    for _ in range(10):
        thread.begin([good], failed)
        assert outcome(thread) == 0
    thread.begin([good], never)  # the pure twin drops the one before when it takes the next
    assert outcome(thread) == 0
    thread.close()
    assert sys.getrefcount(failed) == count


# --- the loop's side ---------------------------------------------------------------------------
def test_the_next_may_begin_when_one_is_done(
    twin: Make, runner: asyncio.Runner, tmp_path: Path
) -> None:
    file = RealDisk().create_segment(str(tmp_path / "0"), 4096)
    ended: list[BaseException | None] = []

    async def main() -> None:
        finished = asyncio.Event()
        syncer = LoopSyncer(twin())

        def done(error: BaseException | None) -> None:
            assert threading.current_thread() is threading.main_thread()
            ended.append(error)
            if len(ended) < 100:
                syncer.begin([file, file], never, done)
            else:
                finished.set()

        syncer.begin([file], never, done)
        async with asyncio.timeout(30):
            await finished.wait()
        syncer.close()
        syncer.close()

    runner.run(asyncio.sleep(0))
    opened = threads_and_descriptors()
    runner.run(main())
    assert ended == [None] * 100
    assert nothing_left(opened)
    file.close()


def test_a_failure_is_an_error_with_its_number(
    twin: Make, runner: asyncio.Runner, tmp_path: Path, bad: int
) -> None:
    file: Any = RealDisk().create_segment(str(tmp_path / "0"), 4096)
    real, file._fd = file._fd, bad
    order: list[str] = []

    async def main() -> None:
        syncer = LoopSyncer(twin())
        heard: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        syncer.begin([file], lambda: order.append("failed"), heard.set_result)
        error = await asyncio.wait_for(heard, 60)
        order.append("done")
        assert isinstance(error, OSError) and error.errno == errno.EINVAL
        assert str(error) == f"[Errno {errno.EINVAL}] {os.strerror(errno.EINVAL)}"
        syncer.close()

    runner.run(main())
    assert order == ["failed", "done"]
    file._fd = real
    file.close()


class HandThread:
    """A thread that ends a sync when it is told to."""

    def __init__(self) -> None:
        self.bell, self.ring = os.pipe()
        self.given: list[int] = []

    def begin(self, descriptors: Any, failed: Callable[[], None]) -> None:
        self.given = list(descriptors)

    def end(self) -> int | None:
        os.read(self.bell, 1)
        return 0

    def close(self) -> None:
        os.close(self.bell)
        os.close(self.ring)


async def test_a_file_closed_meanwhile_stays_open_until_it_is_synced(tmp_path: Path) -> None:
    disk = RealDisk()
    files = [disk.create_segment(str(tmp_path / name), 4096) for name in "ab"]
    thread = HandThread()
    syncer = LoopSyncer(thread)
    heard: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
    syncer.begin(files, never, heard.set_result)
    files[0].close()
    assert len(thread.given) == 2
    for descriptor in thread.given:
        os.fstat(descriptor)
    os.write(thread.ring, b"!")
    assert await asyncio.wait_for(heard, 60) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(thread.given[0])
    os.fstat(thread.given[1])
    files[1].close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(thread.given[1])
    syncer.close()


async def test_files_of_another_disk_are_refused(twin: Make) -> None:
    syncer = LoopSyncer(twin())
    other: Any = object()
    with pytest.raises(TypeError, match="another disk"):
        syncer.begin([other], never, lambda _: None)
    syncer.close()


def test_done_is_not_called_after_close(twin: Make, tmp_path: Path) -> None:
    file = RealDisk().create_segment(str(tmp_path / "0"), 4096)
    before = threads_and_descriptors()
    heard: list[object] = []

    async def main() -> None:
        syncer = LoopSyncer(twin())
        syncer.begin([file], never, heard.append)
        syncer.close()
        await asyncio.sleep(0.05)

    asyncio.run(main())
    assert heard == []
    assert nothing_left(before)


def test_many_loops_at_once(twin: Make, tmp_path: Path) -> None:
    before = threads_and_descriptors()
    counts: list[int] = []

    async def one(at: int) -> int:
        file = RealDisk().create_segment(str(tmp_path / str(at)), 4096)
        syncer = LoopSyncer(twin())
        loop = asyncio.get_running_loop()
        for number in range(30):
            file.write(b"x", number)
            heard: asyncio.Future[BaseException | None] = loop.create_future()
            syncer.begin([file], never, heard.set_result)
            assert await asyncio.wait_for(heard, 60) is None
        syncer.close()
        file.close()
        return number + 1

    workers = [
        threading.Thread(target=lambda at=at: counts.append(asyncio.run(one(at))))
        for at in range(6)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert counts == [30] * 6
    assert nothing_left(before)


def test_stores_leave_nothing_behind(twin: Make, runner: asyncio.Runner, tmp_path: Path) -> None:
    async def main(at: int) -> list[bytes]:
        env = dataclasses.replace(real_env(), syncer=lambda: LoopSyncer(twin()))
        stores = [Store(small(tmp_path / f"{at} {number}"), env) for number in range(3)]
        for store in stores:
            await store.start()
        for number in range(20):
            await asyncio.gather(*(put(store, draft(b"%d" % number)) for store in stores))
        assert len(syncing()) == len(stores)
        found = [body for store in stores for body in bodies(store)]
        for store in stores:
            await store.stop()
        return found

    threads_and_descriptors()  # or skip
    assert runner.run(main(0)) == [b"%d" % number for number in range(20)] * 3
    gc.collect()
    descriptors = threads_and_descriptors()[1]
    assert runner.run(main(1)) == [b"%d" % number for number in range(20)] * 3
    gc.collect()
    assert soon(lambda: syncing() == [])
    assert threads_and_descriptors()[1] <= descriptors


@pytest.mark.parametrize(("cores", "compiled"), [({0}, False), ({0, 1}, True)])
async def test_one_core_takes_the_thread_that_waits_its_turn(
    monkeypatch: pytest.MonkeyPatch, cores: set[int], compiled: bool
) -> None:
    pytest.importorskip("cosmodrome.speed.syncer")
    monkeypatch.setattr("cosmodrome.speed.choice.compiled", importlib.import_module)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores, raising=False)
    syncer = new_syncer()
    assert isinstance(syncer, LoopSyncer)
    assert isinstance(syncer._thread, PythonSyncThread) is not compiled
    syncer.close()
