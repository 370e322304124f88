"""Sends of many connections that come in one turn of the loop are staged together."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.twins.test_twins_lanes import Side, Wire, compare, frame, item, random_send, send_fields

from cosmodrome.broker.lane import lane
from cosmodrome.transport.connection import SocketConnection
from cosmodrome.wire.bodies import TopicConfig

pytestmark = pytest.mark.usefixtures("lane_core")


class Producer:
    """One more connection to the broker of a side."""

    def __init__(self, side: Side, number: int) -> None:
        self.wire = Wire((f"10.1.3.{number}" if number % 2 else f"2001:db8::{number}", 5000))
        self.connection: SocketConnection = side.broker._server._connection()
        self.connection.connection_made(self.wire)

    def read(self, data: bytes) -> None:
        """One read of the socket, without a turn of the loop behind it."""
        buffer = self.connection.get_buffer(-1)
        buffer[: len(data)] = data
        self.connection.buffer_updated(len(data))
        buffer[: len(data)] = bytes(len(data))


Drive = Callable[[Side, list[Producer]], Any]


async def compare_many(tmp_path: Path, count: int, drive: Drive, **store: Any) -> list[Side]:
    """Like `compare`; what each of the connections was answered must be the same too."""
    answered: list[list[dict[int, bytes]]] = []

    async def all_of_them(side: Side) -> None:
        producers = [Producer(side, number) for number in range(1, count + 1)]
        await drive(side, producers)
        replies = []
        for producer in producers:
            side.connection, side.wire, first = producer.connection, producer.wire, side.connection
            await side.answered()
            replies.append(side.replies())
            producer.connection.connection_lost(None)
            side.connection = first
        answered.append(replies)
        side.wire = Wire(("10.1.2.3", 1))

    sides = await compare(tmp_path, all_of_them, **store)
    assert answered[0] == answered[1]
    assert all(answered[0])
    return sides


def plain(opaque: int, body: bytes = b"x", **changes: Any) -> bytes:
    return frame(310, opaque, send_fields(**changes), body)


def watch(side: Side) -> list[int]:
    """How many requests or messages were staged, each time."""
    staged: list[int] = []
    stage = side.store.stage

    def watched(ready: Any) -> None:
        staged.append(ready.left)
        stage(ready)

    side.store.stage = watched  # type: ignore[assignment]
    return staged


async def test_a_turn_is_staged_once(tmp_path: Path) -> None:
    seen: list[list[int]] = []

    async def drive(side: Side, producers: list[Producer]) -> None:
        seen.append(watch(side))
        for opaque in (1, 100):
            for producer in producers:
                producer.read(plain(opaque) + plain(opaque + 1, e="3", b="Multi"))
            await side.run_turns()

    _, fast = await compare_many(tmp_path, 5, drive)
    assert seen[1] == [10, 10]
    assert fast.dispatched == 0


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_comes_in_a_turn(tmp_path: Path, seed: int) -> None:
    async def drive(side: Side, producers: list[Producer]) -> None:
        chance = random.Random(seed)
        opaque = 0
        for _ in range(6):
            for _ in range(chance.randrange(1, 12)):
                sends = []
                for _ in range(chance.randrange(1, 6)):
                    opaque += 1
                    odd = chance.random() < 0.3
                    sends.append(random_send(chance, opaque) if odd else plain(opaque))
                data = b"".join(sends)
                cut = chance.randrange(len(data))  # the rest comes with the next read
                producer = chance.choice(producers)
                producer.read(data[:cut])
                producer.read(data[cut:])
            await side.run_turns()
        for number, producer in enumerate(producers):
            producer.read(plain(1_000_000 + number))
        await side.run_turns()

    await compare_many(tmp_path, 4, drive)


async def test_what_the_store_refuses_is_answered_to_everybody(tmp_path: Path) -> None:
    async def drive(side: Side, producers: list[Producer]) -> None:
        log = side.store._log
        log.trouble = "no room"
        for number, producer in enumerate(producers):
            producer.read(plain(1 + number) + plain(100 + number))
        await side.run_turns()
        log.trouble = None
        for number, producer in enumerate(producers):
            producer.read(plain(200 + number))
        await side.run_turns()

    _, fast = await compare_many(tmp_path, 3, drive)
    assert fast.dispatched == 6


async def test_what_the_table_of_topics_no_longer_allows(tmp_path: Path) -> None:
    async def drive(side: Side, producers: list[Producer]) -> None:
        topics = side.broker._rooms.members.topics
        for number, producer in enumerate(producers):
            producer.read(plain(1 + number) + plain(100 + number, b="Multi"))
        if side.fast:
            topics.put(TopicConfig(topic_name="Unrelated"))
            assert side.dispatched == 6
        await side.run_turns()

    await compare_many(tmp_path, 3, drive)


async def test_a_producer_that_goes_before_its_sends_are_staged(tmp_path: Path) -> None:
    async def drive(side: Side, producers: list[Producer]) -> None:
        for number, producer in enumerate(producers):
            producer.read(plain(1 + number))
        producers.pop(1).connection.connection_lost(None)
        await side.run_turns()
        assert side.store.facts().put_count == 3

    await compare_many(tmp_path, 3, drive)


async def test_more_than_is_gathered_in_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "GATHERED_BYTES_MAX", 40_000)
    seen: list[list[int]] = []

    async def drive(side: Side, producers: list[Producer]) -> None:
        chance = random.Random(3)
        seen.append(watch(side))
        for opaque in range(60):
            body = chance.randbytes(chance.randrange(3000))
            batch = item(chance.randbytes(700)) + item(body)
            sends = plain(opaque, body) + frame(320, 100 + opaque, send_fields(), batch)
            producers[opaque % 3].read(sends)
        await side.run_turns()

    await compare_many(tmp_path, 3, drive)
    assert 3 < len(seen[1]) < 12


async def test_what_follows_sends_comes_behind_them(tmp_path: Path) -> None:
    async def drive(side: Side, producers: list[Producer]) -> None:
        first, second = producers
        first.read(plain(1))
        second.read(plain(2) + plain(3, i="DELAY\x01x") + plain(4))
        first.read(plain(5))
        await side.run_turns()

    _, fast = await compare_many(tmp_path, 2, drive)
    assert fast.dispatched == 1
