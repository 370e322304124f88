"""Work beside requests: started once, stopped for good, its errors not lost."""

from __future__ import annotations

import asyncio

import pytest

from cosmodrome.env.background import Background


async def test_it_runs_once_and_ends_with_the_stop() -> None:
    began, ended = asyncio.Event(), asyncio.Event()
    starts: list[int] = []

    async def work() -> None:
        starts.append(1)
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    background = Background("test")
    background.start(work)
    background.start(work)
    await began.wait()
    assert (starts, background.running) == ([1], True)
    assert await background.stop()
    assert ended.is_set() and not background.running
    assert not await background.stop()
    background.start(work)
    assert background.running and await background.stop()


async def test_repeated_work_pauses_first() -> None:
    done = asyncio.Event()
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        if len(calls) == 3:
            done.set()

    background = Background("test")
    background.repeat(0, work)
    assert calls == []
    await done.wait()
    await background.stop()
    assert len(calls) >= 3


async def test_an_error_does_not_end_repeated_work(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []
    done = asyncio.Event()

    def work() -> None:
        calls.append(1)
        if len(calls) == 3:
            done.set()
        raise ValueError("odd")

    background = Background("test")
    background.repeat(lambda: 0.001, work)
    await done.wait()
    await background.stop()
    assert "background work failed" in caplog.text and "odd" in caplog.text


async def test_the_stop_tells_what_ended_the_work() -> None:
    async def work() -> None:
        raise ValueError("odd")

    background = Background("test")
    background.start(work)
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="odd"):
        await background.stop()


async def test_who_stops_it_can_be_cancelled_meanwhile() -> None:
    work, going = Background("test"), asyncio.Event()

    async def slow_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await going.wait()

    work.start(slow_end)
    await asyncio.sleep(0)
    stopping = asyncio.create_task(work.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    await asyncio.wait((stopping,))
    assert stopping.cancelled()
    going.set()
