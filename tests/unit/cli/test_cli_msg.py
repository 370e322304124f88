"""`cosmo msg …` against a node in this process, with real consumers and traces."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from tests.unit.cli.operating_kit import cosmo, in_all_forms, rows, table

from cosmodrome import blocking
from cosmodrome.client.values import Message, SendResult

_numbers = count(1)


@pytest.fixture(scope="module")
def node() -> Iterator[blocking.Node]:
    with blocking.embedded(trace_topic_enable=True) as node:
        yield node


@pytest.fixture(scope="module")
def namesrv(node: blocking.Node) -> str:
    return node.namesrv


@pytest.fixture
def topic(namesrv: str) -> str:
    name = f"Topic{next(_numbers)}"
    assert cosmo(namesrv, "topic", "create", name, "-q", "2").code == 0
    return name


def send(namesrv: str, topic: str, body: bytes = b"hello", **fields: Any) -> SendResult:
    with blocking.Producer(namesrv, group="senders") as producer:
        return producer.send(Message(topic, body, **fields))


@pytest.fixture
def sent(namesrv: str, topic: str) -> SendResult:
    return send(namesrv, topic, tags="A", keys=["k1", f"key-{topic}"], properties={"colour": "red"})


@contextlib.contextmanager
def member(
    namesrv: str, group: str, topic: str, handler: Callable[[Any], None], **settings: Any
) -> Iterator[None]:
    tags = settings.pop("tags", "*")
    with blocking.Consumer(namesrv, group=group, consume_from="first", **settings) as consumer:
        consumer.subscribe(topic, tags=tags, handler=handler)
        worker = threading.Thread(target=consumer.run)
        worker.start()
        try:
            yield
        finally:
            consumer.stop()
            worker.join(60)


def until(look: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 90
    while not (found := look()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)
    return found


# --- forms -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("get", "{offset_id}"),
        ("get", "{unique}", "-t", "{topic}"),
        ("find", "{topic}", "--key", "k1"),
        ("find", "{topic}", "--unique", "{unique}"),
        ("find", "{topic}", "--since", "-1h"),
        ("print", "{topic}"),
        ("resend", "{unique}", "-t", "{topic}", "--dry-run"),
    ],
    ids=" ".join,
)
def test_every_form_says_the_same(
    words: tuple[str, ...], namesrv: str, topic: str, sent: SendResult
) -> None:
    ids = {"offset_id": sent.offset_msg_id, "unique": sent.msg_id, "topic": topic}
    (row,) = in_all_forms(namesrv, "msg", *(word.format(**ids) for word in words))
    assert row["msg_id"] == sent.msg_id


# --- looking ---------------------------------------------------------------------------------


def test_get_shows_everything(namesrv: str, topic: str, sent: SendResult) -> None:
    row = rows(namesrv, "msg", "get", sent.offset_msg_id)
    assert (row["topic"], row["tags"], row["body"]) == (topic, "A", "hello")
    assert row["keys"] == ["k1", f"key-{topic}"] and row["properties"]["colour"] == "red"
    assert (row["queue_id"], row["queue_offset"]) == (sent.queue.queue_id, sent.queue_offset)
    assert row["born_timestamp"] > 1_700_000_000_000 and "T" in row["born_timestamp_iso"]
    cells = dict(line[:2] for line in table(namesrv, "msg", "get", sent.offset_msg_id))
    assert cells["body"] == "hello" and cells["KEY"] == "VALUE"


def test_a_body_that_is_no_text(namesrv: str, topic: str) -> None:
    sent = send(namesrv, topic, b"\xff\x00\x1b[2J")
    row = rows(namesrv, "msg", "get", sent.offset_msg_id)
    assert row["body"] is None and row["body_base64"] == "/wAbWzJK"
    assert "\x1b" not in cosmo(namesrv, "msg", "print", topic).out


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("get", "nonsense"), 4, "--topic TOPIC"),
        (("get", "00" * 16), 4, "no broker at the address in that id"),
        (("get", "A" * 32, "-t", "{topic}"), 4, "no message"),
        (("get", "A" * 32, "-t", "Nowhere"), 4, "no broker has topic Nowhere"),
        (("find", "{topic}", "--key", "nobody"), 4, "no such message"),
        (("find", "{topic}", "--key", "a", "--unique", "b"), 2, "give --key"),
        (("find", "{topic}"), 2, "give --key"),
        (("find", "{topic}", "--since", "5"), 1, "is no time"),
        (("find", "Nowhere", "--since", "-1h"), 4, "Nowhere"),
        (("print", "{topic}", "-q", "9"), 4, "no such queue"),
        (("print", "{topic}", "--from", "soon"), 1, "write earliest"),
        (("resend", "A" * 32, "-t", "{topic}", "--to", "{topic}", "-g", "g"), 2, "not both"),
        (("trace", "nobody"), 4, "no trace"),
        (("trace", "nobody", "--trace-topic", "Nowhere"), 4, "traceTopicEnable"),
    ],
)
def test_what_is_not_there(
    words: tuple[str, ...], code: int, says: str, namesrv: str, topic: str
) -> None:
    done = cosmo(namesrv, "msg", *(word.format(topic=topic) for word in words))
    assert done.code == code and says in done.err and not done.out, done


def test_an_offset_beyond_the_log_is_not_found(namesrv: str, sent: SendResult) -> None:
    beyond = sent.offset_msg_id[:16] + f"{2**40:016X}"
    done = cosmo(namesrv, "msg", "get", beyond)
    assert done.code == 4, done


def test_print_chooses_by_queue_offset_and_time(namesrv: str, topic: str) -> None:
    with blocking.Producer(namesrv, group="senders") as producer:
        sent = [producer.send(Message(topic, b"%d" % number)) for number in range(10)]
    mine = [one.queue_offset for one in sent if one.queue.queue_id == 1]
    assert len(rows(namesrv, "msg", "print", topic)) == 10
    found = rows(namesrv, "msg", "print", topic, "-q", "1")
    assert [row["queue_offset"] for row in found] == mine
    found = rows(namesrv, "msg", "print", topic, "-q", "1", "--from", "1", "--to", "3")
    assert [row["queue_offset"] for row in found] == [1, 2]
    done = cosmo(namesrv, "msg", "print", topic, "--count", "3")
    assert len(done.out.splitlines()) == 4 and "3 of 10 shown" in done.err
    assert rows(namesrv, "msg", "print", topic, "--from", "-1h", "--to", "-30m") == []
    assert len(rows(namesrv, "msg", "print", topic, "--from", "-1h")) == 10


# --- sending again ---------------------------------------------------------------------------


def test_resend_makes_a_copy(namesrv: str, topic: str, sent: SendResult) -> None:
    refused = cosmo(namesrv, "msg", "resend", sent.offset_msg_id)
    assert refused.code == 2 and "--yes" in refused.err
    (row,) = rows(namesrv, "msg", "resend", sent.offset_msg_id, "--yes")
    assert row["outcome"] == "sent" and row["new_msg_id"] != sent.msg_id
    other = f"{topic}b"
    cosmo(namesrv, "topic", "create", other)
    (row,) = rows(namesrv, "msg", "resend", sent.offset_msg_id, "--to", other, "--yes")
    (copy,) = rows(namesrv, "msg", "print", other)
    assert (copy["body"], copy["tags"], copy["msg_id"]) == ("hello", "A", row["new_msg_id"])
    assert len(rows(namesrv, "msg", "print", topic)) == 2
    gone = cosmo(namesrv, "msg", "resend", sent.offset_msg_id, "--to", "Nowhere", "--yes")
    assert gone.code == 4


def test_resend_hands_it_to_a_member(namesrv: str, topic: str, sent: SendResult) -> None:
    group = f"group-{topic}"
    seen: list[str] = []
    alone = cosmo(namesrv, "msg", "resend", sent.offset_msg_id, "-g", group, "--yes")
    assert alone.code == 4, alone
    with member(namesrv, group, topic, lambda message: seen.append(message.msg_id)):
        until(lambda: seen)
        words = ("msg", "resend", sent.offset_msg_id, "-g", group)
        (planned,) = rows(namesrv, *words, "--dry-run")
        assert planned["outcome"] == "would be handed over" and group in planned["to"]
        (row,) = rows(namesrv, *words, "--yes")
    assert row["outcome"] == "CR_SUCCESS" and seen == [sent.msg_id] * 2


# --- what became of it -----------------------------------------------------------------------


def test_track_says_who_has_it(namesrv: str, topic: str) -> None:
    seen: list[str] = []
    with member(namesrv, f"reads-{topic}", topic, lambda message: seen.append(message.msg_id)):
        sent = send(namesrv, topic, tags="A")
        until(lambda: seen)
        with member(namesrv, f"filters-{topic}", topic, lambda _: None, tags="B"):
            words = ("msg", "track", sent.msg_id, "-t", topic)
            until(
                lambda: {row["state"] for row in rows(namesrv, *words)} == {"consumed", "filtered"}
            )
            in_all_forms(namesrv, *words)
            states = {row["group"]: row for row in rows(namesrv, *words)}
    assert states[f"reads-{topic}"]["state"] == "consumed" and states[f"reads-{topic}"]["online"]
    assert states[f"filters-{topic}"]["state"] == "filtered"
    later = send(namesrv, topic)
    done = cosmo(
        namesrv, "group", "reset", f"reads-{topic}", "-t", topic, "--to", "earliest", "--yes"
    )
    assert done.code == 0, done
    found = {row["group"]: row for row in rows(namesrv, "msg", "track", later.offset_msg_id)}
    waits = found[f"reads-{topic}"]
    assert (waits["state"], waits["online"], waits["offset"]) == ("waiting", False, 0)


def test_track_finds_dead_letters(namesrv: str, topic: str) -> None:
    def fail(_: Any) -> None:
        raise ValueError("no")

    group = f"fails-{topic}"
    sent = send(namesrv, topic)
    with member(namesrv, group, topic, fail, max_reconsume_times=0):
        (row,) = until(
            lambda: [
                row
                for row in rows(namesrv, "msg", "track", sent.msg_id, "-t", topic)
                if row["state"] == "dead letter"
            ]
        )
    assert "attempts" in row["why"] and f"%DLQ%{group}" in row["why"]


def test_the_life_of_a_message(namesrv: str, topic: str) -> None:
    failures = [ValueError("once")]

    def handle(_: Any) -> None:
        if failures:
            raise failures.pop()

    with (
        blocking.Producer(namesrv, group="traced", trace=True) as producer,
        member(namesrv, f"traces-{topic}", topic, handle, trace=True),
    ):
        sent = producer.send(Message(topic, b"x", keys=[f"key-{topic}"]))

        def life() -> list[dict[str, Any]]:
            done = cosmo(namesrv, "msg", "trace", sent.msg_id, "-o", "json")
            found = json.loads(done.out) if done.code == 0 else []
            # Producer and consumer tell of it in batches of their own, in any order.
            events = {row["event"] for row in found}
            return found if events >= {"sent", "consume", "consumed"} else []

        found = until(life)
        in_all_forms(namesrv, "msg", "trace", f"key-{topic}")
    first, begun, ended = found[:3]
    assert (first["event"], first["status"], first["group"]) == ("sent", "stored", "traced")
    assert (begun["event"], begun["detail"]) == ("consume", "attempt 1")
    assert (ended["event"], ended["status"]) == ("consumed", "exception")
    assert ended["group"] == begun["group"] == f"traces-{topic}"
    assert first["time_ms"] <= begun["time_ms"] <= ended["time_ms"]
    assert {row["msg_id"] for row in found} == {sent.msg_id}
