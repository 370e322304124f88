"""Why a group is idle or slow: every cause is really caused, then found."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.diagnosis.explain import CAUSES, Explanation, explain, judge
from cosmodrome.client.operate.diagnosis.facts import Limits
from cosmodrome.client.operate.diagnosis.probes import stands_still
from cosmodrome.client.options import ClientOptions
from cosmodrome.client.receive.consumer import Consumer
from cosmodrome.client.receive.handlers import Reject
from cosmodrome.env.options import NameServerOptions, SocketOptions
from cosmodrome.env.real import WallClock, real_env
from cosmodrome.findings import Finding, Severity
from cosmodrome.nameserver.app import build_nameserver
from cosmodrome.transport.channel import Channel
from cosmodrome.wire import bodies, commands
from cosmodrome.wire.bodies import ConsumerData, HeartbeatData, SubscriptionData

QUICK = {"sample_ms": 100, "broker_timeout_ms": 5000}


async def explained(
    node: Any, group: str = "g", topic: str | None = None, **limits: int
) -> Explanation:
    async with Admin(node.namesrv, timeout_ms=10_000) as admin:
        return await explain(
            admin.fleet, group, topic, clock=WallClock(), limits=Limits(**{**QUICK, **limits})
        )


def the(found: Explanation, code: str) -> Finding:
    findings = [finding for finding in found.findings if finding.code == code]
    assert len(findings) == 1, [finding.code for finding in found.findings]
    return findings[0]


def codes(found: Explanation) -> set[str]:
    return {finding.code for finding in found.findings}


@contextlib.asynccontextmanager
async def consuming(
    node: Any, *topics: str, handler: Any = None, tags: str | None = None, **settings: Any
) -> AsyncIterator[Consumer]:
    """A member of group g that has joined, and consumes with the handler."""
    settings = {"group": "g", "consume_from": "first", "close_timeout_ms": 100, **settings}
    async with Consumer(settings.pop("namesrv", node.namesrv), **settings) as consumer:
        for topic in topics or ("T",):
            await consumer.subscribe(topic, tags=tags)
        running = asyncio.create_task(consumer.run(handler or (lambda _: None)))
        yield consumer
        running.cancel()
        await asyncio.wait((running,))


async def until(check: Any) -> None:
    async with asyncio.timeout(60):
        while not await check():
            await asyncio.sleep(0.02)


@pytest.fixture
async def topic(node: Any) -> Any:
    """The node with a topic T of two queues and a few messages tagged A."""
    await node.create_topic("T", queues=2)
    for number in range(6):
        await node.send("T", b"x", queue_id=number % 2, properties={"TAGS": "A"})
    return node


async def test_a_healthy_group_has_nothing_wrong_and_is_told_what_was_checked(topic: Any) -> None:
    async with consuming(topic, commit_every_ms=100) as consumer:

        async def done() -> bool:
            await consumer.commit()
            return await topic.committed("g", "T") == 3 == await topic.committed("g", "T", 1)

        await until(done)
        found = await explained(topic)
    assert found.problems == [], found.problems
    assert codes(found) == {"CAUGHT_UP"}
    assert found.unchecked == ["no queue is locked by an outsider"]  # nobody consumes in order
    assert len(found.checked) == len(CAUSES) - 2
    assert the(found, "CAUGHT_UP").severity == Severity.INFO


async def test_an_empty_topic(node: Any) -> None:
    await node.create_topic("T", queues=1)
    async with consuming(node):
        found = await explained(node)
    assert codes(found) == {"TOPIC_EMPTY"}


# --- names -----------------------------------------------------------------------------------


async def test_no_such_group(topic: Any) -> None:
    async with Admin(topic.namesrv) as admin:
        await admin.groups.create("billing")
    finding = the(await explained(topic, "biling"), "GROUP_UNKNOWN")
    assert finding.evidence["similar"] == ["billing"]
    assert finding.command == "cosmo group explain billing"


async def test_no_such_topic(topic: Any) -> None:
    await topic.create_topic("Orders")
    async with consuming(topic, "Ordres", "T"):
        found = await explained(topic)
    finding = the(found, "TOPIC_UNKNOWN")
    assert finding.evidence["subscribed"] is True
    assert "did you mean Orders" in finding.sentence


async def test_the_topic_that_was_asked_about_is_not_subscribed(topic: Any) -> None:
    await topic.create_topic("U")
    async with consuming(topic, "U"):
        found = await explained(topic, "g", "T")
    assert the(found, "NOT_SUBSCRIBED").evidence == {"members": 1, "subscribed": ["U"]}


# --- members ---------------------------------------------------------------------------------


async def test_no_members(topic: Any) -> None:
    async with consuming(topic):
        pass
    await topic.send("T", b"more")
    await topic.call(
        commands.UpdateConsumerOffset(consumer_group="g", topic="T", queue_id=0, commit_offset=1)
    )
    await topic.call(
        commands.UpdateConsumerOffset(consumer_group="g", topic="T", queue_id=1, commit_offset=3)
    )
    finding = the(await explained(topic), "NO_MEMBERS")
    assert finding.severity == Severity.ERROR
    assert finding.evidence == {"members": 0, "brokers_asked": 1, "lag": 3}


async def test_what_nobody_could_be_asked_about_is_not_called_in_order(bare_node: Any) -> None:
    """Whoever is connected to the broker that is silent, and whatever it knows, is not known."""
    await bare_node.start_broker("broker-a")
    await bare_node.start_broker("broker-b", broker_ip1="203.0.113.9")
    async with Admin(bare_node.namesrv) as admin:
        found = await explained(bare_node, broker_timeout_ms=1500)
        assert "GROUP_UNKNOWN" not in codes(found)  # the silent one may know it
        assert {"the group exists", "members are connected", "handlers return"} <= set(
            found.unchecked
        )
        await admin.groups.create("g", broker=f"127.0.0.1:{bare_node.broker.port}")
    finding = the(await explained(bare_node, broker_timeout_ms=1500), "NO_MEMBERS")
    assert (finding.severity, finding.evidence["brokers_asked"]) == (Severity.WARNING, 1)
    assert "broker(s) that answer" in finding.sentence


async def test_the_consumers_are_in_another_namespace(topic: Any) -> None:
    async with Admin(topic.namesrv) as admin:
        await admin.groups.create("g")
    await topic.create_topic("shop%T")
    async with consuming(topic, client=ClientOptions(namespace="shop")):
        found = await explained(topic)
    finding = the(found, "OTHER_NAMESPACE")
    assert finding.evidence == {"group": "shop%g", "members": 1}
    assert "NO_MEMBERS" in codes(found)


async def test_the_consumers_use_another_cluster(bare_node: Any) -> None:
    """The second broker is known to both name servers; the topic is on the first one only."""
    other = build_nameserver(NameServerOptions(listen_port=0), SocketOptions(), real_env())
    await other.start()
    try:
        await bare_node.start_broker("broker-a", broker_cluster_name="east")
        both = f"{bare_node.namesrv};{other.address}"
        await bare_node.start_broker("broker-b", broker_cluster_name="west", namesrv_addr=both)
        await bare_node.create_topic("T", broker="broker-a")
        await bare_node.create_topic("U", broker="broker-b")
        async with consuming(bare_node, "T", "U", namesrv=other.address):
            found = await explained(bare_node, "g", "T")
        finding = the(found, "OTHER_CLUSTER")
        assert finding.evidence["connected_to"] == ["broker-b"]
        assert finding.evidence["clusters"] == ["west"]
        assert finding.evidence["topic_on"] == ["broker-a"]
        assert finding.evidence["name_servers_of_members"] == [other.address]
    finally:
        await other.stop()


async def test_members_subscribe_differently(topic: Any) -> None:
    async with consuming(topic, tags="A"), consuming(topic, tags="B"):
        found = await explained(topic)
    finding = the(found, "SUBSCRIPTIONS_DIFFER")
    kinds = (finding.evidence["kind_1"], finding.evidence["kind_2"])
    assert sorted(kind["subscribe"] for kind in kinds) == [["T:A"], ["T:B"]]


async def test_more_members_than_queues(node: Any) -> None:
    await node.create_topic("T", queues=1)
    async with consuming(node) as one, consuming(node) as two:

        async def shared() -> bool:
            both = [*one.assignment, *two.assignment]
            return sum(queue.topic == "T" for queue in both) == 1

        await until(shared)
        found = await explained(node)
    finding = the(found, "MORE_MEMBERS_THAN_QUEUES")
    assert finding.severity == Severity.WARNING
    assert (finding.evidence["members"], finding.evidence["queues"]) == (2, 1)
    assert len(finding.evidence["idle"]) == 1
    assert finding.command == "cosmo topic alter T --queues 2"


async def test_a_member_that_does_not_answer(topic: Any) -> None:
    """Connected and beating, but its client cannot be asked."""
    beat = HeartbeatData(
        client_id="mute@1",
        consumer_data_set=[
            ConsumerData(group_name="g", subscription_data_set=[SubscriptionData(topic="T")])
        ],
    )
    channel = Channel("127.0.0.1", topic.broker.port)
    await channel.call(commands.HeartBeat(body=bodies.encode(beat)))
    found = await explained(topic)
    await channel.close()
    assert the(found, "MEMBER_SILENT").evidence["client_id"] == "mute@1"


# --- what may be read ------------------------------------------------------------------------


async def test_a_topic_without_read_permission(topic: Any) -> None:
    await topic.create_topic("T", queues=2, perm=2)
    async with consuming(topic):
        found = await explained(topic)
    finding = the(found, "TOPIC_NOT_READABLE")
    assert finding.evidence == {"topic": "T", "broker": "broker-a", "perm": 2}
    assert finding.command == "cosmo topic alter T --perm 6"
    assert "PULL_REFUSED" not in codes(found)


async def test_a_broker_without_read_permission(bare_node: Any) -> None:
    await bare_node.start_broker(broker_permission=2)
    await bare_node.create_topic("T")
    async with consuming(bare_node):
        found = await explained(bare_node)
    finding = the(found, "BROKER_NOT_READABLE")
    assert finding.command == "cosmo broker config set --broker broker-a brokerPermission=6"
    assert "PULL_REFUSED" not in codes(found)


async def test_consumption_switched_off(topic: Any) -> None:
    async with consuming(topic):
        async with Admin(topic.namesrv) as admin:
            await admin.groups.create("g", consume_enable=False)
        found = await explained(topic)
    finding = the(found, "CONSUME_DISABLED")
    assert finding.command == "cosmo group alter g --consume on"
    assert "PULL_REFUSED" not in codes(found)


async def test_broadcast_switched_off(topic: Any, tmp_path: Path) -> None:
    async with Admin(topic.namesrv) as admin:
        await admin.groups.create("g", consume_broadcast_enable=False)
    async with consuming(topic, model="broadcasting", offsets_dir=str(tmp_path)):
        found = await explained(topic)
    assert {"BROADCAST_DISABLED", "BROADCASTING"} <= codes(found)


async def test_broadcasting_is_worth_knowing_and_no_problem(topic: Any, tmp_path: Path) -> None:
    async with consuming(topic, model="broadcasting", offsets_dir=str(tmp_path)):
        found = await explained(topic)
    assert codes(found) == {"BROADCASTING"}
    assert "offsets live at the clients" in the(found, "BROADCASTING").sentence
    assert found.problems == []


async def test_a_pull_that_the_broker_refuses_for_another_reason(topic: Any) -> None:
    """The name server still routes to a broker that has deleted the topic."""
    async with consuming(topic):
        await topic.call(commands.DeleteTopicInBroker(topic="T"))
        found = await explained(topic)
    finding = the(found, "PULL_REFUSED")
    assert finding.evidence["code"] == 17
    assert "does not exist on this broker" in finding.sentence


# --- addresses -------------------------------------------------------------------------------


async def test_an_advertised_address_that_nobody_reaches(bare_node: Any) -> None:
    await bare_node.start_broker(broker_ip1="203.0.113.9")
    await bare_node.create_topic("T")
    finding = the(await explained(bare_node, broker_timeout_ms=1500), "BROKER_UNREACHABLE")
    assert str(finding.evidence["address"]).startswith("203.0.113.9:")
    assert "brokerIP1" in finding.command


async def test_a_loopback_address_advertised_to_others(topic: Any) -> None:
    """A member that comes from elsewhere takes 127.0.0.1 for its own machine."""
    own = _own_address()
    if own is None:
        pytest.skip("this machine has no address but loopback")
    servers = build_nameserver(
        NameServerOptions(listen_port=0, bind_address=own), SocketOptions(), real_env()
    )
    await servers.start()
    try:
        where = f"{own}:{servers.port}"
        await topic.start_broker("broker-c", namesrv_addr=where)
        async with Admin(where, timeout_ms=10_000) as admin:
            found = await explain(admin.fleet, "g", clock=WallClock(), limits=Limits(**QUICK))
        finding = the(found, "LOOPBACK_ADVERTISED")
        assert finding.evidence["others_at"] == [own]
        assert "LOOPBACK_ADVERTISED" not in codes(await explained(topic))
    finally:
        await topic.stop_broker("broker-c")
        await servers.stop()


def _own_address() -> str | None:
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 9))
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if address.startswith("127.") else address


async def test_no_broker_at_all(bare_node: Any) -> None:
    found = await explained(bare_node)
    assert codes(found) == {"NO_BROKERS"}


# --- offsets and filters ---------------------------------------------------------------------


async def test_an_offset_beyond_the_end(topic: Any) -> None:
    for queue_id in (0, 1):
        await topic.call(
            commands.UpdateConsumerOffset(
                consumer_group="g", topic="T", queue_id=queue_id, commit_offset=90 + queue_id
            )
        )
    finding = the(await explained(topic), "OFFSET_BEYOND_END")
    assert finding.evidence["queues"] == 2
    assert (finding.evidence["end"], finding.evidence["offset"]) == (3, 91)
    assert finding.command == "cosmo group reset g --topic T --to earliest"


async def test_an_offset_before_the_beginning(bare_node: Any) -> None:
    await bare_node.start_broker(mapped_file_size_commit_log=64 << 10, file_reserved_time=0)
    await bare_node.create_topic("T", queues=1)
    for _ in range(40):
        await bare_node.send("T", bytes(8 << 10))
    await bare_node.call(
        commands.UpdateConsumerOffset(consumer_group="g", topic="T", queue_id=0, commit_offset=2)
    )

    async def shorter() -> bool:
        await bare_node.call(commands.DeleteExpiredCommitlog())
        first = await bare_node.call(commands.GetMinOffset(topic="T", queue_id=0))
        return bool(first.offset > 2)

    await until(shorter)
    finding = the(await explained(bare_node), "OFFSET_BEFORE_BEGINNING")
    assert finding.severity == Severity.WARNING
    assert finding.evidence["lost"] == finding.evidence["first"] - 2


@pytest.mark.parametrize("wanted", [{"tags": "B || C"}, {"sql": "TAGS = 'B'"}])
async def test_a_filter_that_drops_everything(topic: Any, wanted: dict[str, Any]) -> None:
    async with Consumer(topic.namesrv, group="g") as consumer:
        await consumer.subscribe("T", **wanted)
        found = await explained(topic)
    finding = the(found, "FILTER_DROPS_EVERYTHING")
    assert (finding.evidence["looked_at"], finding.evidence["passed"]) == (6, 0)
    assert finding.evidence["tags_seen"] == {"A": 6}


@pytest.mark.parametrize("wanted", [{"tags": "A || C"}, {"sql": "TAGS = 'A'"}])
async def test_a_filter_that_lets_some_pass_is_no_finding(
    topic: Any, wanted: dict[str, Any]
) -> None:
    async with Consumer(topic.namesrv, group="g") as consumer:
        await consumer.subscribe("T", **wanted)
        found = await explained(topic)
    assert [facts.passed for facts in found.facts.filters] == [6]
    assert "FILTER_DROPS_EVERYTHING" not in codes(found)


# --- handlers --------------------------------------------------------------------------------


async def test_a_queue_locked_by_an_outsider(topic: Any) -> None:
    body = bodies.LockBatchRequestBody(
        client_id="ghost@1",
        consumer_group="g",
        mq_set=[bodies.MessageQueue(topic="T", broker_name="broker-a", queue_id=1)],
    )
    await topic.call(commands.LockBatchMq(body=bodies.encode(body)))
    async with consuming(topic, orderly=True) as consumer:

        async def has_the_other() -> bool:
            return any(queue.topic == "T" for queue in consumer.assignment)

        await until(has_the_other)
        found = await explained(topic)
    finding = the(found, "QUEUE_LOCKED")
    assert (finding.evidence["queue"], finding.evidence["topic"]) == (1, "T")


async def test_a_member_that_holds_as_much_as_it_may(topic: Any) -> None:
    gate = asyncio.Event()

    async def wait(message: Any) -> None:
        await gate.wait()

    async with consuming(topic, handler=wait, prefetch_messages=2, pull_batch=2) as consumer:

        async def full() -> bool:
            info = (await explained(topic)).facts.members
            looks = [member.last for member in info.values() if member.last is not None]
            return any(
                row.get("cachedMsgCount", 0) >= 2
                for look in looks
                for row in look.mq_table.values()
            )

        await until(full)
        found = await explained(topic)
        gate.set()
        assert consumer.assignment
    finding = the(found, "FLOW_CONTROL")
    assert (finding.evidence["cached_messages"], finding.evidence["cached_messages_max"]) == (2, 2)
    assert "HANDLER_STUCK" not in codes(found)  # not for long enough


async def the_handler_that_never_returns(gate: asyncio.Event) -> None:
    await gate.wait()


async def test_a_handler_that_does_not_return(topic: Any) -> None:
    gate, entered = asyncio.Event(), asyncio.Event()

    async def stuck(message: Any) -> None:
        entered.set()
        await the_handler_that_never_returns(gate)

    async with consuming(topic, handler=stuck):
        await entered.wait()
        await asyncio.sleep(0.15)
        found = await explained(topic, stuck_after_ms=100)
        gate.set()
    finding = the(found, "HANDLER_STUCK")
    assert finding.evidence["cached_messages"] > 0
    assert any("the_handler_that_never_returns" in line for line in finding.evidence["stack"])

    # The same in a queue that was idle for hours, with a message that came just now.
    assert all(0 < since <= found.facts.now_ms for since in found.facts.held_since_ms.values())
    for queue in found.facts.held_since_ms:
        found.facts.held_since_ms[queue] = found.facts.now_ms
    assert "HANDLER_STUCK" not in codes(judge(found.facts))


@pytest.mark.parametrize(
    ("changes", "still"),
    [
        ({}, True),
        ({"lastConsumeTimestamp": 1_001}, True),  # the same moment, rounded differently
        ({"lastConsumeTimestamp": 999}, True),
        ({"lastConsumeTimestamp": 1_100}, False),
        ({"cachedMsgMinOffset": 8}, False),
        ({"commitOffset": 8}, False),
        ({"cachedMsgCount": 0}, False),
    ],
)
def test_what_stands_still(changes: dict[str, int], still: bool) -> None:
    look = {
        "cachedMsgCount": 1,
        "cachedMsgMinOffset": 7,
        "commitOffset": 7,
        "lastConsumeTimestamp": 1_000,
    }
    assert stands_still(look, {**look, **changes}) is still


async def test_handlers_that_fail(topic: Any) -> None:
    failed = asyncio.Event()

    def fail(message: Any) -> None:
        failed.set()
        raise ValueError("no")

    async with consuming(topic, handler=fail):
        await failed.wait()
        async with asyncio.timeout(60):  # it is counted after the handler has returned
            while "RETRY_STORM" not in codes(found := await explained(topic)):
                pass
    finding = the(found, "RETRY_STORM")
    assert finding.severity == Severity.ERROR
    assert finding.evidence["failed_per_s"] > finding.evidence["succeeded_per_s"]
    assert finding.evidence["failed_since_start"] >= 1


async def test_dead_letters_that_wait(topic: Any) -> None:
    def reject(message: Any) -> None:
        raise Reject("never")

    async with consuming(topic, handler=reject):

        async def dead() -> bool:
            found = await explained(topic)
            return found.facts.retries.dead == 6

        await until(dead)
        finding = the(await explained(topic), "DEAD_LETTERS")
    assert finding.command == "cosmo dlq peek g"
    assert finding.severity == Severity.WARNING


async def test_a_group_that_is_slower_than_its_producers(topic: Any) -> None:
    gate = asyncio.Event()

    async def slow(message: Any) -> None:
        await gate.wait()

    for queue_id in (0, 1):
        await topic.call(
            commands.UpdateConsumerOffset(
                consumer_group="g", topic="T", queue_id=queue_id, commit_offset=1
            )
        )

    async def produce() -> None:
        while True:
            await topic.send("T", b"more")
            await asyncio.sleep(0.01)

    async with consuming(topic, handler=slow):
        producing = asyncio.create_task(produce())
        found = await explained(topic, sample_ms=300)
        producing.cancel()
        gate.set()
    finding = the(found, "FALLING_BEHIND")
    assert finding.evidence["lag_after"] > finding.evidence["lag_before"] >= 4


def test_every_code_has_its_part_in_the_guide() -> None:
    root = Path(__file__).parents[3]
    folder = root / "src" / "cosmodrome" / "client" / "operate" / "diagnosis"
    source = "".join((folder / name).read_text() for name in ("causes.py", "member_causes.py"))
    known = set(re.findall(r'Finding\(\s*"([A-Z_]+)"', source))
    assert len(known) >= 25
    guide = (root / "docs" / "my-consumer-gets-nothing.md").read_text()
    assert set(re.findall(r"^### ([A-Z_]+)$", guide, re.MULTILINE)) == known
