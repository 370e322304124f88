"""The sink against a real node whose answers are late, lost or refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.unit.spark.live_kit import another_broker
from tests.unit.spark.sink_kit import bodies, marks, numbered, read, write

from cosmodrome.blocking import Node, embedded
from cosmodrome.client.send.failures import SendFailed, SendTimedOut
from cosmodrome.errors import Code, Refused, TimedOut, Unreachable
from cosmodrome.spark.write import repeats, sending
from cosmodrome.spark.write.repeats import MARK
from cosmodrome.spark.write.sending import Outbox
from cosmodrome.spark.write.writer import Sent

BODY = "body binary"


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with embedded() as node:
        yield node


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory of other tests' streams, and short pauses."""
    monkeypatch.setattr(repeats, "_first_seen", {})
    monkeypatch.setattr(sending, "BACKOFF_FIRST_S", 0.005)


class Broken:
    """Makes requests fail as `plan` says: an error raised instead of, or after, the request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.instead: dict[int, Exception] = {}
        self.after: dict[int, Exception] = {}
        self.always: dict[str, Exception] = {}  # by broker
        self.requests: list[tuple[str, int]] = []
        real = Outbox._request

        async def request(
            outbox: Outbox, address: str, queue: Any, members: Any, tries: int
        ) -> None:
            number = len(self.requests)
            self.requests.append((queue.broker_name, queue.queue_id))
            for error in (self.instead.get(number), self.always.get(queue.broker_name)):
                if error is not None:
                    raise error
            await real(outbox, address, queue, members, tries)
            if number in self.after:
                raise self.after[number]

        monkeypatch.setattr(Outbox, "_request", request)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Broken:
    return Broken(monkeypatch)


@pytest.mark.parametrize(
    "error",
    [
        TimedOut("late"),
        Unreachable("cut"),
        Refused(Code.SYSTEM_BUSY, "busy"),
        Refused(Code.SERVICE_NOT_AVAILABLE, "no disk"),
    ],
    ids=repr,
)
def test_a_failed_batch_is_sent_again_in_order(
    node: Node, cosmo_topic: str, broken: Broken, error: Exception
) -> None:
    broken.instead = {1: error, 2: error}
    rows = numbered(40, "key")
    sent = write(
        node.namesrv, "body binary, queue_key string", rows, topic=cosmo_topic, batchRows=10
    )
    assert sent == Sent(0, 40, 10)
    (found,) = [queue for queue in read(node.namesrv, cosmo_topic).values() if queue]
    assert [m.body for m in found] == [row[0] for row in rows]
    # Only the batch that was sent again may be there twice.
    assert [MARK in m.properties for m in found] == [10 <= n < 20 for n in range(40)]


def test_an_answer_that_is_lost_doubles_and_marks(
    node: Node, cosmo_topic: str, broken: Broken
) -> None:
    broken.after = {0: TimedOut("no answer")}
    write(node.namesrv, BODY, numbered(10), topic=cosmo_topic)
    found = marks(node, cosmo_topic)
    assert found.count(None) == 10
    assert len(found) == 20


def test_when_it_gives_up_every_attempt_is_named(
    node: Node, cosmo_topic: str, broken: Broken
) -> None:
    broken.instead = {n: Refused(Code.SYSTEM_BUSY, f"busy {n}") for n in range(2)}
    broken.instead[2] = TimedOut("too late")
    with pytest.raises(SendTimedOut) as failed:
        write(node.namesrv, BODY, numbered(3), topic=cosmo_topic, retries=2)
    message = str(failed.value)
    assert all(part in message for part in (cosmo_topic, "busy 0", "busy 1", "too late", "3 rows"))
    assert len(broken.requests) == 3


def test_a_refusal_that_stays_ends_at_once(node: Node, cosmo_topic: str, broken: Broken) -> None:
    broken.instead = {0: Refused(Code.MESSAGE_ILLEGAL, "wrong")}
    with pytest.raises(SendFailed, match="wrong"):
        write(node.namesrv, BODY, numbered(3), topic=cosmo_topic)
    assert len(broken.requests) == 1


def test_access_control_is_not_asked_again(node: Node, cosmo_topic: str, broken: Broken) -> None:
    broken.instead = {0: Refused(Code.SYSTEM_ERROR, "AclException: No accessKey is configured")}
    with pytest.raises(SendFailed, match="set the options accessKey and secretKey"):
        write(node.namesrv, BODY, numbered(3), topic=cosmo_topic)
    assert len(broken.requests) == 1


def test_a_failure_ends_the_task_before_more_rows_are_read(
    node: Node, cosmo_topic: str, broken: Broken
) -> None:
    broken.instead = {3: Refused(Code.MESSAGE_ILLEGAL, "wrong")}
    taken = 0

    def rows() -> Iterator[pa.RecordBatch]:
        nonlocal taken
        for number in range(1_000):
            taken += 1
            yield pa.record_batch([pa.array([b"%d" % number], pa.binary())], names=["body"])

    with pytest.raises(SendFailed, match="wrong"):
        write(node.namesrv, BODY, rows(), topic=cosmo_topic, batchRows=5)
    assert taken < 100


def test_a_source_that_fails_leaves_nothing_on_its_way(node: Node, cosmo_topic: str) -> None:
    def rows() -> Iterator[pa.RecordBatch]:
        for number in range(50):
            yield pa.record_batch([pa.array([b"%d" % number], pa.binary())], names=["body"])
        raise RuntimeError("upstream")

    with pytest.raises(RuntimeError, match="upstream"):
        write(node.namesrv, BODY, rows(), topic=cosmo_topic, batchRows=5)
    assert len(bodies(node.namesrv, cosmo_topic)) == 50


def test_rows_without_key_turn_to_another_broker(
    cosmo_topic: str, tmp_path: Path, broken: Broken
) -> None:
    with embedded(broker_name="broker-a") as node, another_broker(node, "broker-b", tmp_path):
        rows = [[b"%03d" % number, None] for number in range(160)]
        schema = "body binary, queue_key string"
        write(node.namesrv, schema, rows[:80], topic=cosmo_topic, batchRows=10)
        assert {broker for broker, _ in broken.requests} == {"broker-a", "broker-b"}
        broken.requests.clear()
        broken.always = {"broker-b": Unreachable("down")}
        assert write(node.namesrv, schema, rows, topic=cosmo_topic, batchRows=10).rows == 160
        assert set(bodies(node.namesrv, cosmo_topic)) == {row[0] for row in rows}
        refused = [broker for broker, _ in broken.requests].count("broker-b")
        assert 1 <= refused < 30  # once it is known to be down, it is left alone
        # A key's rows stay where they are looked for.
        keyed = [[b"x", key] for key in "abcdefgh"]
        with pytest.raises(SendFailed, match=r"broker-b.*down"):
            write(node.namesrv, schema, keyed, topic=cosmo_topic, retries=2)


def test_a_broker_that_restarts_is_waited_for(cosmo_topic: str, tmp_path: Path) -> None:
    with embedded(data=str(tmp_path)) as node:
        write(node.namesrv, BODY, [[b"first"]], topic=cosmo_topic)

        def rows() -> Iterator[pa.RecordBatch]:
            for number in range(40):
                if number == 20:
                    node.restart()
                yield pa.record_batch([pa.array([b"%03d" % number], pa.binary())], names=["body"])

        sent = write(node.namesrv, BODY, rows(), topic=cosmo_topic, batchRows=5, retries=20)
        assert sent.rows == 40
        assert set(bodies(node.namesrv, cosmo_topic)) >= {b"%03d" % n for n in range(40)}
