"""Our client beside Java's and Go's: one group of all three, and contents both ways."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from peers.clients import GO, JAVA, JAVA_HURRIED, Client, Letter, Line, send
from peers.clients import Consumer as Peer
from peers.java import mqadmin
from peers.raw import create_topic
from tests.oracle.client_kit import (
    JAVA_49,
    OURS,
    Inbox,
    Target,
    check_same,
    messages,
    running,
    until,
)
from tests.oracle.oracle_checks import body, letters

from cosmodrome import ClientOptions, Consumer, Message, Producer, ReceivedMessage, blocking

Ready = Callable[[Client], Client]
Record = Callable[[str, object], None]

QUEUES = 8


@pytest.fixture
def senders_and_readers(ready: Ready) -> tuple[Client, Client]:
    return ready(JAVA), ready(GO)


async def test_they_read_what_we_send(
    senders_and_readers: tuple[Client, Client], target: Target, place: str, group: str
) -> None:
    """Java and Go see what our consumer would see, and upstream's tool finds it by its id."""
    sent = [message for message in messages(place, 24) if message.flag % 12 != 11]
    large = "viel 🚀 ".encode() * 2_000
    with ExitStack() as stack:
        readers = [
            stack.enter_context(
                Peer(
                    client,
                    target.namesrv,
                    place,
                    f"{client.name}_{group}",
                    properties=["colour"],
                    await_start=False,
                )
            )
            for client in senders_and_readers
        ]
        for reader in readers:
            await asyncio.to_thread(reader.await_start)
        async with Producer(target.namesrv, group=group) as producer:
            results = [await producer.send(message) for message in sent[:12]]
            results += await producer.send_batch(sent[12:])
            results.append(await producer.send(Message(place, large)))
        for reader in readers:
            lines = await asyncio.to_thread(reader.receive, len(results))
            by_id = {line["msg_id"]: line for line in lines}
            assert len(lines) == len(results)
            for message, result in zip([*sent, Message(place, large)], results, strict=True):
                line = by_id[result.msg_id]
                assert body(line) == message.body
                assert line["tags"] == message.tags
                assert (line["keys"] or "") == " ".join(message.keys)
                assert line["properties"].get("colour") == message.properties.get("colour")
                assert line["queue_id"] == result.queue.queue_id
                assert line["queue_offset"] == result.queue_offset
    words = ("queryMsgByUniqueKey", "-t", place, "-i", results[0].msg_id)
    printed = await asyncio.to_thread(mqadmin, target.namesrv, *words)
    shown = dict(line.split(":", 1) for line in printed.splitlines() if ":" in line)
    assert shown["Topic"].split() == [place]
    assert shown["Queue ID"].split() == [str(results[0].queue.queue_id)]
    assert shown["Queue Offset"].split() == [str(results[0].queue_offset)]
    assert f"UNIQ_KEY={results[0].msg_id}" in shown["Properties"]
    assert shown["Store Host"].split() == [target.cluster.broker]


async def test_we_read_what_they_send(
    senders_and_readers: tuple[Client, Client], target: Target, place: str, group: str
) -> None:
    inbox = Inbox()
    consumer = Consumer(target.namesrv, group=group, consume_from="first")
    async with running(consumer, place, inbox):
        answers: dict[bytes, Line] = {}
        sent: dict[bytes, Letter] = {}
        for client in senders_and_readers:
            for mode in ("sync", "batch"):
                some = letters(12, label=f"{client.name} {mode}")
                lines = await asyncio.to_thread(
                    send, client, target.namesrv, place, f"p_{group}", mode, some
                )
                sent |= {letter.body: letter for letter in some}
                if mode == "sync":
                    answers |= dict(zip([letter.body for letter in some], lines, strict=True))
        await inbox.receive(len(sent))
    assert Counter(inbox.bodies) == Counter(sent.keys())
    for message in inbox.messages:
        letter = sent[message.body]
        assert (message.tags, " ".join(message.keys)) == (letter.tags, letter.keys or "")
        for key, value in letter.properties.items():
            assert message.properties[key] == value
        assert message.born_host.startswith("127.0.0.1:")
        if (answer := answers.get(message.body)) is not None:
            assert message.msg_id == answer["msg_id"]
            assert message.queue_offset == answer["queue_offset"]


class Stream:
    """Our producer, one message after the other, in a thread of its own."""

    def __init__(self, namesrv: str, topic: str, group: str) -> None:
        self.sent: list[bytes] = []
        self._topic = topic
        self._producer = blocking.Producer(namesrv, group=group)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Stream:
        self._producer.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        self._producer.stop()

    def _run(self) -> None:
        number = 0
        while not self._ending.wait(0.01):
            text = b"%d" % number
            self._producer.send(Message(self._topic, text))
            self.sent.append(text)
            number += 1


class Group:
    """The members of three languages and what each of them got, in the order it is seen here."""

    def __init__(self, ours: list[ReceivedMessage], **peers: Peer) -> None:
        self.ours = ours
        self.peers = peers

    def got(self) -> dict[str, list[tuple[bytes, int]]]:
        """Bodies and queues by member, those that have left included."""
        found = {"ours": [(message.body, message.queue_id) for message in list(self.ours)]}
        for name, peer in self.peers.items():
            peer.listen(0.01)
            found[name] = [(body(line), line["queue_id"]) for line in peer.messages]
        return found

    def shares(self, since: dict[str, int]) -> dict[str, set[int]]:
        """The queues from which each member got something lately."""
        return {
            name: {queue for _, queue in lines[since.get(name, 0) :]}
            for name, lines in self.got().items()
        }

    def counts(self) -> dict[str, int]:
        return {name: len(lines) for name, lines in self.got().items()}

    def settle(self, *members: str, timeout_s: float = 60) -> dict[str, set[int]]:
        """Waits until for two seconds these members share all queues and no queue has two; no
        message came twice then."""
        deadline = time.monotonic() + timeout_s
        while True:
            since = self.counts()
            time.sleep(2)
            shares = {name: queues for name, queues in self.shares(since).items() if queues}
            owned = sorted(queue for queues in shares.values() for queue in queues)
            sizes = {len(queues) for queues in shares.values()}
            if (
                owned == list(range(QUEUES))
                and set(shares) == set(members)
                and max(sizes) - min(sizes) <= 1
            ):
                lately = [text for name, n in since.items() for text, _ in self.got()[name][n:]]
                assert len(lately) == len(set(lately))
                return shares
            assert time.monotonic() < deadline, f"queues are shared like this: {shares}"


@pytest.fixture
def wide(target: Target, name: str) -> str:
    cluster = target.cluster
    create_topic(cluster.namesrv_port, cluster.broker_port, f"W_{name}", QUEUES)
    return f"W_{name}"


@pytest.mark.parametrize("target", [OURS, JAVA_49], indirect=True, scope="session")
def test_one_group_of_three_languages(
    ready: Ready, target: Target, wide: str, group: str, record_property: Record
) -> None:
    """They share the queues; one leaves in order, one is killed; nothing is missed."""
    java, go = ready(JAVA_HURRIED), ready(GO)
    got: list[ReceivedMessage] = []
    ours = blocking.Consumer(
        target.namesrv, group=group, consume_from="first", client=ClientOptions(heartbeat_ms=1_000)
    )
    with ExitStack() as stack:
        peers = {
            client.name: stack.enter_context(
                Peer(client, target.namesrv, wide, group, await_start=False)
            )
            for client in (java, go)
        }
        stack.enter_context(ours)
        ours.subscribe(wide, handler=got.append)
        for peer in peers.values():
            peer.await_start()
        stream = stack.enter_context(Stream(target.namesrv, wide, f"p_{group}"))
        members = Group(got, **peers)

        shares = members.settle("java", "go", "ours")
        assert {q.queue_id for q in ours.assignment if q.topic == wide} == shares["ours"]
        assert set(peers["java"].assigned) == shares["java"]
        peers["java"].close()
        shares = members.settle("go", "ours")
        assert {q.queue_id for q in ours.assignment if q.topic == wide} == shares["ours"]
        peers["go"].kill9()
        members.settle("ours")
        stream.close()

        def all_came() -> bool:
            bodies = {text for lines in members.got().values() for text, _ in lines}
            return set(stream.sent) <= bodies

        deadline = time.monotonic() + 30
        while not all_came():
            assert time.monotonic() < deadline, "messages are missing"
            time.sleep(0.1)
    # What came again had been consumed but not committed when a member joined, left or died.
    counts = Counter(text for lines in members.got().values() for text, _ in lines)
    record_property("sent", len(stream.sent))
    record_property("came again", sum(counts.values()) - len(counts))
    record_property("by member", members.counts())
    assert set(counts) == set(stream.sent)


async def test_ours_alone_share_as_java_would(target: Target, wide: str, group: str) -> None:
    """Three members of ours and the order of their ids decide who has what."""
    consumers = [
        Consumer(
            target.namesrv,
            group=group,
            consume_from="first",
            client=ClientOptions(instance_name=f"member{number}"),
        )
        for number in range(3)
    ]
    inboxes = [Inbox() for _ in consumers]
    async with (
        running(consumers[0], wide, inboxes[0]),
        running(consumers[1], wide, inboxes[1]),
        running(consumers[2], wide, inboxes[2]),
    ):

        def shares() -> list[list[int]]:
            return [
                sorted(q.queue_id for q in consumer.assignment if q.topic == wide)
                for consumer in consumers
            ]

        wanted = [[0, 1, 2], [3, 4, 5], [6, 7]]
        await until(lambda: shares() == wanted, "the shares that every client computes")
        sent = messages(wide, 40)
        async with Producer(target.namesrv, group=f"p_{group}") as producer:
            await asyncio.gather(*(producer.send(message) for message in sent))
        await until(lambda: sum(len(i.messages) for i in inboxes) >= 40, "all messages")
        for inbox, queues in zip(inboxes, wanted, strict=True):
            assert {message.queue_id for message in inbox.messages} <= set(queues)
        check_same(sent, [message for inbox in inboxes for message in inbox.messages])


@pytest.mark.parametrize("target", [OURS], indirect=True, scope="session")
async def test_java_unpacks_what_we_pack(
    ready: Ready, target: Target, place: str, group: str
) -> None:
    large = "viel 🚀 ".encode() * 2_000
    with Peer(ready(JAVA), target.namesrv, place, group) as reader:
        for compression in ("zlib", "lz4", "zstd"):
            async with Producer(
                target.namesrv, group=f"p_{group}", compression=compression
            ) as producer:
                await producer.send(Message(place, large, tags=compression))
        lines = await asyncio.to_thread(reader.receive, 3)
    assert sorted(line["tags"] for line in lines) == ["lz4", "zlib", "zstd"]
    assert {body(line) for line in lines} == {large}


@pytest.mark.parametrize("target", [OURS], indirect=True, scope="session")
def test_order_with_java_in_the_group(
    ready: Ready, target: Target, wide: str, group: str, record_property: Record
) -> None:
    """A queue is locked by one member at a time, so its messages are in order across both."""
    arrivals: list[tuple[str, int, int]] = []  # member, queue, offset

    def ours_got(message: ReceivedMessage) -> None:
        arrivals.append(("ours", message.queue_id, message.queue_offset))

    ours = blocking.Consumer(
        target.namesrv, group=group, consume_from="first", orderly=True, rebalance_every_ms=1_000
    )

    def lines(peer: Peer) -> list[tuple[str, int, int]]:
        peer.listen(0.01)
        return [("java", line["queue_id"], line["queue_offset"]) for line in peer.messages]

    with Stream(target.namesrv, wide, f"p_{group}") as stream, ours:
        ours.subscribe(wide, handler=ours_got)
        wait_s(lambda: len(arrivals) >= 50)
        with Peer(ready(JAVA_HURRIED), target.namesrv, wide, group, mode="orderly") as java:
            wait_s(lambda: len({queue for _, queue, _ in lines(java)}) == QUEUES // 2)
            count = len(arrivals)
            wait_s(lambda: len({queue for _, queue, _ in arrivals[count:]}) == QUEUES // 2)
        count = len(arrivals)
        wait_s(lambda: len({queue for _, queue, _ in arrivals[count:]}) == QUEUES)
        stream.close()
        total = len(stream.sent)
        wait_s(lambda: len({place[1:] for place in arrivals + lines(java)}) == total)
    of_java = lines(java)
    for member in (arrivals, of_java):
        for number in range(QUEUES):
            offsets = [offset for _, queue, offset in member if queue == number]
            # Progress that was not committed when a queue moved is made again, in order.
            firsts = [n for i, n in enumerate(offsets) if n not in offsets[:i]]
            assert firsts == sorted(firsts), f"queue {number}"
    assert len(of_java) > 0
    record_property("came again", len(arrivals) + len(of_java) - total)


def wait_s(done: Callable[[], object], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)
