"""`cosmo tx …` against a node in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from tests.unit.cli.operating_kit import cosmo, in_all_forms, rows, table

from cosmodrome import blocking
from cosmodrome.client.send.transactions import TransactionState
from cosmodrome.client.values import Message

_numbers = count(1)


@pytest.fixture(scope="module")
def node() -> Iterator[blocking.Node]:
    with blocking.embedded(
        transaction_check_interval=300, transaction_time_out=200, transaction_check_max=2
    ) as node:
        yield node


@pytest.fixture(scope="module")
def quiet() -> Iterator[blocking.Node]:
    """Where nobody is asked."""
    with blocking.embedded() as node:
        yield node


@pytest.fixture
def topic(quiet: blocking.Node) -> str:
    name = f"Topic{next(_numbers)}"
    assert cosmo(quiet.namesrv, "topic", "create", name, "-q", "1").code == 0
    return name


def prepared(
    node: blocking.Node, topic: str, state: TransactionState, number: int = 1
) -> list[Any]:
    def say(*_: Any) -> TransactionState:
        return state

    with blocking.TransactionProducer(node.namesrv, group=f"tx-{topic}", check=say) as producer:
        return [
            producer.send_in_transaction(Message(topic, b"half", keys=["k"]), say)
            for _ in range(number)
        ]


def until(look: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 90
    while not (found := look()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)
    return found


def test_halves_that_wait_and_no_others(quiet: blocking.Node, topic: str) -> None:
    prepared(quiet, topic, TransactionState.COMMIT, 2)
    prepared(quiet, topic, TransactionState.UNKNOWN, 2)
    prepared(quiet, topic, TransactionState.ROLLBACK, 2)
    found = until(
        lambda: (
            ((shown := in_all_forms(quiet.namesrv, "tx", "list", "-t", topic)) and len(shown) == 2)
            and shown
        )
    )
    assert [row["state"] for row in found] == ["waiting"] * 2
    row = found[0]
    assert (row["topic"], row["group"], row["checks"]) == (topic, f"tx-{topic}", 0)
    assert row["keys"] == ["k"] and 0 <= row["age_s"] < 60
    lines = table(quiet.namesrv, "tx", "list", "-t", topic)
    assert lines[0] == ["STATE", "TOPIC", "GROUP", "AGE S", "CHECKS", "MSG ID", "OFFSET MSG ID"]
    assert table(quiet.namesrv, "tx", "list", "-t", "Another")[1:] == []
    done = cosmo(quiet.namesrv, "tx", "list", "--limit", "1")
    assert len(done.out.splitlines()) == 2 and "more" in done.err


def test_one_that_was_given_up_is_asked_about_again(node: blocking.Node) -> None:
    name = "GivenUp"
    assert cosmo(node.namesrv, "topic", "create", name, "-q", "1").code == 0
    prepared(node, name, TransactionState.UNKNOWN)

    (row,) = until(lambda: rows(node.namesrv, "tx", "list", "--given-up"))
    assert (row["state"], row["topic"], row["checks"]) == ("given up", name, 2)
    until(lambda: rows(node.namesrv, "tx", "list") == [])
    refused = cosmo(node.namesrv, "tx", "resume", row["offset_msg_id"])
    assert refused.code == 2 and "--yes" in refused.err
    done = in_all_forms(node.namesrv, "tx", "resume", row["offset_msg_id"], "--yes")
    assert done[0]["state"] == "resumed" and done[0]["topic"] == name


def test_only_halves_are_resumed(quiet: blocking.Node, topic: str) -> None:
    with blocking.Producer(quiet.namesrv, group="senders") as producer:
        sent = producer.send(Message(topic, b"x"))
    done = cosmo(quiet.namesrv, "tx", "resume", sent.offset_msg_id, "--yes")
    assert done.code == 1 and "no half message" in done.err
    assert cosmo(quiet.namesrv, "tx", "resume", "nonsense", "--yes").code == 4
    assert cosmo(quiet.namesrv, "tx", "list", "-b", "nobody").code == 4
