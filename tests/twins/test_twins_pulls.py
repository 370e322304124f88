"""Pulls by plan against the slow lane: the same answers and counts, whatever changes in between."""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.twins import test_twins_lanes as lanes
from tests.twins.test_twins_lanes import Side, codes_of, compare, frame, send_fields

from cosmodrome import speed
from cosmodrome.speed import lane
from cosmodrome.wire.bodies import SubscriptionGroupConfig, TopicConfig

if not lane.HAS_LANE:
    pytest.skip("pulls by plan are compiled only", allow_module_level=True)

GROUP = SubscriptionGroupConfig(group_name="group", broker_id=3, which_broker_when_consume_slowly=5)
BY_PULL, BY_HEARTBEAT = 4, 0


def pull(opaque: int, offset: int = 0, *, flags: int = BY_PULL, **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "consumerGroup": "group",
        "topic": "Plain",
        "queueId": 1,
        "queueOffset": offset,
        "maxMsgNums": 32,
        "sysFlag": flags,
        "commitOffset": offset,
        "suspendTimeoutMillis": 15_000,
        "subVersion": 5,
    }
    if flags & BY_PULL:
        fields |= {"subscription": "*", "expressionType": "TAG"}
    return frame(11, opaque, fields | changes, style=opaque % 2 * 4)


def send(opaque: int, tag: str = "A", body: bytes = b"x" * 50) -> bytes:
    return frame(310, opaque, send_fields(e="1", i=f"TAGS\x01{tag}"), body)


def heartbeat(
    opaque: int, tags: str = "A", version: int = 5, *, kind: str = "TAG", model: str = "CLUSTERING"
) -> bytes:
    subscription = {
        "codeSet": [speed.java_hash(tag) for tag in tags.split("||")],
        "expressionType": kind,
        "subString": tags,
        "subVersion": version,
        "tagsSet": tags.split("||"),
        "topic": "Plain",
    }
    group = {
        "groupName": "group",
        "messageModel": model,
        "subscriptionDataSet": [subscription] if tags else [],
    }
    body = {"clientID": "c@1", "consumerDataSet": [group], "producerDataSet": []}
    return frame(34, opaque, {}, json.dumps(body).encode())


def consume_of(side: Side) -> Any:
    return lanes.service_of(side, 11)


def set_option(side: Side, name: str, value: object) -> None:
    options = consume_of(side)._options if name in BROKER_OPTIONS else side.store._options
    msgspec.structs.force_setattr(options, name, value)


BROKER_OPTIONS = ("broker_permission", "slave_read_enable", "auto_create_subscription_group")


def details(side: Side) -> dict[object, object]:
    stats = consume_of(side).stats
    return {
        (*key, queue_id): (one.messages, one.size, one.calls, one.next_offset)
        for key, item in stats.groups()
        for queue_id, one in item.queues.items()
    }


async def both(
    tmp_path: Path, drive: Callable[[Side], Any], **store: Any
) -> tuple[Side, Side, list[int]]:
    """`compare`, the queues' statistics too; also how many plans were asked for."""
    seen: list[object] = []
    asked: list[int] = []

    async def watched(side: Side) -> None:
        consume = consume_of(side)
        consume._groups.put(GROUP)
        verdict, calls = consume.verdict, [0]

        def count(ask: Any) -> Any:
            calls[0] += 1
            return verdict(ask)

        consume.verdict = count
        await drive(side)
        seen.append(details(side))
        asked.append(calls[0])

    slow, fast = await compare(tmp_path, watched, **store)
    assert seen[0] == seen[1]
    return slow, fast, asked


# --- plain pulls -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
async def test_any_offsets_counts_and_tags(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    sends = [
        send(number, chance.choice("ABC"), b"x" * chance.randrange(300)) for number in range(900)
    ]
    pulls = [
        pull(
            1000 + number,
            chance.randrange(-1, 905),
            flags=chance.choice((4, 4, 5)),
            maxMsgNums=chance.choice((1, 2, 32, 32, 700, 900, 5000, 0, -1)),
            subscription=chance.choice(("*", "A", "B||C", "Z", "A||B||C")),
            suspendTimeoutMillis=0,
        )
        for number in range(250)
    ]

    async def drive(side: Side) -> None:
        for at in range(0, 900, 100):
            await side.feed(b"".join(sends[at : at + 100]))
            if at == 400:
                await side.store._upkeep.relieve()  # half of the entries are in files
        for at in range(0, 250, 7):
            await side.feed(b"".join(pulls[at : at + 7]))

    _, fast, asked = await both(tmp_path, drive, mapped_file_size_commit_log=1 << 20)
    assert fast.dispatched < 220 and asked[1] < 20


async def test_limits_for_warm_and_cold_data(tmp_path: Path) -> None:
    async def drive(side: Side) -> None:
        for number in range(60):
            await side.feed(send(number))
        opaque = 100
        for name, value in (
            ("max_transfer_count_on_message_in_memory", 7),
            ("max_transfer_bytes_on_message_in_memory", 700),
            ("max_transfer_count_on_message_in_disk", 3),
            ("max_transfer_bytes_on_message_in_disk", 400),
        ):
            for _ in range(2):
                await side.feed(pull(opaque) + pull(opaque + 1, 30) + pull(opaque + 2, 59))
                opaque += 3
            set_option(side, name, value)
            if "bytes_on_message_in_memory" in name:
                side.store._reader._memory_bytes = 5000
                set_option(side, "access_message_in_memory_max_ratio", 40)
                set_option(side, "slave_read_enable", True)
        await side.feed(pull(opaque) + pull(opaque + 1, 30) + pull(opaque + 2, 59))

    _, _, asked = await both(tmp_path, drive)
    assert asked == [0, 1]


async def test_an_answer_that_fits_no_frame_is_refused_by_both(tmp_path: Path) -> None:
    """Only options that no file and no request can set lead there."""

    async def drive(side: Side) -> None:
        for number in range(280):
            await side.feed(send(number, body=b"x" * 60_000))
        await side.feed(pull(900, maxMsgNums=300))
        set_option(side, "max_transfer_bytes_on_message_in_memory", 2**31 - 1)
        await side.feed(pull(901, maxMsgNums=300))
        codes = codes_of(side)
        assert (codes[900], codes[901]) == (0, 1)

    await both(tmp_path, drive, mapped_file_size_commit_log=1 << 25)


async def test_files_and_tails(tmp_path: Path) -> None:
    """Queue files of 100 entries, log files of 64 KiB: what lies across goes the longer way."""

    async def drive(side: Side) -> None:
        for number in range(500):
            await side.feed(send(number, body=b"x" * 200))
            if number in (130, 320):
                await side.store._upkeep.relieve()
        for offset in range(500):
            await side.feed(pull(1000 + offset, offset, maxMsgNums=5))

    _, fast, asked = await both(tmp_path, drive)
    assert 3 < fast.dispatched < 150 and asked[1] == 1


async def test_damaged_entries_and_records(tmp_path: Path) -> None:
    async def drive(side: Side) -> None:
        for number in range(30):
            await side.feed(send(number))
        await side.feed(pull(100) + pull(101))
        tail = side.store._queues.get("Plain", 1).tail
        good = bytes(tail)
        opaque = 200
        for at, value in ((0, 1 << 40), (20, -5), (40, 7), (200, 0), (8, 1 << 62)):
            struct.pack_into(">q", tail, at, value)
            await side.feed(pull(opaque) + pull(opaque + 1, 5))
            opaque += 2
            tail[:] = good
        await side.feed(pull(opaque))

    slow, _, _ = await both(tmp_path, drive)
    assert codes_of(slow)[210] == 0


async def test_a_log_that_begins_later(tmp_path: Path) -> None:
    async def drive(side: Side) -> None:
        for number in range(500):
            await side.feed(send(number, body=b"x" * 200))
        await side.feed(pull(1000) + pull(1001))
        side.store._log.expire(0)
        await side.feed(pull(1002) + pull(1003))
        side.store._queues.get("Plain", 1).forget_below(side.store._log.min_offset)
        await side.feed(pull(1004) + pull(1005, 450))

    slow, _, _ = await both(tmp_path, drive)
    assert [codes_of(slow)[opaque] for opaque in (1001, 1002, 1004, 1005)] == [0, 0, 21, 0]


# --- every input of the verdict --------------------------------------------------------------


def group_row(side: Side, **changes: Any) -> None:
    consume_of(side)._groups.put(msgspec.structs.replace(GROUP, **changes))


def topic_row(side: Side, **changes: Any) -> None:
    row = {"topic_name": "Plain", "read_queue_nums": 4, "write_queue_nums": 4}
    consume_of(side)._topics.put(TopicConfig(**{**row, **changes}))


def delete_group(side: Side) -> None:
    set_option(side, "auto_create_subscription_group", False)
    consume_of(side)._groups.delete("group")


def delete_topic(side: Side) -> None:
    consume_of(side)._topics.delete("Plain")


def topic_anew(side: Side) -> None:
    delete_topic(side)
    topic_row(side)


def slaves(side: Side) -> None:
    set_option(side, "slave_read_enable", True)


def slaves_of_group(side: Side) -> None:
    slaves(side)
    group_row(side, broker_id=9)


def left(side: Side) -> None:
    side.broker._rooms.members.clients._gone(side.connection, "it left")


CHANGES: tuple[tuple[Callable[[Side], object], int, int], ...] = (
    # what happens; the code of a pull after it, by pull and by heartbeat
    (lambda side: None, 0, 0),
    (lambda side: group_row(side, consume_enable=False), 16, 16),
    (delete_group, 26, 26),
    (group_row, 0, 0),
    (lambda side: topic_row(side, perm=2), 16, 16),
    (lambda side: topic_row(side, read_queue_nums=1), 1, 1),
    (delete_topic, 17, 17),
    (topic_anew, 19, 19),
    (lambda side: set_option(side, "broker_permission", 2), 16, 16),
    (slaves, 0, 0),
    (slaves_of_group, 0, 0),
    (left, 0, 24),
)


async def begin(side: Side, opaque: int) -> None:
    """As it was before any change, with messages."""
    group_row(side)
    topic_row(side)
    set_option(side, "broker_permission", 6)
    set_option(side, "slave_read_enable", False)
    left(side)
    await side.feed(heartbeat(opaque))
    await side.feed(b"".join(send(opaque + 1 + n, "AB"[n % 2]) for n in range(8)))


@pytest.mark.parametrize("flags", [BY_PULL, BY_HEARTBEAT])
async def test_a_change_is_seen_at_once(tmp_path: Path, flags: int) -> None:
    dispatched: list[list[int]] = []

    async def drive(side: Side) -> None:
        dispatched.append([])
        for number, (act, *_) in enumerate(CHANGES):
            first = 100 * number + 100
            await begin(side, first)
            # The second and the third go by plan.
            await side.feed(b"".join(pull(first + 20 + n, n, flags=flags) for n in range(3)))
            before = side.dispatched
            act(side)
            last = [pull(first + 30 + n, n, flags=flags, suspendTimeoutMillis=0) for n in range(2)]
            await side.feed(b"".join(last))
            dispatched[-1].append(side.dispatched - before)

    slow, _, asked = await both(tmp_path, drive)
    codes = codes_of(slow)
    wanted = [
        by_heartbeat if flags == BY_HEARTBEAT else by_pull for _, by_pull, by_heartbeat in CHANGES
    ]
    assert [codes[100 * number + 130] for number in range(len(CHANGES))] == wanted
    assert all(codes[100 * number + 121] == 0 for number in range(len(CHANGES)))
    assert dispatched[0] == [2] * len(CHANGES)
    assert dispatched[1] == [0 if code == 0 else 2 for code in wanted]
    assert asked[1] <= 3 * len(CHANGES)


BEATS: tuple[tuple[tuple[Any, ...], dict[str, Any], int], ...] = (
    (("B", 6), {}, 0),
    (("*", 6), {}, 0),
    (("a > 1", 6), {"kind": "SQL92"}, 20),
    (("",), {}, 24),
    (("B", 4), {}, 0),
    (("A", 5), {"model": "BROADCASTING"}, 16),
)


async def test_heartbeats_are_heard_at_once(tmp_path: Path) -> None:
    async def drive(side: Side) -> None:
        for number, (told, kind, _) in enumerate(BEATS):
            first = 100 * number + 100
            await begin(side, first)
            group_row(side, consume_broadcast_enable=False)
            await side.feed(pull(first + 20, flags=0) + pull(first + 21, flags=0))
            await side.feed(heartbeat(first + 22, *told, **kind))
            await side.feed(pull(first + 23, flags=0) + pull(first + 24, flags=0, subVersion=6))

    slow, _, _ = await both(tmp_path, drive)
    codes = codes_of(slow)
    assert [codes[100 * number + 123] for number in range(len(BEATS))] == [
        code for *_, code in BEATS
    ]


async def test_statistics_of_queues_follow_their_setting(tmp_path: Path) -> None:
    async def drive(side: Side) -> None:
        stats = consume_of(side).stats
        await side.feed(send(1) + send(2))
        for opaque in range(10, 40, 3):
            await side.feed(pull(opaque) + pull(opaque + 1, 1) + pull(opaque + 2))
            stats.detailed = not stats.detailed
            if opaque % 2:
                stats.advance()
        assert stats.of_group("Plain", "group").over(stats.tick, (1, 6))[0].messages == 50

    await both(tmp_path, drive)


# --- pulls that wait ---------------------------------------------------------------------------

WAIT = BY_PULL | 2


async def test_held_pulls_are_woken(tmp_path: Path) -> None:
    async def drive(side: Side) -> None:
        await side.feed(send(1))
        await side.feed(pull(2) + pull(3))
        for opaque in range(10, 60, 5):
            offset = (opaque - 10) // 5 + 1
            await side.feed(pull(opaque, offset, flags=WAIT | 1))
            assert consume_of(side).waiters.held == 1 and side.connection.in_flight == 1
            await side.feed(send(opaque + 1))
            assert consume_of(side).waiters.held == 0 and side.connection.in_flight == 0
        assert len(side.replies()) == 23

    slow, fast, asked = await both(tmp_path, drive)
    assert slow.dispatched == 23 and fast.dispatched == 0 and asked[1] == 1


async def test_the_first_pull_of_an_empty_queue_is_held(tmp_path: Path) -> None:
    async def drive(side: Side) -> None:
        await side.feed(pull(1, flags=WAIT))
        await side.feed(send(2))
        assert 1 in side.replies()

    _, fast, _ = await both(tmp_path, drive)
    assert fast.dispatched == 0


async def test_only_wanted_tags_wake(tmp_path: Path) -> None:
    async def drive(side: Side) -> None:
        await side.feed(send(1, "B"))
        await side.feed(pull(2, subscription="B") + pull(3, subscription="B"))
        await side.feed(pull(4, 1, flags=WAIT, subscription="B"))
        await side.feed(send(5, "A"))
        assert 4 not in side.replies()
        await side.feed(send(6, "B"))
        assert 4 in side.replies()

    _, fast, _ = await both(tmp_path, drive)
    assert fast.dispatched == 0


@pytest.mark.parametrize("style", [0, 1])
async def test_a_wait_that_is_over(tmp_path: Path, style: int) -> None:
    async def drive(side: Side) -> None:
        await side.feed(send(1))
        await side.feed(pull(2) + pull(3))
        await side.feed(pull(4 + style, 1, flags=WAIT, suspendTimeoutMillis=400))
        assert side.connection.in_flight == 1
        await side.answered()

    slow, fast, _ = await both(tmp_path, drive)
    assert codes_of(slow)[4 + style] == 19 and fast.dispatched == 0


async def test_what_changed_while_a_pull_waited(tmp_path: Path) -> None:
    async def drive(side: Side) -> None:
        await side.feed(send(1))
        await side.feed(pull(2) + pull(3))
        await side.feed(pull(4, 1, flags=WAIT))
        group_row(side, consume_enable=False)
        await side.feed(send(5))
        group_row(side)
        await side.feed(pull(6, 1) + pull(7, 2, flags=WAIT))
        set_option(side, "broker_permission", 2)
        await side.feed(send(8))
        set_option(side, "broker_permission", 6)
        await side.feed(send(9))
        await side.feed(pull(10, 4, flags=WAIT))
        await consume_of(side).waiters.stop()

    slow, _, _ = await both(tmp_path, drive)
    assert [codes_of(slow)[opaque] for opaque in (4, 7, 10)] == [16, 16, 14]


async def test_a_connection_that_closes(tmp_path: Path) -> None:
    side = Side(tmp_path / "fast", lanes.env(0), fast=True)
    async with side:
        await side.feed(send(1))
        await side.feed(pull(2) + pull(3))
        await side.feed(pull(4, 1, flags=WAIT) + pull(5, 1, flags=WAIT))
        waiters = consume_of(side).waiters
        assert waiters.held == 2 and side.connection.in_flight == 2
        side.connection.connection_lost(None)
        assert waiters.held == 0 and side.connection.in_flight == 0
        out = len(side.wire.out)
        side.connection = side.broker._server._connection()
        side.connection.connection_made(lanes.Wire(lanes.PEER))
        await side.feed(send(6))
        assert len(side.wire.out) == out


async def test_no_room_for_waiting(tmp_path: Path) -> None:
    async def drive(side: Side) -> None:
        consume_of(side).waiters._held_max = 1
        await side.feed(send(1))
        await side.feed(pull(2) + pull(3))
        await side.feed(pull(4, 1, flags=WAIT) + pull(5, 1, flags=WAIT | 1))
        assert 5 in side.replies() and 4 not in side.replies()
        await side.feed(send(6))

    slow, _, _ = await both(tmp_path, drive)
    assert codes_of(slow)[5] == 19


async def test_a_read_that_fails_while_waking(tmp_path: Path) -> None:
    async def drive(side: Side) -> None:
        await side.feed(send(1))
        await side.feed(pull(2) + pull(3))
        await side.feed(pull(4, 1, flags=WAIT))
        log, loop = side.store._log, asyncio.get_running_loop()
        least = log.min_offset

        def restore(_: object) -> None:
            loop.call_soon(setattr, log, "min_offset", least)

        side.store.arrivals.subscribe(restore)
        arrivals = side.store.arrivals

        def spoil(_: object) -> None:
            setattr(log, "min_offset", "broken")  # noqa: B010 (not what its type says)

        arrivals.listeners = (spoil, *arrivals.listeners)
        await side.feed(send(5))

    slow, _, _ = await both(tmp_path, drive)
    assert codes_of(slow)[4] == 1


# --- pulls that are read in two ways ---------------------------------------------------------


async def test_a_number_for_a_name_makes_no_plan_for_others(tmp_path: Path) -> None:
    async def drive(side: Side) -> None:
        topics = side.broker._rooms.members.topics
        for name in ("-0", "0"):
            topics.put(TopicConfig(topic_name=name, read_queue_nums=4, write_queue_nums=4))
        await side.feed(frame(310, 2, send_fields(b="0", e="1"), b"of the other topic"))
        await side.feed(frame(310, 4, send_fields(b="-0", e="1"), b"of this topic"))
        number = pull(6, topic="-0").replace(b'"topic":"-0"', b'"topic":-0')
        length, word = struct.unpack_from(">II", number)
        await side.feed(struct.pack(">II", length - 2, word - 2) + number[8:])
        await side.feed(pull(8, topic="-0"))
        await side.feed(pull(10, topic="-0"))
        assert b"of the other topic" in side.replies()[6]
        assert b"of this topic" in side.replies()[8]
        assert b"of this topic" in side.replies()[10]

    await both(tmp_path, drive)


async def test_a_plan_that_cannot_be_made_costs_no_connection(tmp_path: Path) -> None:
    async def drive(side: Side) -> None:
        consume = consume_of(side)
        await side.feed(send(1))

        def fails(ask: Any) -> Any:
            raise RuntimeError("a fault of the verdict")

        consume.verdict = fails
        await side.feed(pull(2) + pull(3) + send(4))
        assert not side.connection.closed

    slow, _, _ = await both(tmp_path, drive)
    assert codes_of(slow) == {1: 0, 2: 0, 3: 0, 4: 0}


async def test_plans_of_clients_that_left_are_forgotten(tmp_path: Path) -> None:
    """A consumer that starts again asks with another version, and so with other plans."""
    kept = []

    async def drive(side: Side) -> None:
        groups = side.broker._rooms.members.groups
        for version in range(1_200):
            if version % 100 == 0:  # nothing that was planned before holds
                groups.put(SubscriptionGroupConfig(group_name="group", retry_max_times=version))
            await side.feed(pull(version, subVersion=str(version)))
        pulls = side.broker._server._lane._pulls._pulls if side.fast else None
        if pulls is not None:
            kept.append(pulls.plan_count)

    await both(tmp_path, drive)
    assert kept and 0 < kept[0] <= 600
