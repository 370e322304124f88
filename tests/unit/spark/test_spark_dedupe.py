"""Which copy of a row is kept: ranks, lookups, and whole writes that were repeated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.spark.live_kit import another_broker, connection
from tests.unit.spark.sink_kit import Context, arrow, in_stream, read, schema_of, write

from cosmodrome import ReceivedMessage
from cosmodrome.blocking import Admin, Node, embedded
from cosmodrome.errors import CosmodromeError, TimedOut
from cosmodrome.spark import links
from cosmodrome.spark.cluster import Cluster, StoredCopy
from cosmodrome.spark.write import dedupe, repeats, sending
from cosmodrome.spark.write.dedupe import MARK, Dedupe, Marked
from cosmodrome.spark.write.sending import Outbox
from cosmodrome.spark.write.writer import make_writer
from cosmodrome.wire.bodies import MessageQueue
from cosmodrome.wire.message import UNIQ_KEY

BODY = "body binary"
ROWS = [[b"%04d" % number] for number in range(100)]


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with embedded() as node:
        yield node


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(repeats, "_first_seen", {})
    monkeypatch.setattr(sending, "BACKOFF_FIRST_S", 0.005)
    yield
    links.close_all()


# --- ranks -------------------------------------------------------------------------------------


class Shelf:
    """Copies by key, and what was asked."""

    def __init__(self, *copies: tuple[str, str, str, int, int]) -> None:
        """Each: key, mark ("" for none), broker, queue id, offset."""
        self.copies = copies
        self.asked: list[list[str]] = []

    def find_by_unique_keys(
        self, topic: str, keys: Sequence[str]
    ) -> Mapping[str, list[StoredCopy]]:
        assert topic == "t"
        self.asked.append(list(keys))
        return {
            key: [
                StoredCopy(broker, queue, offset, {UNIQ_KEY: name} | ({MARK: mark} if mark else {}))
                for name, mark, broker, queue, offset in self.copies
                if name == key or name == "stranger"  # the index finds by hash
            ]
            for key in keys
        }


def test_a_message_alone_is_kept() -> None:
    shelf = Shelf(("k", "2", "a", 0, 7), ("stranger", "", "a", 0, 1))
    assert Dedupe(shelf, "t", "a", 0).rows_to_drop([Marked(5, 7, "k", "2")]) == set()


@pytest.mark.parametrize(
    "other",
    [("k", "", "z", 9, 99), ("k", "1", "z", 9, 99), ("k", "2", "a", 0, 6), ("k", "2", "a", -1, 9)],
)
def test_a_copy_of_lower_rank_dooms(other: tuple[str, str, str, int, int]) -> None:
    shelf = Shelf(("k", "2", "a", 0, 7), other)
    assert Dedupe(shelf, "t", "a", 0).rows_to_drop([Marked(5, 7, "k", "2")]) == {5}


@pytest.mark.parametrize("other", [("k", "3", "a", 0, 1), ("k", "2", "a", 0, 8)])
def test_a_copy_of_higher_rank_does_not(other: tuple[str, str, str, int, int]) -> None:
    shelf = Shelf(("k", "2", "a", 0, 7), other)
    assert Dedupe(shelf, "t", "a", 0).rows_to_drop([Marked(5, 7, "k", "2")]) == set()


def test_copies_read_before_are_not_asked_for() -> None:
    shelf = Shelf(("k", "1", "a", 0, 3), ("k", "2", "a", 0, 7), ("k", "3", "a", 0, 8))
    sieve = Dedupe(shelf, "t", "a", 0)
    assert sieve.rows_to_drop([Marked(0, 3, "k", "1"), Marked(1, 7, "k", "2")]) == {1}
    assert sieve.rows_to_drop([Marked(0, 8, "k", "3")]) == {0}
    assert shelf.asked == [["k"]]


def test_the_lower_rank_may_come_later() -> None:
    shelf = Shelf(("k", "2", "a", 0, 3), ("k", "1", "a", 0, 7))
    sieve = Dedupe(shelf, "t", "a", 0)
    assert sieve.rows_to_drop([Marked(0, 3, "k", "2"), Marked(1, 7, "k", "1")]) == {0}


def test_lookups_and_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedupe, "KEYS_MAX", 10)
    shelf = Shelf()
    sieve = Dedupe(shelf, "t", "a", 0)
    sieve.rows_to_drop([Marked(n, n, f"k{n}", "1") for n in range(600)])
    assert [len(part) for part in shelf.asked] == [256, 256, 88]
    assert len(sieve._lowest) <= 10


def test_nothing_marked_asks_nothing() -> None:
    shelf = Shelf()
    assert Dedupe(shelf, "t", "a", 0).rows_to_drop([]) == set()
    assert shelf.asked == []


_copy = st.tuples(st.sampled_from("kl"), st.sampled_from(["", "1", "2"]), st.sampled_from("ab"))


@given(st.lists(_copy, max_size=12), st.integers(1, 5))
def test_one_copy_survives_whatever_the_ranges(copies: list[Any], size: int) -> None:
    """Unless several are unmarked: those are different messages, or were not to be excluded."""
    shelf = Shelf(*[(key, mark, broker, 0, n) for n, (key, mark, broker) in enumerate(copies)])
    kept: list[str] = []
    for broker in "ab":
        mine = [(n, *copy) for n, copy in enumerate(copies) if copy[2] == broker]
        for begin in range(0, len(mine), size):
            part = mine[begin : begin + size]  # each a range of its own
            rows = [Marked(n, n, key, mark) for n, key, mark, _ in part if mark]
            gone = Dedupe(shelf, "t", broker, 0).rows_to_drop(rows)
            kept += [key for n, key, _, _ in part if n not in gone]
    for key in "kl":
        unmarked = sum(1 for name, mark, _ in copies if name == key and not mark)
        there = any(name == key for name, _, _ in copies)
        assert kept.count(key) == max(unmarked, int(there))


# --- whole writes --------------------------------------------------------------------------------


def deduped(namesrv: str, topic: str) -> list[bytes]:
    """The bodies that a reader with dedupe keeps."""
    kept: list[ReceivedMessage] = []
    with Cluster(connection(namesrv)) as cluster:
        for queue, messages in read(namesrv, topic).items():
            kept += kept_of(cluster, topic, queue, messages)
    return sorted(message.body for message in kept)


def kept_of(
    cluster: Cluster, topic: str, queue: MessageQueue, messages: list[ReceivedMessage]
) -> list[ReceivedMessage]:
    sieve = Dedupe(cluster, topic, queue.broker_name, queue.queue_id)
    gone = sieve.rows_to_drop(
        Marked(row, message.queue_offset, message.msg_id, message.properties[MARK])
        for row, message in enumerate(messages)
        if MARK in message.properties
    )
    return [message for row, message in enumerate(messages) if row not in gone]


def total(namesrv: str, topic: str) -> int:
    return sum(map(len, read(namesrv, topic).values()))


def failing_after(count: int) -> Iterator[Any]:
    yield from arrow(BODY, ROWS[:count], size=10)
    raise RuntimeError("the task fails midway")


def test_a_task_that_failed_midway_twice(node: Node, cosmo_topic: str) -> None:
    writer = make_writer(
        {"namesrv": node.namesrv, "topic": cosmo_topic, "batchRows": "7"}, schema_of(BODY), False
    )
    for attempt, count in enumerate((60, 90)):
        with pytest.raises(RuntimeError, match="midway"):
            writer._task.send(failing_after(count), Context(attempt=attempt, task=attempt))
    writer._task.send(arrow(BODY, ROWS), Context(attempt=2, task=2))
    assert total(node.namesrv, cosmo_topic) > 200
    assert deduped(node.namesrv, cosmo_topic) == [row[0] for row in ROWS]


def test_a_stream_killed_between_send_and_commit(node: Node, cosmo_topic: str) -> None:
    """Batch 1 is sent whole by the first run and again by the second."""
    for batch, run in ((0, "r1"), (1, "r1"), (1, "r2"), (2, "r2")):
        rows = [[b"%d-%s" % (batch, row[0])] for row in ROWS]
        context = in_stream(batch, run=run, task=batch)
        write(node.namesrv, BODY, rows, context, stream=True, topic=cosmo_topic)
    assert total(node.namesrv, cosmo_topic) == 400
    expected = sorted(b"%d-%s" % (batch, row[0]) for batch in range(3) for row in ROWS)
    assert deduped(node.namesrv, cosmo_topic) == expected


def test_a_named_batch_write_that_is_run_again(node: Node, cosmo_topic: str) -> None:
    for _ in range(3):
        write(node.namesrv, BODY, ROWS, topic=cosmo_topic, idempotenceId="nightly")
    write(node.namesrv, BODY, [[b"other"]], topic=cosmo_topic, idempotenceId="weekly")
    assert total(node.namesrv, cosmo_topic) == 301
    assert deduped(node.namesrv, cosmo_topic) == [*(row[0] for row in ROWS), b"other"]


def test_a_stage_that_is_repeated(node: Node, cosmo_topic: str) -> None:
    writer = make_writer({"namesrv": node.namesrv, "topic": cosmo_topic}, schema_of(BODY), False)
    for task in (1, 2):
        writer._task.send(arrow(BODY, ROWS), Context(task=task))
    assert total(node.namesrv, cosmo_topic) == 200
    assert deduped(node.namesrv, cosmo_topic) == [row[0] for row in ROWS]


def test_answers_that_are_lost(
    node: Node, cosmo_topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = Outbox._request, 0

    async def request(outbox: Outbox, *args: Any) -> None:
        nonlocal count
        await real(outbox, *args)
        count += 1
        if count % 3 == 0:
            raise TimedOut("the answer is lost")

    monkeypatch.setattr(Outbox, "_request", request)
    write(node.namesrv, BODY, ROWS, topic=cosmo_topic, batchRows=10)
    assert total(node.namesrv, cosmo_topic) > 100
    assert deduped(node.namesrv, cosmo_topic) == [row[0] for row in ROWS]


def test_copies_on_different_brokers(cosmo_topic: str, tmp_path: Path) -> None:
    """The second attempt sees more queues: the same rows lie elsewhere."""
    with embedded(broker_name="broker-a") as node:
        write(node.namesrv, BODY, ROWS, topic=cosmo_topic, idempotenceId="x", batchRows=5)
        with another_broker(node, "broker-b", tmp_path), Admin(node.namesrv) as admin:
            admin.topics.create(cosmo_topic, queues=4)
            write(node.namesrv, BODY, ROWS, topic=cosmo_topic, idempotenceId="x", batchRows=5)
            found = read(node.namesrv, cosmo_topic)
            there = {queue.broker_name for queue, messages in found.items() if messages}
            assert there == {"broker-a", "broker-b"}
            assert sum(map(len, found.values())) == 200
            assert deduped(node.namesrv, cosmo_topic) == [row[0] for row in ROWS]


def test_a_broker_that_cannot_be_asked_fails_the_read(
    node: Node, cosmo_topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        write(node.namesrv, BODY, ROWS[:3], topic=cosmo_topic, idempotenceId="x")

    def dead(*args: object) -> None:
        raise CosmodromeError("nobody answers")

    monkeypatch.setattr(Cluster, "_ask_broker", lambda *args, **more: dead())
    with pytest.raises(CosmodromeError, match="nobody answers"):
        deduped(node.namesrv, cosmo_topic)
