"""Consumers that pull, against a real broker: assigned, subscribed, scheduled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.unit.client.conftest import Node, until

from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.options import ClientOptions
from cosmodrome.client.receive.engine.pulling import PullStatus
from cosmodrome.client.receive.pull_consumer import PullConsumer
from cosmodrome.client.receive.pull_schedule import PullSchedule, Turn
from cosmodrome.client.values import MessageQueue, ReceivedMessage
from cosmodrome.errors import ConfigError, CosmodromeError, Refused, Unreachable
from cosmodrome.transport.channel import Channel
from cosmodrome.wire import commands
from cosmodrome.wire.message import format_properties


def queue_of(number: int = 0, topic: str = "T") -> MessageQueue:
    return MessageQueue(topic=topic, broker_name="broker-a", queue_id=number)


Q0 = queue_of(0)


async def put(
    node: Any, bodies: list[str], *, queue_id: int = 0, topic: str = "T", tags: str = "A"
) -> None:
    channel = Channel("127.0.0.1", node.broker.port)
    for body in bodies:
        await channel.call(
            commands.SendMessageV2(
                producer_group="p",
                topic=topic,
                default_topic="TBW102",
                default_topic_queue_nums=4,
                queue_id=queue_id,
                sys_flag=0,
                born_timestamp=1,
                flag=0,
                properties=format_properties({"TAGS": tags}),
                body=body.encode(),
            )
        )
    await channel.close()


def consumer_of(node: Any, **changes: Any) -> PullConsumer:
    options: dict[str, Any] = {"group": "g", "consume_from": "first", "suspend_ms": 500}
    return PullConsumer(node.namesrv, **options | changes)


async def gather(consumer: PullConsumer, count: int) -> list[str]:
    found: list[ReceivedMessage] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            found += await consumer.poll(1000)
    return [message.body.decode() for message in found]


# --- assigned --------------------------------------------------------------------------------


async def test_assigned_queues_are_read_in_order_and_new_messages_follow(node: Any) -> None:
    await put(node, [f"m{number}" for number in range(25)])
    async with consumer_of(node) as consumer:
        await consumer.assign([Q0])
        assert consumer.assignment == [Q0]
        assert await gather(consumer, 25) == [f"m{number}" for number in range(25)]
        assert consumer.position(Q0) == 25
        waiting = asyncio.create_task(consumer.poll(60_000))
        await asyncio.sleep(0.05)
        await put(node, ["later"])
        assert [message.body for message in await waiting] == [b"later"]
        assert await consumer.poll(0) == []
        assert await consumer.poll(50) == []


async def test_assigned_queues_begin_at_their_offsets(node: Any) -> None:
    await put(node, ["a", "b", "c"])
    async with consumer_of(node) as consumer:
        await consumer.assign([Q0], offsets={Q0: 1})
        assert consumer.position(Q0) == 1
        assert await gather(consumer, 2) == ["b", "c"]
        await consumer.assign([Q0], offsets={Q0: 0})  # it is read already, so it goes on
        assert consumer.position(Q0) == 3


async def test_poll_returns_at_most_max_count(node: Any) -> None:
    await put(node, [f"m{number}" for number in range(9)])
    async with consumer_of(node) as consumer:
        await consumer.assign([Q0])
        seen: list[str] = []
        while len(seen) < 9:
            part = await consumer.poll(60_000, max_count=4)
            assert 1 <= len(part) <= 4
            seen += [message.body.decode() for message in part]
            assert consumer.position(Q0) == len(seen)
    assert seen == [f"m{number}" for number in range(9)]


async def test_a_message_is_done_when_poll_is_called_again(node: Any) -> None:
    await put(node, ["a", "b"])
    with pytest.raises(RuntimeError, match="boom"):
        async with consumer_of(node, pull_batch=1) as consumer:
            await consumer.assign([Q0])
            await gather(consumer, 1)
            await gather(consumer, 1)
            raise RuntimeError("boom")
    async with consumer_of(node) as consumer:
        await consumer.assign([Q0])
        assert await gather(consumer, 1) == ["b"]  # "a" was done, "b" perhaps not
    async with consumer_of(node) as consumer:
        assert await consumer.committed(Q0) == 2  # the block above ended well


async def test_commits_by_hand(node: Any) -> None:
    await put(node, ["a", "b", "c"])
    async with consumer_of(node, auto_commit=False) as consumer:
        await consumer.assign([Q0])
        await gather(consumer, 3)
        # The broker answers 0 for a group that never committed in a young queue.
        assert await consumer.committed(Q0) in (None, 0)
        await consumer.commit({Q0: 1})
        assert await consumer.committed(Q0) == 1
        await consumer.commit()
        assert await consumer.committed(Q0) == 3


async def test_progress_is_committed_in_the_background(node: Any) -> None:
    await put(node, ["a"])
    async with consumer_of(node, commit_every_ms=20) as consumer:
        await consumer.assign([Q0])
        await gather(consumer, 1)
        await consumer.poll(0)
        async with asyncio.timeout(60):
            while await consumer.committed(Q0) != 1:
                await asyncio.sleep(0.02)


async def test_seeking(node: Any) -> None:
    await put(node, ["a", "b", "c"])
    # A hold longer than the test may last: a seek has to end it.
    holding = consumer_of(node, suspend_ms=600_000, pull_timeout_ms=700_000)
    async with asyncio.timeout(60), holding as consumer:
        await consumer.assign([Q0])
        assert await gather(consumer, 3) == ["a", "b", "c"]
        await consumer.seek(Q0, 1)
        assert await gather(consumer, 2) == ["b", "c"]
        await consumer.seek_to_begin(Q0)
        assert await gather(consumer, 3) == ["a", "b", "c"]
        await consumer.seek_to_end(Q0)
        assert await consumer.poll(50) == []
        await consumer.seek_to_time(Q0, 0)
        assert consumer.position(Q0) == 0
        with pytest.raises(ConfigError, match="0 to 3"):
            await consumer.seek(Q0, 99)
        with pytest.raises(ConfigError, match="not assigned"):
            await consumer.seek(queue_of(1), 0)
        assert (await consumer.begin_offset(Q0), await consumer.end_offset(Q0)) == (0, 3)


async def test_a_paused_queue_returns_nothing_until_it_is_resumed(node: Any) -> None:
    await put(node, ["a"])
    async with consumer_of(node) as consumer:
        await consumer.assign([Q0])
        consumer.pause([Q0])
        assert await consumer.poll(150) == []
        consumer.resume([Q0])
        assert await gather(consumer, 1) == ["a"]


async def test_tags_choose_and_what_is_left_out_counts_as_read(node: Any) -> None:
    await put(node, ["x1"], tags="X")
    await put(node, ["a1"], tags="A")
    await put(node, ["x2"], tags="X")
    async with consumer_of(node) as consumer:
        await consumer.assign([Q0], tags="A || B")
        assert await gather(consumer, 1) == ["a1"]
        async with asyncio.timeout(60):
            while consumer.position(Q0) != 3:
                await asyncio.sleep(0.02)


async def test_reading_ahead_is_bounded(node: Any) -> None:
    await put(node, [f"m{number}" for number in range(60)])
    async with consumer_of(node, prefetch_messages=10, pull_batch=5) as consumer:
        await consumer.assign([Q0])
        await asyncio.sleep(0.3)
        assert len(consumer._live().assignment.windows[Q0].unfinished) <= 14
        assert len(await gather(consumer, 60)) == 60


async def test_a_pull_at_an_offset_leaves_positions_alone(node: Any) -> None:
    await put(node, ["a", "b", "c"])
    async with consumer_of(node) as consumer:
        pulled = await consumer.pull(Q0, 1)
        assert pulled.status is PullStatus.FOUND
        assert [message.body for message in pulled.messages] == [b"b", b"c"]
        assert (pulled.next_offset, pulled.min_offset, pulled.max_offset) == (3, 0, 3)
        assert (await consumer.pull(Q0, 3)).status is PullStatus.NO_NEW
        assert (await consumer.pull(Q0, 0, tags="Z")).status is PullStatus.NO_MATCH
        assert (await consumer.pull(Q0, 99)).status is PullStatus.OFFSET_MOVED
        held = asyncio.create_task(consumer.pull(Q0, 3, wait_ms=60_000))
        await asyncio.sleep(0.05)
        await put(node, ["d"])
        assert [message.body for message in (await held).messages] == [b"d"]
        with pytest.raises(CosmodromeError):
            await consumer.pull(MessageQueue(topic="T", broker_name="nowhere", queue_id=0), 0)


async def test_reading_goes_on_after_the_broker_was_away(
    node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cosmodrome.client.receive.engine.pulling.AFTER_ERROR_S", 0.05)
    await put(node, ["a"])
    async with consumer_of(node) as consumer:
        await consumer.assign([Q0])
        assert await gather(consumer, 1) == ["a"]
        await node.stop_broker()
        await asyncio.sleep(0.1)
        await node.start_broker()
        await put(node, ["b"])
        assert await gather(consumer, 1) == ["b"]


async def test_watching_the_queues_of_a_topic(node: Any) -> None:
    seen: list[int] = []
    async with Admin(node.namesrv) as admin, consumer_of(node, watch_every_ms=50) as consumer:
        await admin.topics.create("W", queues=2)
        await consumer.watch_queues("W", lambda topic, queues: seen.append(len(queues)))
        await admin.topics.update("W", queues=5)
        async with asyncio.timeout(60):
            while seen != [5]:
                await asyncio.sleep(0.02)


# --- subscribed ------------------------------------------------------------------------------


async def test_members_share_the_queues_and_take_over(node: Any) -> None:
    for number in range(4):
        await put(node, [f"q{number}"], queue_id=number)
    changes: list[int] = []
    async with consumer_of(node, client=ClientOptions(instance_name="one")) as one:
        await one.subscribe("T", on_change=lambda topic, queues: changes.append(len(queues)))
        assert len(one.assignment) == 4
        assert sorted(await gather(one, 4)) == ["q0", "q1", "q2", "q3"]
        async with consumer_of(node, client=ClientOptions(instance_name="two")) as two:
            await two.subscribe("T")
            async with asyncio.timeout(60):
                while len(one.assignment) != 2 or len(two.assignment) != 2:
                    await asyncio.sleep(0.02)
            assert not set(one.assignment) & set(two.assignment)
        async with asyncio.timeout(60):
            while len(one.assignment) != 4 or changes != [4, 2, 4]:
                await asyncio.sleep(0.02)
        await one.unsubscribe("T")
        assert one.assignment == []


async def test_broadcasting_members_read_everything_and_remember_it_here(
    node: Any, tmp_path: Path
) -> None:
    await put(node, ["a"])

    def consumer(name: str) -> PullConsumer:
        return consumer_of(
            node,
            model="broadcasting",
            client=ClientOptions(instance_name=name),
            offsets_dir=str(tmp_path / "offsets"),
        )

    async with consumer("one") as one, consumer("two") as two:
        await one.subscribe("T")
        await two.subscribe("T")
        assert await gather(one, 1) == await gather(two, 1) == ["a"]
    await put(node, ["b"])
    async with consumer("one") as one:
        await one.subscribe("T")
        assert await gather(one, 1) == ["b"]


async def test_a_topic_that_comes_later_is_found(node: Any) -> None:
    async with consumer_of(node, rebalance_every_ms=100) as consumer:
        await consumer.subscribe("N")
        assert consumer.assignment == []
        await put(node, ["first"], topic="N")
        assert await gather(consumer, 1) == ["first"]


async def test_a_round_that_could_not_be_made_is_repeated_soon(node: Any) -> None:
    """Not only with the next regular one, as long as that may be."""
    async with consumer_of(node, rebalance_every_ms=3_600_000) as consumer:
        await consumer.subscribe("N")
        await put(node, ["first"], topic="N")
        assert await gather(consumer, 1) == ["first"]

    async def work(turn: Turn) -> None: ...

    async with PullSchedule(node.namesrv, group="s", rebalance_every_ms=3_600_000) as schedule:
        await schedule.register("M", work)
        await put(node, ["first"], topic="M")
        async with asyncio.timeout(60):
            while not schedule.assignment:
                await asyncio.sleep(0.02)


async def test_a_listener_may_seek_in_the_queues_it_hears_of(node: Any) -> None:
    await put(node, ["a", "b"])

    async def to_the_last(_: str, queues: list[MessageQueue]) -> None:
        if Q0 in queues:
            await consumer.seek(Q0, 1)

    async with consumer_of(node) as consumer:
        async with asyncio.timeout(60):
            await consumer.subscribe("T", on_change=to_the_last)
        assert await gather(consumer, 1) == ["b"]


async def test_operators_see_and_move_a_pull_consumer(node: Any) -> None:
    await put(node, ["a", "b"])
    async with (
        Admin(node.namesrv) as admin,
        consumer_of(node, commit_every_ms=60_000) as consumer,
    ):
        await consumer.subscribe("T")
        await gather(consumer, 2)
        # Members would overwrite what is written past them, so the broker's refusal stands.
        with pytest.raises(Refused, match="committed no offset"):
            await admin.offsets.reset("g", "T", "begin")
        await consumer.commit()
        (member,) = await admin.groups.members("g")
        info = await admin.groups.running_info("g", member)
        assert info.mq_table[Q0]["commitOffset"] == 2
        assert [row.topic for row in info.subscription_set] == ["T"]
        assert (await admin.offsets.of_members("g", "T"))[member][Q0] == 2
        assert (await admin.offsets.reset("g", "T", "begin"))[Q0] == 0
        assert sorted(await gather(consumer, 2)) == ["a", "b"]
        found = await admin.messages.by_offset(Q0, 0)
        assert found is not None
        with pytest.raises(Refused, match="pulls its messages itself"):
            await admin.groups.consume_directly("g", member, found.offset_msg_id, broker="broker-a")


async def test_sql_that_is_wrong_is_refused_at_once(node: Any) -> None:
    await put(node, ["a"])
    async with consumer_of(node) as consumer:
        with pytest.raises(Refused):
            await consumer.subscribe("T", sql="a >")
        assert consumer.assignment == []


async def test_names_in_a_namespace_are_plain_for_the_user(node: Any) -> None:
    await put(node, ["a"], topic="ns%T")
    async with consumer_of(node, client=ClientOptions(namespace="ns")) as consumer:
        await consumer.subscribe("T")
        assert {queue.topic for queue in consumer.assignment} == {"T"}
        (message,) = await consumer.poll(60_000)
        assert message.topic == "T"
        assert consumer.position(Q0) == 1
        assert len(await consumer.queues("T")) == 4


async def test_wrong_use_is_explained(node: Any) -> None:
    for wrong in (
        {"pull_batch": 0},
        {"suspend_ms": 40_000},
        {"model": "x"},
        {"consume_from": "y"},
        {"commit_every_ms": 0},
    ):
        with pytest.raises(ConfigError):
            consumer_of(node, **wrong)
    consumer = consumer_of(node)
    with pytest.raises(ConfigError, match="async with"):
        await consumer.poll()
    await put(node, ["a"])
    async with consumer:
        await consumer.assign([Q0])
        with pytest.raises(ConfigError, match="second consumer"):
            await consumer.subscribe("T")
    await consumer.stop()


async def test_a_poll_that_waits_ends_when_the_consumer_closes(node: Any) -> None:
    consumer = consumer_of(node)
    await consumer.start()
    waiting = asyncio.create_task(consumer.poll(60_000))
    await asyncio.sleep(0.05)
    await consumer.stop()
    with pytest.raises(ConfigError, match="closed"):
        await waiting


# --- on a schedule ---------------------------------------------------------------------------


async def test_a_schedule_calls_for_each_queue_and_goes_on_from_commits(node: Any) -> None:
    for number in range(4):
        await put(node, [f"q{number}a", f"q{number}b"], queue_id=number)
    seen: list[str] = []
    shares: list[int] = []

    async def work(turn: Turn) -> None:
        pulled = await turn.pull(max_count=1)
        seen.extend(message.body.decode() for message in pulled.messages)
        await turn.commit(pulled.next_offset)
        turn.next_in_ms = 0 if pulled.messages else 50

    async with PullSchedule(node.namesrv, group="s", consume_from="first") as schedule:
        await schedule.register("T", work, on_queues=lambda topic, mine: shares.append(len(mine)))
        assert len(schedule.assignment) == 4
        async with asyncio.timeout(60):
            while len(seen) < 8:
                await asyncio.sleep(0.02)
    assert sorted(seen) == sorted(f"q{number}{part}" for number in range(4) for part in "ab")
    assert shares == [4]
    seen.clear()
    await put(node, ["new"])
    async with PullSchedule(node.namesrv, group="s", consume_from="first") as schedule:
        await schedule.register("T", work)
        async with asyncio.timeout(60):
            while not seen:
                await asyncio.sleep(0.02)
    assert seen == ["new"]


async def test_a_turn_that_fails_is_tried_again(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cosmodrome.client.receive.pull_schedule.AFTER_FAILURE_MS", 20)
    await put(node, ["a"])
    attempts = 0

    async def work(turn: Turn) -> None:
        nonlocal attempts
        if turn.queue.queue_id == 0:
            attempts += 1
            raise RuntimeError("not today")

    async with PullSchedule(node.namesrv, group="s") as schedule:
        await schedule.register("T", work)
        async with asyncio.timeout(60):
            while attempts < 3:
                await asyncio.sleep(0.02)
    with pytest.raises(ConfigError, match="not started"):
        await schedule.register("T", work)


async def test_a_turn_whose_work_was_cancelled_does_not_end_the_turns_of_its_queue(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cosmodrome.client.receive.pull_schedule.AFTER_FAILURE_MS", 10)
    await put(node, ["a"])
    turns: list[MessageQueue] = []

    async def work(turn: Turn) -> None:
        turns.append(turn.queue)
        turn.next_in_ms = 10
        if len(turns) == 1:
            raise asyncio.CancelledError

    async with PullSchedule(node.namesrv, group="g", consume_from="first") as schedule:
        await schedule.register("T", work)
        await until(lambda: len(turns) >= 3)


async def test_two_pull_consumers_of_a_group_share_its_queues_in_one_process(node: Node) -> None:
    await node.create_topic("T", 4)
    async with (
        PullConsumer(node.namesrv, group="g", rebalance_every_ms=100) as one,
        PullConsumer(node.namesrv, group="g", rebalance_every_ms=100) as two,
    ):
        await one.subscribe("T")
        await two.subscribe("T")
        await until(lambda: len(one.assignment) == 2 and len(two.assignment) == 2)


async def test_a_commit_that_failed_is_made_again(node: Node) -> None:
    await put(node, ["a", "b", "c"])
    async with PullConsumer(
        node.namesrv, group="g", consume_from="first", commit_every_ms=60_000
    ) as consumer:
        await consumer.subscribe("T")
        assert len(await gather(consumer, 3)) == 3
        await node.stop_broker()
        with pytest.raises(Unreachable, match="was not stored"):
            await consumer.commit()
        await node.start_broker()
    assert await node.committed("g", "T") == 3


async def test_a_reset_by_an_operator_moves_a_schedule(node: Any) -> None:
    await put(node, ["a", "b"])
    offsets: list[int] = []

    async def work(turn: Turn) -> None:
        turn.next_in_ms = 10
        if turn.queue == Q0:
            offsets.append(turn.offset)
            await turn.commit((await turn.pull()).next_offset)

    async with PullSchedule(node.namesrv, group="s", consume_from="first") as schedule:
        await schedule.register("T", work)
        await until(lambda: offsets[-1:] == [2])
        schedule._live().reset_offsets("T", {Q0: 1})
        await until(lambda: 1 in offsets)


async def test_a_turn_may_close_its_schedule(node: Any) -> None:
    await put(node, ["a"])
    closed: list[bool] = []

    async def work(turn: Turn) -> None:
        await schedule.stop()
        closed.append(True)

    schedule = PullSchedule(node.namesrv, group="s")
    await schedule.start()
    await schedule.register("T", work)
    await until(lambda: closed)
    assert schedule.assignment == []


async def test_a_strategy_that_fails_ends_the_consumer_and_poll_says_so(node: Any) -> None:
    await put(node, ["a"])

    class Broken:
        name = "BROKEN"

        def share(self, member: str, members: Any, queues: Any) -> list[MessageQueue]:
            if armed:
                raise RuntimeError("strategy is broken")
            return list(queues)

    armed = False
    async with consumer_of(node, strategy=Broken(), rebalance_every_ms=100) as consumer:
        await consumer.subscribe("T")
        assert await gather(consumer, 1) == ["a"]
        armed = True
        with pytest.raises(RuntimeError, match="broken"):
            await asyncio.wait_for(consumer.poll(600_000), 60)
