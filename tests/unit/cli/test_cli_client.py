"""`cosmo client …` with real clients attached."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from tests.unit.cli.operating_kit import cosmo, ghost, in_all_forms, rows, table

from cosmodrome import blocking
from cosmodrome.client.values import Message
from cosmodrome.wire.releases import release


@pytest.fixture(scope="module")
def node() -> Iterator[blocking.Node]:
    """With a producer and a consumer that stay connected."""
    with blocking.embedded() as node:
        producer = blocking.Producer(node.namesrv, group="Senders")
        consumer = blocking.Consumer(node.namesrv, group="Readers", consume_from="first")
        with producer, consumer:
            producer.send(Message("Orders", b"x"))
            consumer.subscribe("Orders", tags="a || b")
            consumer.start()
            producer.send(Message("Orders", b"x", tags="a"))
            next(iter(consumer)).ack()
            yield node


@pytest.fixture(scope="module")
def namesrv(node: blocking.Node) -> str:
    return node.namesrv


@pytest.mark.parametrize("words", ["list", "list --group Readers", "stack Readers"])
def test_every_form_says_the_same(words: str, namesrv: str) -> None:
    if words.startswith("stack"):
        found = rows(namesrv, "client", *words.split())
        for form in ("jsonl", "yaml", "csv", "table", "wide"):
            done = cosmo(namesrv, "client", *words.split(), "-o", form)
            assert done.code == 0
            assert "Task" in done.out and found["client_id"] in done.out + done.err
        assert found["started_ms"] > 1_700_000_000_000
        assert found["properties"]["PROP_CONSUME_TYPE"] == "CONSUME_PASSIVELY"
        return
    in_all_forms(namesrv, "client", *words.split())


def test_both_sides_are_listed(namesrv: str) -> None:
    found = {row["role"]: row for row in rows(namesrv, "client", "list")}
    assert found.keys() == {"consumer", "producer"}
    consumer, producer = found["consumer"], found["producer"]
    assert (consumer["group"], producer["group"]) == ("Readers", "Senders")
    assert consumer["topics"] == ["Orders"]
    assert consumer["brokers"] == ["embedded"]
    assert consumer["mode"] == "clustering"
    assert consumer["version"] == producer["version"] == "4.9.8"
    assert consumer["version_code"] == 409
    assert producer["last_seen_ms"] > 1_700_000_000_000
    for row in (consumer, producer):
        assert row["address"].startswith("127.0.0.1")


def test_the_table_of_clients(namesrv: str) -> None:
    head, consumer = table(namesrv, "client", "list", "--role", "consumer")
    assert head == ["CLIENT ID", "ROLE", "GROUP", "LANGUAGE", "VERSION", "ADDRESS", "TOPICS"]
    assert consumer[1:3] == ["consumer", "Readers"]
    assert consumer[6] == "Orders"


def test_a_silent_broker_hides_only_its_own(namesrv: str) -> None:
    with ghost(namesrv, topics=("%RETRY%Readers",)):
        done = cosmo(namesrv, "client", "list", "-o", "jsonl")
    assert done.code == 7 and "ghost" in done.err
    assert {json.loads(line)["group"] for line in done.out.splitlines()} == {"Readers", "Senders"}


def test_lists_are_narrowed(namesrv: str) -> None:
    def groups(*words: str) -> list[str]:
        return [row["group"] for row in rows(namesrv, "client", "list", *words)]

    assert groups("--role", "producer") == ["Senders"]
    assert groups("--topic", "Orders") == ["Readers"]
    assert groups("--topic", "Nothing") == []
    assert groups("--group", "Senders") == ["Senders"]
    assert groups("--group", "Nobody") == []


def test_a_stack_names_the_tasks_of_the_client(namesrv: str) -> None:
    done = cosmo(namesrv, "client", "stack", "Readers")
    assert done.code == 0
    assert "Task" in done.out
    client_id = rows(namesrv, "client", "stack", "Readers")["client_id"]
    assert client_id in done.err
    assert cosmo(namesrv, "client", "stack", "Readers", client_id).code == 0


def test_whom_nobody_can_ask(namesrv: str) -> None:
    unknown = cosmo(namesrv, "client", "stack", "Reader")
    assert unknown.code == 4 and "did you mean Readers?" in unknown.err
    stranger = cosmo(namesrv, "client", "stack", "Readers", "nobody@1")
    assert stranger.code == 4 and "there is: " in stranger.err
    offline = cosmo(namesrv, "client", "stack", "TOOLS_CONSUMER")
    assert offline.code == 4 and "no member online" in offline.err
    assert cosmo("127.0.0.1:1", "client", "list").code == 3


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (409, "4.9.8"),
        (401, "4.9.4"),
        (355, "4.7.1"),
        (333, "4.6.0"),
        (232, "4.1.0-SNAPSHOT"),
        (213, "4.0.0"),
        (413, "5.0.0"),
        (479, "5.3.3"),
        (121, "121"),
    ],
)
def test_versions_have_names(version: int, name: str) -> None:
    assert release(version) == name
