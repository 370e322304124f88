"""Redrive against a broker in this process: what arrives, what is left out, who may go on."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from tests.unit.client.conftest import Node
from tests.unit.client.producer_kit import stored

from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.fleet import NoBrokers, NotThere
from cosmodrome.client.operate.redriving import redrive as redrive_module
from cosmodrome.client.operate.redriving.audit import AUDIT_TOPIC, Outcome, Position
from cosmodrome.client.operate.redriving.plan import Filter
from cosmodrome.client.operate.redriving.redrive import Busy, Interrupted, Redrive, TakenOver
from cosmodrome.client.operate.redriving.sends import Sends
from cosmodrome.client.send.producer import Producer
from cosmodrome.client.values import Message, NoRoute
from cosmodrome.env.real import real_env
from cosmodrome.errors import ConfigError, TimedOut, Unreachable
from cosmodrome.wire.commands import GetMaxOffset

SOURCE, TARGET = "%DLQ%billing", "Orders"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redrive_module, "ARRIVE_MS", 0)
    monkeypatch.setattr(redrive_module, "RETRY_S", 0.05)


async def fill(node: Node, count: int, **more: str) -> None:
    """Dead letters as a broker makes them."""
    await node.create_topic(TARGET, queues=3)
    await node.create_topic(SOURCE, queues=1)
    for number in range(count):
        await dead(node, number, **more)


async def dead(node: Node, number: int, **more: str) -> None:
    pairs = {
        "UNIQ_KEY": f"U{number}",
        "RETRY_TOPIC": TARGET,
        "ORIGIN_MESSAGE_ID": f"O{number}",
        "TAGS": "even" if number % 2 == 0 else "odd",
        "KEYS": f"k{number} all",
        "DELAY": "0",
        "WAIT": "false",
        "colour": "red",
        **more,
    }
    sent = await node.send(SOURCE, b"m%d" % number, properties=pairs, reconsume_times=16)
    # Answered without being synced, so perhaps before it can be read.
    ask = GetMaxOffset(topic=SOURCE, queue_id=0)
    while (await node.call(ask)).offset <= sent.queue_offset:
        await asyncio.sleep(0.01)


async def arrived(node: Node, topic: str = TARGET) -> Counter[bytes]:
    return Counter(record.body for record in await stored(node.broker, topic))


def bodies(*numbers: int) -> Counter[bytes]:
    return Counter(b"m%d" % number for number in numbers)


def redriving(admin: Admin, **settings: Any) -> Redrive:
    return Redrive(admin.fleet, real_env(), **settings)


async def test_all_go_back_to_where_they_came_from(node: Node) -> None:
    await fill(node, 70)
    reported: list[Outcome] = []
    async with Admin(node.namesrv) as admin:
        redrive = redriving(admin)
        plan = await redrive.planned(SOURCE)
        run = await redrive.start(plan, reported.append)
        assert run.state == "finished" and run.counts == {"sent": 70} and not run.pending
        assert run.skipped == 0
        (again,) = await redrive.runs()
        assert again.counts == run.counts and again.state == "finished"
        assert again.results == run.results
    assert await arrived(node) == bodies(*range(70))
    assert [outcome.offset for outcome in reported] == list(range(70))
    assert len({outcome.new_id for outcome in reported}) == 70
    assert await node.committed(f"redrive-{plan.run}", SOURCE) == 70
    record = next(r for r in await stored(node.broker, TARGET) if r.body == b"m3")
    pairs = record.pairs()
    assert pairs["UNIQ_KEY"] == reported[3].new_id != "U3"
    assert (pairs["TAGS"], pairs["KEYS"], pairs["colour"]) == ("odd", "k3 all", "red")
    assert (pairs["REDRIVE_RUN"], pairs["REDRIVE_MSG_ID"]) == (plan.run, "U3")
    assert pairs["REDRIVE_FROM"] == f"{SOURCE}/broker-a/0/3"
    assert pairs["ORIGIN_MESSAGE_ID"] == "O3"
    assert not {"DELAY", "WAIT", "RETRY_TOPIC"} & set(pairs)
    assert record.reconsume_times == 0
    queues = Counter(r.queue_id for r in await stored(node.broker, TARGET))
    assert sorted(queues.values()) == [23, 23, 24], "spread over the queues"


async def test_a_second_run_leaves_out_what_the_first_has_done(node: Node) -> None:
    await fill(node, 10)
    async with Admin(node.namesrv) as admin:
        redrive = redriving(admin)
        first = await redrive.start(await redrive.planned(SOURCE, most=4))
        assert first.counts == {"sent": 4}
        assert await arrived(node) == bodies(0, 1, 2, 3)
        await dead(node, 10)
        second = await redrive.start(await redrive.planned(SOURCE))
        assert second.counts == {"sent": 7} and second.skipped == 4
        assert await arrived(node) == bodies(*range(11))
        third = await redrive.start(await redrive.planned(SOURCE, again=True, most=2))
        assert third.counts == {"sent": 2}
    assert await arrived(node) == bodies(*range(11), 0, 1)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (Filter(tags=("even",)), [0, 2, 4]),
        (Filter(tags=("even", "odd"), keys=("k1", "k4")), [1, 4]),
        (Filter(properties={"colour": "red"}), [0, 1, 2, 3, 4]),
        (Filter(properties={"colour": "blue"}), []),
        (Filter(since_ms=1, until_ms=2), []),
        (Filter(since_ms=1), [0, 1, 2, 3, 4]),
    ],
)
async def test_a_filter_chooses(node: Node, chosen: Filter, expected: list[int]) -> None:
    await fill(node, 5)
    async with Admin(node.namesrv) as admin:
        redrive = redriving(admin)
        plan = await redrive.planned(SOURCE, filter=chosen)
        assert [one.offset for _, one in await redrive.preview(plan, 100)] == expected
        assert not await redrive.runs(), "a preview writes nothing"
        run = await redrive.start(plan)
        assert run.skipped == 5 - len(expected)
    assert await arrived(node) == bodies(*expected)


async def test_to_another_topic_or_to_one_group(node: Node) -> None:
    await fill(node, 3)
    await node.create_topic("Elsewhere", queues=1)
    await node.create_topic("%RETRY%billing", queues=1)
    async with Admin(node.namesrv) as admin:
        redrive = redriving(admin)
        await redrive.start(await redrive.planned(SOURCE, target="Elsewhere"))
        plan = await redrive.planned(SOURCE, group="billing", again=True)
        await admin.groups.create("billing")
        await redrive.start(plan)
        for wrong in ({"target": SOURCE}, {"target": "A", "group": "b"}, {"rate": 0}, {"most": 0}):
            with pytest.raises(ConfigError):
                await redrive.planned(SOURCE, **wrong)
        with pytest.raises(NoRoute):
            await redrive.planned("%DLQ%nobody")
    assert not await arrived(node)
    assert await arrived(node, "Elsewhere") == bodies(0, 1, 2)
    records = await stored(node.broker, "%RETRY%billing")
    assert [record.pairs()["RETRY_TOPIC"] for record in records] == [TARGET] * 3


async def test_what_cannot_be_sent_is_said_and_not_lost(node: Node) -> None:
    await fill(node, 3)
    await dead(node, 3, RETRY_TOPIC="Gone")
    await node.send(SOURCE, b"m4")
    async with Admin(node.namesrv) as admin:
        redrive = redriving(admin)
        run = await redrive.start(await redrive.planned(SOURCE))
        assert run.counts == {"sent": 3, "no_target": 2}
        whys = [outcome.why for outcome in run.results.values() if outcome.why]
        assert "Gone" in whys[0] and "where it comes from" in whys[1]
        await node.create_topic("Gone", queues=1)
        later = await redrive.start(await redrive.planned(SOURCE))
        assert later.counts == {"sent": 1, "no_target": 1} and later.skipped == 3
    assert await arrived(node, "Gone") == bodies(3)


async def test_a_compressed_body_stays_as_it_is(node: Node) -> None:
    await fill(node, 0)
    whole = b"long " * 2000
    async with Producer(node.namesrv, group="p") as producer, Admin(node.namesrv) as admin:
        sent = await producer.send(Message(SOURCE, whole))
        redrive = redriving(admin)
        run = await redrive.start(await redrive.planned(SOURCE, target=TARGET))
        (outcome,) = run.results.values()
        found = await admin.messages.by_unique_key(TARGET, outcome.new_id or "")
    assert found is not None and found.body == whole and outcome.msg_id == sent.msg_id
    (record,) = await stored(node.broker, TARGET)
    assert len(record.body) < len(whole) / 10


async def test_the_rate_is_kept(node: Node) -> None:
    await fill(node, 10)
    loop = asyncio.get_running_loop()
    async with Admin(node.namesrv) as admin:
        redrive = redriving(admin)
        began = loop.time()
        await redrive.start(await redrive.planned(SOURCE, rate=10))
        assert loop.time() - began >= 0.4, "5 at once, 5 half a second later"


@pytest.mark.parametrize("reached", [True, False], ids=["stored", "lost on the way"])
async def test_a_message_without_an_answer_is_looked_for(
    node: Node, reached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(node, 40)
    broken = {5, 35}
    whole = Sends.send

    async def send(self: Sends, item: Any, message: Any) -> Outcome:
        if item.offset in broken:
            broken.remove(item.offset)
            if reached:
                await whole(self, item, message)
            raise TimedOut("no answer")
        return await whole(self, item, message)

    monkeypatch.setattr(Sends, "send", send)
    async with Admin(node.namesrv) as admin:
        redrive = redriving(admin)
        run = await redrive.start(await redrive.planned(SOURCE))
    assert run.state == "finished" and sum(run.counts.values()) == 40
    assert set(run.counts) <= {"sent", "found"}
    assert run.results[Position("broker-a", 0, 5)].outcome == ("found" if reached else "sent")
    assert await arrived(node) == bodies(*range(40)), "none lost, none twice"


async def test_without_its_index_the_target_is_searched_itself(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(node, 4)
    whole = Sends.send
    failures = [TimedOut("no answer")]

    async def send(self: Sends, item: Any, message: Any) -> Outcome:
        outcome = await whole(self, item, message)
        if failures:
            raise failures.pop()
        return outcome

    async def nothing(*_: Any) -> None:
        return None

    monkeypatch.setattr(Sends, "send", send)
    monkeypatch.setattr("cosmodrome.client.operate.messages.Messages.by_unique_key", nothing)
    async with Admin(node.namesrv) as admin:
        redrive = redriving(admin)
        run = await redrive.start(await redrive.planned(SOURCE))
    assert run.counts == {"found": 4}
    assert await arrived(node) == bodies(*range(4))


async def test_what_cannot_be_looked_through_is_sent_and_called_uncertain(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(node, 1)
    whole = Sends.send
    failures = [TimedOut("no answer")]

    async def send(self: Sends, item: Any, message: Any) -> Outcome:
        outcome = await whole(self, item, message)
        if failures:
            raise failures.pop()
        return outcome

    async def nothing(*_: Any) -> None:
        return None

    monkeypatch.setattr(Sends, "send", send)
    monkeypatch.setattr("cosmodrome.client.operate.messages.Messages.by_unique_key", nothing)
    monkeypatch.setattr("cosmodrome.client.operate.redriving.sends.LOOK_COUNT_MAX", 0)
    async with Admin(node.namesrv) as admin:
        redrive = redriving(admin)
        run = await redrive.start(await redrive.planned(SOURCE))
    assert run.counts == {"uncertain": 1}
    assert await arrived(node) == Counter({b"m0": 2}), "twice, and it says so"


async def test_a_broker_that_restarts_is_waited_for(node: Node) -> None:
    await fill(node, 100)
    reported: list[Outcome] = []
    restarted: list[asyncio.Task[None]] = []

    async def restart() -> None:
        await node.stop_broker()
        await asyncio.sleep(0.3)
        await node.start_broker()

    def report(outcome: Outcome) -> None:
        reported.append(outcome)
        if len(reported) == 40:
            restarted.append(asyncio.create_task(restart()))

    async with Admin(node.namesrv, timeout_ms=1000) as admin:
        redrive = redriving(admin)
        run = await redrive.start(await redrive.planned(SOURCE, rate=200), report)
        await restarted[0]
    assert run.state == "finished" and sum(run.counts.values()) == 100
    assert await arrived(node) == bodies(*range(100))


async def test_waiting_ends_and_the_run_can_be_resumed(node: Node) -> None:
    await fill(node, 60)
    async with Admin(node.namesrv, timeout_ms=20_000) as admin:
        redrive = redriving(admin, give_up_after_s=0.3)
        plan = await redrive.planned(SOURCE, rate=100)
        stops: list[asyncio.Task[None]] = []

        def report(outcome: Outcome) -> None:
            if not stops:
                stops.append(asyncio.create_task(node.stop_broker()))

        with pytest.raises(Interrupted, match=f"resume {plan.run}"):
            await redrive.start(plan, report)
        await stops[0]
        with pytest.raises((Unreachable, NoBrokers)):
            await redriving(admin).runs()
    await node.start_broker()
    async with Admin(node.namesrv) as admin:
        redrive = redriving(admin)
        with pytest.raises(Busy, match=plan.run):
            await redrive.start(await redrive.planned(SOURCE))
        run = await redrive.resume(plan.run)
        assert run.state == "finished" and sum(run.counts.values()) == 60
        with pytest.raises(ConfigError, match="finished"):
            await redrive.resume(plan.run)
        with pytest.raises(ConfigError, match="finished"):
            await redrive.cancel(plan.run)
        with pytest.raises(NotThere):
            await redrive.resume("20260101-000000-abcdef")
        with pytest.raises(ConfigError):
            await redrive.resume("nonsense")
    assert await arrived(node) == bodies(*range(60))


@pytest.mark.parametrize("verb", ["cancel", "resume"])
async def test_of_two_commands_the_older_one_stops(
    node: Node, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(node, 40)
    async with Admin(node.namesrv) as admin:
        older, newer = redriving(admin), redriving(admin)
        paused, go_on = asyncio.Event(), asyncio.Event()

        async def pace(work: Any, count: int) -> None:
            """The older one stops after its first batch until the newer one has taken over."""
            if work._owner == older._owner and work.run.results:
                paused.set()
                await go_on.wait()

        monkeypatch.setattr(redrive_module._Work, "_pace", pace)
        plan = await older.planned(SOURCE, rate=20)
        work = asyncio.create_task(older.start(plan))
        await paused.wait()
        run = await getattr(newer, verb)(plan.run)
        go_on.set()
        with pytest.raises(TakenOver):
            await work
        if verb == "resume":
            assert run.state == "finished" and run.counts["uncertain"] == 0
            assert await arrived(node) == bodies(*range(40))
            return
        assert run.state == "cancelled"
        count = sum((await arrived(node)).values())
        assert 0 < count < 40
        (known,) = await newer.runs()
        assert sum(known.counts[name] for name in ("sent", "found")) == count
        rest = await newer.start(await newer.planned(SOURCE))
        assert rest.state == "finished" and rest.skipped == count
    assert await arrived(node) == bodies(*range(40))


async def test_the_audit_is_a_topic_like_any_other(node: Node) -> None:
    await fill(node, 1)
    async with Admin(node.namesrv) as admin:
        redrive = redriving(admin)
        run = await redrive.start(await redrive.planned(SOURCE))
        found = await admin.messages.by_key(AUDIT_TOPIC, run.plan.run)
    assert [message.tags for message in found] == ["begin", "resume", "intent", "done", "end"]
    await node.send(AUDIT_TOPIC, b"not ours")
    async with Admin(node.namesrv) as admin:
        assert len(await redriving(admin).runs()) == 1


async def test_over_two_brokers(bare_node: Node) -> None:
    for name in ("broker-b", "broker-a"):
        await bare_node.start_broker(name)
        await bare_node.create_topic(TARGET, queues=2, broker=name)
        await bare_node.create_topic(SOURCE, queues=1, broker=name)
        for number in range(6):
            await bare_node.send(SOURCE, f"{name}{number}".encode(), broker=name)
    async with Admin(bare_node.namesrv) as admin:
        redrive = redriving(admin)
        run = await redrive.start(await redrive.planned(SOURCE, target=TARGET))
        assert run.counts == {"sent": 12}
        assert {place.broker for place in run.results} == {"broker-a", "broker-b"}
        again = await redrive.start(await redrive.planned(SOURCE, target=TARGET))
        assert not again.counts and again.skipped == 12
    parts = [await stored(broker, TARGET) for broker in bare_node.brokers.values()]
    assert all(parts), "both brokers take some"
    found = Counter(record.body.decode() for part in parts for record in part)
    assert found == Counter(f"broker-{letter}{n}" for letter in "ab" for n in range(6))
    audit = [await stored(broker, AUDIT_TOPIC) for broker in bare_node.brokers.values()]
    assert not audit[0] and audit[1], "in one place: the first broker by name"
