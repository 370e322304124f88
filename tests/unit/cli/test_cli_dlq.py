"""`cosmo dlq …` against a node in this process: dead letters made by a consumer that fails."""

from __future__ import annotations

import asyncio
import base64
import csv
import io
import json
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.operating_kit import FORMATS, cosmo, in_all_forms, rows, table

from cosmodrome import blocking
from cosmodrome.cli.messages.rows import message_from_json
from cosmodrome.client.values import Message
from cosmodrome.errors import ConfigError
from cosmodrome.layout import SYS_COMPRESSED, SYS_ZLIB
from cosmodrome.transport.channel import Channel
from cosmodrome.wire.commands import SendMessageV2
from cosmodrome.wire.message import format_properties

_numbers = count(1)
BODIES = ["m0", "m1", "m2", "m3"]


@pytest.fixture(scope="module")
def namesrv() -> Iterator[str]:
    with blocking.embedded() as node:
        yield node.namesrv


@pytest.fixture
def group(namesrv: str) -> str:
    """A group with four dead letters of the topic `Of-GROUP`, as brokers make them."""
    name = f"group{next(_numbers)}"
    for topic in (f"Of-{name}", f"%DLQ%{name}", f"%RETRY%{name}"):
        assert cosmo(namesrv, "topic", "create", topic, "-q", "1").code == 0
    assert cosmo(namesrv, "group", "create", name).code == 0
    with blocking.Admin(namesrv) as admin:
        address = admin.brokers.addresses()["embedded"]
    asyncio.run(_put(address, name))
    with blocking.Producer(namesrv, group="senders") as producer:
        for body in BODIES:
            producer.send(Message(f"Of-{name}", body))
    done = cosmo(namesrv, "group", "reset", name, "-t", f"Of-{name}", "--to", "latest", "--yes")
    assert done.code == 0, done
    return name


async def _put(address: str, group: str, bodies: Sequence[str] = BODIES, sys_flag: int = 0) -> None:
    host, _, port = address.rpartition(":")
    channel = Channel(host, int(port))
    for number, body in enumerate(bodies):
        pairs = {
            "RETRY_TOPIC": f"Of-{group}",
            "ORIGIN_MESSAGE_ID": f"O{number}",
            "UNIQ_KEY": f"{group}-{number}",
            "TAGS": "even" if number % 2 == 0 else "odd",
            "KEYS": f"k{number}",
        }
        await channel.call(
            SendMessageV2(
                producer_group="p",
                topic=f"%DLQ%{group}",
                default_topic="TBW102",
                default_topic_queue_nums=1,
                queue_id=0,
                sys_flag=sys_flag,
                born_timestamp=1,
                flag=0,
                properties=format_properties(pairs),
                reconsume_times=1,
                body=body.encode(),
            )
        )
    await channel.close()


def damaged_group(namesrv: str) -> str:
    """A group whose only dead letter says that it is compressed but is not."""
    name = f"group{next(_numbers)}"
    for topic in (f"Of-{name}", f"%DLQ%{name}"):
        assert cosmo(namesrv, "topic", "create", topic, "-q", "1").code == 0
    with blocking.Admin(namesrv) as admin:
        address = admin.brokers.addresses()["embedded"]
    asyncio.run(_put(address, name, ["rubbish"], SYS_COMPRESSED | SYS_ZLIB))
    return name


def letters(namesrv: str, group: str) -> list[dict[str, Any]]:
    done = cosmo(namesrv, "dlq", "peek", group, "-o", "json")
    return json.loads(done.out) if done.code == 0 else []


def bodies(namesrv: str, topic: str) -> list[str]:
    return sorted(row["body"] for row in rows(namesrv, "msg", "print", topic))


def test_dead_letters_of_a_consumer_that_fails(namesrv: str) -> None:
    assert cosmo(namesrv, "topic", "create", "Fails", "-q", "1").code == 0

    def fail(_: Any) -> None:
        raise ValueError("no")

    with blocking.Producer(namesrv, group="senders") as producer:
        sent = producer.send(Message("Fails", b"x"))
    with blocking.Consumer(
        namesrv, group="failing", consume_from="first", max_reconsume_times=0
    ) as consumer:
        consumer.subscribe("Fails", handler=fail)
        worker = threading.Thread(target=consumer.run)
        worker.start()
        deadline = time.monotonic() + 90
        while not (found := letters(namesrv, "failing")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        consumer.stop()
        worker.join(60)
    (row,) = found
    assert (row["origin_topic"], row["msg_id"], row["body"]) == ("Fails", sent.msg_id, "x")
    assert row["origin_msg_id"] == sent.offset_msg_id
    (back,) = rows(namesrv, "dlq", "redrive", "failing", "--yes")
    assert (back["target"], back["outcome"]) == ("Fails", "sent")
    assert bodies(namesrv, "Fails") == ["x", "x"]


# --- looking ---------------------------------------------------------------------------------


def test_list_says_how_many_and_how_old(namesrv: str, group: str) -> None:
    shown = {row["group"]: row for row in in_all_forms(namesrv, "dlq", "list", "--all")}
    row = shown[group]
    assert (row["messages"], row["topic"], row["brokers"]) == (4, f"%DLQ%{group}", ["embedded"])
    assert row["oldest_ms"] <= row["newest_ms"]
    assert 0 <= row["newest_age_s"] <= row["oldest_age_s"] < 120
    head = table(namesrv, "dlq", "list")[0]
    assert head == ["GROUP", "MESSAGES", "OLDEST AGE S", "NEWEST AGE S"]


def test_list_leaves_out_empty_ones(namesrv: str) -> None:
    assert cosmo(namesrv, "topic", "create", "%DLQ%empty").code == 0
    assert "empty" not in {row["group"] for row in rows(namesrv, "dlq", "list")}
    shown = {row["group"]: row for row in rows(namesrv, "dlq", "list", "--all")}
    assert shown["empty"]["messages"] == 0 and shown["empty"]["oldest_ms"] is None


def test_peek_says_where_they_come_from(namesrv: str, group: str) -> None:
    found = in_all_forms(namesrv, "dlq", "peek", group)
    assert sorted(row["body"] for row in found) == BODIES
    row = found[0]
    assert row["origin_topic"] == f"Of-{group}" and row["origin_msg_id"]
    assert row["reconsume_times"] == 1 and row["why"] == "given back 1 time"
    done = cosmo(namesrv, "dlq", "peek", group, "--count", "1")
    assert len(done.out.splitlines()) == 2 and "1 of 4 shown" in done.err
    assert len(rows(namesrv, "dlq", "peek", "--from", f"Of-{group}")) == 4
    assert len(rows(namesrv, "dlq", "peek", f"%DLQ%{group}")) == 4


def test_a_body_that_cannot_be_read_is_shown_as_it_is_stored(namesrv: str) -> None:
    group = damaged_group(namesrv)
    (row,) = in_all_forms(namesrv, "dlq", "peek", group)
    (found,) = rows(namesrv, "msg", "find", f"%DLQ%{group}", "--key", "k0")
    got = rows(namesrv, "msg", "get", row["offset_msg_id"])
    for one in (row, found, got):
        assert base64.b64decode(one["body_base64"]) == b"rubbish" and one["body"] is None
        assert "compressed body is damaged" in one["damage"] and one["keys"] == ["k0"]
    assert table(namesrv, "dlq", "peek", group)[1][-1] == "(cannot be read)"
    cells = dict(line[:2] for line in table(namesrv, "msg", "get", row["offset_msg_id"]))
    assert cells["body"] == "(cannot be read)"


def test_a_body_that_cannot_be_read_is_not_sent_by_produce_but_redriven(namesrv: str) -> None:
    group = damaged_group(namesrv)
    exported = cosmo(namesrv, "dlq", "export", group, "--body", "text", "-o", "jsonl")
    assert exported.code == 0
    with pytest.raises(ConfigError, match="damage: the compressed body is damaged"):
        message_from_json(f"Of-{group}", exported.out)
    (back,) = rows(namesrv, "dlq", "redrive", group, "--yes")
    assert (back["target"], back["outcome"]) == (f"Of-{group}", "sent")
    (copy,) = rows(namesrv, "msg", "print", f"Of-{group}")
    assert base64.b64decode(copy["body_base64"]) == b"rubbish" and copy["damage"]


@pytest.mark.parametrize("verb", ["peek", "export", "redrive"])
def test_a_group_without_dead_letters(namesrv: str, group: str, verb: str) -> None:
    done = cosmo(namesrv, "dlq", verb, f"{group}x")
    assert done.code == 4 and f"did you mean {group}?" in done.err and not done.out
    assert cosmo(namesrv, "dlq", verb, group, "--from", "T").code == 2
    assert cosmo(namesrv, "dlq", verb, "--from", "Nowhere").code == 4


def test_export_in_every_form(namesrv: str, group: str) -> None:
    found = in_all_forms(namesrv, "dlq", "export", group)
    assert sorted(row["body"] for row in found) == BODIES
    assert "exported 4 messages" in cosmo(namesrv, "dlq", "export", group).err
    tagged = rows(namesrv, "dlq", "export", group, "--tag", "odd", "--since", "-1h")
    assert sorted(row["body"] for row in tagged) == ["m1", "m3"]
    assert rows(namesrv, "dlq", "export", group, "--until", "-1h") == []
    assert len(rows(namesrv, "dlq", "export", group, "--count", "3")) == 3
    encoded = rows(namesrv, "dlq", "export", group, "--body", "base64")
    assert {row["body"] for row in encoded} == {None} and encoded[0]["body_base64"]
    empty = cosmo(namesrv, "dlq", "export", group, "--until", "-1h", "-o", "csv").out
    assert len(list(csv.reader(io.StringIO(empty)))) == 1, "the names alone"


def test_what_export_writes_produce_sends(namesrv: str, group: str, tmp_path: Path) -> None:
    lines = cosmo(namesrv, "dlq", "export", group, "-o", "jsonl").out
    target = f"Again-{group}"
    assert cosmo(namesrv, "topic", "create", target).code == 0
    file = tmp_path / "letters.jsonl"
    file.write_text(lines)
    done = cosmo(namesrv, "produce", target, "--jsonl", "--file", str(file))
    assert done.code == 0, done
    assert bodies(namesrv, target) == BODIES


# --- redrive ---------------------------------------------------------------------------------


def test_redrive_plans_runs_and_tells(namesrv: str, group: str) -> None:
    topic = f"Of-{group}"
    planned = in_all_forms(namesrv, "dlq", "redrive", group, "--dry-run", "--tag", "odd")
    assert {row["outcome"] for row in planned} == {"would_be_sent"}
    assert {row["target"] for row in planned} == {topic} and len(planned) == 2
    assert bodies(namesrv, topic) == BODIES

    asked = cosmo(namesrv, "dlq", "redrive", group)
    assert asked.code == 2 and "--yes" in asked.err
    assert f"every group of {topic} gets them: {group}" in asked.err
    found = rows(namesrv, "dlq", "redrive", group, "--yes", "--key", "k1", "--key", "k2")
    assert {row["outcome"] for row in found} == {"sent"} and len(found) == 2
    assert bodies(namesrv, topic) == sorted([*BODIES, "m1", "m2"])
    one = rows(namesrv, "msg", "get", found[0]["new_msg_id"], "-t", topic)
    assert one["properties"]["REDRIVE_MSG_ID"] == found[0]["msg_id"]

    run = found[0]["run"]
    assert in_all_forms(namesrv, "dlq", "redrive", "show", run)[0]["run"] == run
    listed = {row["run"]: row for row in in_all_forms(namesrv, "dlq", "redrive", "list")}
    assert listed[run]["state"] == "finished" and listed[run]["arrived"] == 2
    assert (listed[run]["skipped"], listed[run]["left"], listed[run]["failed"]) == (2, 0, 0)
    assert listed[run]["filter"] == {"keys": ["k1", "k2"]}

    done = cosmo(namesrv, "dlq", "redrive", group, "--yes")
    assert done.code == 0 and "2 sent, 2 skipped" in done.err
    assert bodies(namesrv, topic) == sorted([*BODIES, *BODIES])


@pytest.mark.parametrize("form", FORMATS)
def test_redrive_prints_results_in_every_form(namesrv: str, group: str, form: str) -> None:
    words = ("dlq", "redrive", group, "--yes", "--max", "1", "-o", form)
    done = cosmo(namesrv, *words)
    assert done.code == 0 and "sent" in done.out and "is finished: 1 sent" in done.err


def test_redrive_to_another_topic_and_to_the_group_alone(namesrv: str, group: str) -> None:
    other = f"Other-{group}"
    assert cosmo(namesrv, "topic", "create", other).code == 0
    words = ("dlq", "redrive", group, "--yes")
    assert len(rows(namesrv, *words, "--to", other, "--max", "2", "--rate", "1000")) == 2
    assert len(bodies(namesrv, other)) == 2
    rest = rows(namesrv, *words, "--to-group", group)
    assert {row["target"] for row in rest} == {f"%RETRY%{group}"} and len(rest) == 2
    assert bodies(namesrv, f"Of-{group}") == BODIES


def test_redrive_says_what_it_could_not_do(namesrv: str, group: str) -> None:
    other = f"Plain-{group}"
    assert cosmo(namesrv, "topic", "create", other, "-q", "1").code == 0
    with blocking.Producer(namesrv, group="senders") as producer:
        producer.send(Message(other, b"x"))
    done = cosmo(namesrv, "dlq", "redrive", "--from", other, "--yes", "-o", "json")
    assert done.code == 7 and "1 message(s) were not redriven" in done.err
    (row,) = json.loads(done.out)
    assert row["outcome"] == "no_target" and "name a target" in row["why"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("resume", "nonsense"), 1),
        (("resume", "20260101-000000-abcdef"), 4),
        (("cancel", "20260101-000000-abcdef"), 4),
        (("show", "20260101-000000-abcdef"), 4),
        (("start",), 2),
        (("{group}", "--rate", "0"), 2),
        (("{group}", "--to", "%DLQ%{group}"), 1),
        (("{group}", "--since", "5"), 1),
    ],
)
def test_wrong_words(namesrv: str, group: str, words: tuple[str, ...], code: int) -> None:
    done = cosmo(namesrv, "dlq", "redrive", *(word.format(group=group) for word in words))
    assert done.code == code and not done.out, done


def test_a_finished_run_is_over(namesrv: str, group: str) -> None:
    run = rows(namesrv, "dlq", "redrive", group, "--yes")[0]["run"]
    for verb in ("resume", "cancel"):
        done = cosmo(namesrv, "dlq", "redrive", verb, run)
        assert done.code == 1 and "finished" in done.err
