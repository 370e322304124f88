"""Filters that work, fail, talk nonsense and never come back."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading

import pytest
from tests.unit.filterserver.filter_kit import PACKED, data, filter_of, record
from tests.virtual_time import virtual_time

from cosmodrome.env.real import real_env
from cosmodrome.errors import Code, ProtocolError, Refused
from cosmodrome.filterserver.filters import Filter, Message
from cosmodrome.filterserver.sieve import Sieve, sift
from cosmodrome.wire.record import encode_record

PLENTY_MS = 30_000


def colour_is(colour: str) -> Filter:
    return filter_of(lambda message: message.properties.get("colour") == colour)


def test_what_passes_stays_byte_for_byte() -> None:
    records = [
        record(0, colour="green"),
        record(1, colour="red"),
        record(2, b"z" * 1000, sys_flag=PACKED, colour="green"),
    ]
    sifted = sift(colour_is("green"), data(*records), "g")
    assert sifted.data == encode_record(records[0]) + encode_record(records[2])
    assert (sifted.passed, sifted.seen) == (2, 3)
    assert sift(colour_is("blue"), data(*records), "g").data == b""
    body = filter_of(lambda message: message.body == b"z" * 1000)
    assert sift(body, data(*records), "g").data == encode_record(records[2])


def test_the_filter_knows_for_whom_it_works() -> None:
    groups: list[str] = []

    def remember(message: Message) -> bool:
        groups.append(message.consumer_group)
        return True

    sift(filter_of(remember), data(record()), "g7")
    assert groups == ["g7"]


def test_a_damaged_pull_is_an_error() -> None:
    with pytest.raises(ProtocolError):
        sift(colour_is("green"), data(record())[:-3], "g")


@pytest.mark.parametrize(
    ("matches", "said"),
    [
        (lambda message: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda message: sys.exit(3), "raised SystemExit: 3"),
        (lambda message: None, "returned a NoneType"),
        (lambda message: 1, "returned a int"),
    ],
)
async def test_a_filter_without_answer_loses_nothing(
    matches: object, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    sieve = Sieve(real_env().offload, PLENTY_MS)
    bad = filter_of(matches, "acme.Bad")  # type: ignore[arg-type]
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            with pytest.raises(Refused) as caught:
                await sieve.run(bad, data(record(41)), "g")
    assert caught.value.code == Code.SYSTEM_ERROR
    assert "acme.Bad" in caught.value.remark and said in caught.value.remark
    assert "offset 41 of T, queue 3" in caught.value.remark
    assert caplog.text.count("filter_failed") == 1  # not once per pull
    good = await sieve.run(colour_is("green"), data(record(colour="green")), "g")
    assert good.passed == 1


async def test_a_filter_that_hangs_is_left_alone_until_it_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = threading.Event()
    calls = 0

    def hang(message: Message) -> bool:
        nonlocal calls
        calls += 1
        return release.wait(60)

    sieve = Sieve(real_env().offload, 1000)
    slow = filter_of(hang, "acme.Slow")
    try:
        with pytest.raises(Refused, match=r"acme\.Slow did not answer within 1000 ms"):
            await sieve.run(slow, data(record()), "g")
        assert sieve.overdue == 1
        sieve._timeout_ms = PLENTY_MS  # for the others, on a busy machine
        with pytest.raises(Refused, match="has not come back"):  # refused without waiting
            await sieve.run(slow, data(record()), "g")
        assert calls == 1
        assert (await sieve.run(filter_of(lambda m: True), data(record()), "g")).passed == 1
    finally:
        release.set()
    async with asyncio.timeout(60):
        while sieve.overdue:
            await asyncio.sleep(0.01)
    assert (await sieve.run(slow, data(record()), "g")).passed == 1
    assert "filter_overdue" in caplog.text and "filter_back" in caplog.text


async def test_one_pull_at_a_time_per_filter() -> None:
    running = most = 0

    def count(message: Message) -> bool:
        nonlocal running, most
        running += 1
        most = max(most, running)
        threading.Event().wait(0.01)
        running -= 1
        return True

    sieve = Sieve(real_env().offload, PLENTY_MS)
    one = filter_of(count)
    await asyncio.gather(*(sieve.run(one, data(record()), "g") for _ in range(8)))
    assert most == 1


@virtual_time
async def test_no_turn_in_time_is_busy() -> None:
    async def offload(work: object) -> object:
        await asyncio.sleep(0.5)
        return work()  # type: ignore[operator]

    sieve = Sieve(offload, 100)  # type: ignore[arg-type]
    one = filter_of(lambda message: True)
    first, second = await asyncio.gather(
        sieve.run(one, data(record()), "g"),
        sieve.run(one, data(record()), "g"),
        return_exceptions=True,
    )
    for error, said in ((first, "got no thread"), (second, "more pulls before this one")):
        assert isinstance(error, Refused) and error.code == Code.SYSTEM_BUSY
        assert said in error.remark
    assert sieve.overdue == 0  # it is not the filter's fault
    await asyncio.sleep(0.6)


async def test_a_caller_that_goes_away_leaves_the_turn_to_others() -> None:
    release = threading.Event()
    sieve = Sieve(real_env().offload, PLENTY_MS)
    one = filter_of(lambda message: release.wait(60))
    task = asyncio.create_task(sieve.run(one, data(record()), "g"))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    assert (await sieve.run(one, data(record()), "g")).passed == 1
