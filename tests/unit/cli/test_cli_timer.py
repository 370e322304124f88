"""`cosmo timer …` against a node in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count

import pytest
from tests.unit.cli.operating_kit import cosmo, in_all_forms, rows, table

from cosmodrome import blocking
from cosmodrome.client.values import Message

_numbers = count(1)


@pytest.fixture(scope="module")
def namesrv() -> Iterator[str]:
    with blocking.embedded() as node:
        yield node.namesrv


@pytest.fixture
def topic(namesrv: str) -> Iterator[str]:
    """Three messages that wait, due one after the other; cancelled in the end."""
    name = f"Timed{next(_numbers)}"
    assert cosmo(namesrv, "topic", "create", name, "-q", "1").code == 0
    due_ms = int(time.time() * 1000) + 600_000
    with blocking.Producer(namesrv, group="senders") as producer:
        for number in range(3):
            producer.send(Message(name, b"later", deliver_at_ms=due_ms + number))
    yield name
    for row in rows(namesrv, "timer", "list", "-t", name):
        assert cosmo(namesrv, "timer", "cancel", row["handle"]).code == 0


def test_every_form_says_the_same(namesrv: str, topic: str) -> None:
    found = in_all_forms(namesrv, "timer", "list", "-t", topic)
    assert [row["topic"] for row in found] == [topic] * 3
    assert found[0]["deliver_ms"] < found[1]["deliver_ms"] < found[2]["deliver_ms"]
    assert {row["broker"] for row in found} == {"embedded"} and found[0]["queue"] == 0


def test_the_table_and_what_it_leaves_out() -> None:
    with blocking.embedded() as node:
        with blocking.Producer(node.namesrv, group="senders") as producer:
            for number in range(3):
                producer.send(Message("Timed", b"later", delay_ms=600_000 + number))
        lines = table(node.namesrv, "timer", "list", "--limit", "2")
        assert lines[0] == ["DELIVER AT", "TOPIC", "QUEUE", "SIZE", "MESSAGE ID", "HANDLE"]
        assert len(lines) == 3
        assert "2 shown, 3 wait" in cosmo(node.namesrv, "timer", "list", "--limit", "2").err
        assert len(table(node.namesrv, "timer", "list", "-b", "embedded")) == 4
        assert table(node.namesrv, "timer", "list", "-t", "Another")[1:] == []


@pytest.mark.parametrize("form", ["table", "wide", "json", "jsonl", "csv", "yaml"])
def test_cancel(namesrv: str, topic: str, form: str) -> None:
    first, second, third = rows(namesrv, "timer", "list", "-t", topic)
    done = cosmo(namesrv, "timer", "cancel", second["handle"], "-o", form)
    assert done.code == 0 and f"{second['msg_id']} will not be delivered" in done.err
    assert second["msg_id"] in done.out and "cancelled" in done.out
    left = [row["msg_id"] for row in rows(namesrv, "timer", "list", "-t", topic)]
    assert left == [first["msg_id"], third["msg_id"]]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("list", "-b", "nobody"), 4),
        (("list", "-n", "127.0.0.1:1"), 3),
        (("list", "--limit", "0"), 2),
        (("cancel",), 2),
        (("cancel", "nonsense"), 5),
    ],
)
def test_wrong_words(namesrv: str, words: tuple[str, ...], code: int) -> None:
    done = cosmo(namesrv, "timer", *words)
    assert done.code == code and not done.out, done
