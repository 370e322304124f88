"""The window: bounds, order, and what a cancelled wait leaves behind."""

from __future__ import annotations

import asyncio

import pytest

from cosmodrome.client.send.window import Window
from cosmodrome.errors import ConfigError


async def test_it_is_full_by_count_or_by_bytes() -> None:
    window = Window(2, 100)
    window.take(1, 1000)  # one message always fits
    assert window.full
    window.give(1, 1000)
    assert not window.full
    window.take(2, 10)
    assert window.full
    with pytest.raises(ConfigError):
        Window(0)


async def test_room_is_given_in_order() -> None:
    window = Window(1)
    window.take(1, 1)
    order: list[int] = []

    async def one(number: int) -> None:
        await window.wait(1, 1)
        order.append(number)
        await asyncio.sleep(0)
        window.give(1, 1)

    tasks = [asyncio.ensure_future(one(number)) for number in range(5)]
    await asyncio.sleep(0)
    assert window.full and not order
    window.give(1, 1)
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3, 4]
    assert (window.messages, window.bytes) == (0, 0)


async def test_nobody_overtakes_those_who_wait() -> None:
    window = Window(2)
    window.take(2, 2)
    waiting = asyncio.ensure_future(window.wait(2, 2))
    await asyncio.sleep(0)
    window.give(1, 1)
    assert window.full
    await waiting
    assert window.messages == 3  # a batch may exceed the count, once


async def test_a_cancelled_wait_takes_nothing() -> None:
    window = Window(1)
    window.take(1, 1)
    early = asyncio.ensure_future(window.wait(1, 1))
    late = asyncio.ensure_future(window.wait(1, 1))
    last = asyncio.ensure_future(window.wait(1, 1))
    await asyncio.sleep(0)
    early.cancel()
    await asyncio.sleep(0)
    window.give(1, 1)  # granted to `late` ...
    late.cancel()  # ... which does not want it any more
    await asyncio.gather(early, late, return_exceptions=True)
    await last
    assert window.messages == 1
    window.give(1, 1)
    assert (window.messages, window.bytes) == (0, 0)
    assert not window.full
