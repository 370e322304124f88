"""Lag, explanations and checks of groups: against upstream's brokers, and about Java consumers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from peers.clients import Client
from peers.clients import Consumer as Driver
from tests.oracle.client_kit import Target

from cosmodrome import Admin, Consumer, Message, Producer
from cosmodrome.client.operate.diagnosis.checkup import cluster_checks
from cosmodrome.client.operate.diagnosis.explain import Explanation, explain
from cosmodrome.client.operate.diagnosis.facts import Limits
from cosmodrome.client.operate.standing import standing
from cosmodrome.env.real import WallClock
from cosmodrome.findings import Severity

QUICK = Limits(sample_ms=300)


async def explained(target: Target, group: str, topic: str | None = None) -> Explanation:
    async with Admin(target.namesrv) as admin:
        return await explain(admin.fleet, group, topic, clock=WallClock(), limits=QUICK)


def codes(found: Explanation) -> set[str]:
    return {finding.code for finding in found.findings}


async def put(target: Target, topic: str, count: int, tags: str = "A") -> None:
    async with Producer(target.namesrv, group="p") as producer:
        for number in range(count):
            await producer.send(Message(topic, f"m{number}", tags=tags))


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await check():
            await asyncio.sleep(0.2)


async def test_the_cluster_is_in_order(target: Target) -> None:
    async with Admin(target.namesrv) as admin:
        checks = await cluster_checks(admin.fleet, WallClock())
    failing = [
        check for check in checks if check.severity is Severity.ERROR and check.code != "disk"
    ]
    assert failing == []
    assert {"name server", "broker", "advertised address", "disk", "clock"} == {
        check.code for check in checks
    }
    (clock,) = [check for check in checks if check.code == "clock"]
    assert abs(clock.evidence["ahead_s"]) < 5


async def test_a_java_consumer_that_has_consumed_everything(
    target: Target, java: Client, place: str, group: str
) -> None:
    await put(target, place, 8)
    with Driver(java, target.namesrv, place, group) as driver:
        await asyncio.to_thread(driver.receive, 8)

        async def caught_up() -> bool:
            async with Admin(target.namesrv) as admin:
                return (await standing(admin.fleet, group, place)).lag == 0

        await until(caught_up)
        found = await explained(target, group)
    assert found.problems == [], found.problems
    assert codes(found) == {"CAUGHT_UP"}
    (member,) = found.facts.members.values()
    assert len(member.looks) == 2 and member.looks[0].mq_table
    assert member.looks[0].jstack and "ConsumeMessage" in str(member.looks[0].jstack)


async def test_java_consumers_that_subscribe_differently_and_to_nothing(
    target: Target, java: Client, place: str, group: str
) -> None:
    await put(target, place, 8)
    with (
        Driver(java, target.namesrv, place, group, expression="TagA"),
        Driver(java, target.namesrv, place, group, expression="TagB"),
    ):

        async def both_joined() -> bool:
            async with Admin(target.namesrv) as admin:
                return len(await admin.groups.members(group)) == 2

        await until(both_joined)
        found = await explained(target, group)
    said = {name: member.why or len(member.looks) for name, member in found.facts.members.items()}
    assert {"SUBSCRIPTIONS_DIFFER", "FILTER_DROPS_EVERYTHING"} <= codes(found), said
    (filtered,) = [one for one in found.findings if one.code == "FILTER_DROPS_EVERYTHING"]
    assert filtered.evidence["looked_at"] == 8
    assert filtered.evidence["tags_seen"] == {"A": 8}


async def test_lag_and_its_reasons(target: Target, place: str, group: str) -> None:
    await put(target, place, 8)
    async with Admin(target.namesrv) as admin:
        await admin.groups.create(group)
        unknown = await standing(admin.fleet, group, place)
        assert unknown.lag is None and {row.offset for row in unknown.queues} == {None}
        for row in unknown.queues:
            await admin.offsets.set(group, row.queue, 0)
        behind = await standing(admin.fleet, group, place)
        assert (behind.lag, behind.members) == (8, 0)
        assert behind.age_ms is not None and 0 <= behind.age_ms < 600_000
        for row in unknown.queues:
            await admin.offsets.set(group, row.queue, 50)
    found = await explained(target, group, place)
    assert codes(found) == {"NO_MEMBERS", "OFFSET_BEYOND_END"}


async def test_sql_that_drops_everything(target: Target, place: str, group: str) -> None:
    await put(target, place, 8)
    async with Consumer(target.namesrv, group=group) as consumer:
        await consumer.subscribe(place, sql="TAGS = 'B'")
        found = await explained(target, group)
    assert "FILTER_DROPS_EVERYTHING" in codes(found), found.findings


async def test_what_may_not_be_read(target: Target, place: str, group: str) -> None:
    async with Admin(target.namesrv) as admin:
        await admin.groups.create(group, consume_enable=False)
        async with Consumer(target.namesrv, group=group) as consumer:
            await consumer.subscribe(place)
            found = await explained(target, group)
            assert "CONSUME_DISABLED" in codes(found) and "PULL_REFUSED" not in codes(found)
            assert [refusal.code for refusal in found.facts.refusals][:1] == [16]
            await admin.groups.create(group)
            await admin.topics.update(place, perm=2)
            assert "TOPIC_NOT_READABLE" in codes(await explained(target, group))
