"""`cosmo group …` against a node in this process, with a real member where one is needed."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import shlex
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import click
import pytest
from tests.unit.cli.operating_kit import cosmo, ghost, in_all_forms, rows, table

from cosmodrome import blocking
from cosmodrome.cli.main import COMMANDS
from cosmodrome.cli.main import cosmo as program
from cosmodrome.client.operate.diagnosis import causes
from cosmodrome.client.values import Message

TIMEOUT = ("--timeout", "30")  # a busy machine answers late

_numbers = count(1)


@pytest.fixture(scope="module")
def node() -> Iterator[blocking.Node]:
    with blocking.embedded() as node:
        yield node


@pytest.fixture(scope="module")
def namesrv(node: blocking.Node) -> str:
    return node.namesrv


@pytest.fixture
def topic(namesrv: str) -> str:
    name = f"Topic{next(_numbers)}"
    assert cosmo(namesrv, "topic", "create", name, "-q", "1").code == 0
    return name


@pytest.fixture
def group(node: blocking.Node, topic: str) -> str:
    """A group that was there: it has consumed three of five messages."""
    name = f"group{next(_numbers)}"
    assert cosmo(node.namesrv, "group", "create", name).code == 0
    send(node, topic, 5)
    set_offset(node, name, topic, 3)
    return name


def send(node: blocking.Node, topic: str, number: int, **fields: Any) -> None:
    with blocking.Producer(node.namesrv, group="senders") as producer:
        for _ in range(number):
            producer.send(Message(topic, b"x", **fields))


def set_offset(node: blocking.Node, group: str, topic: str, offset: int) -> None:
    done = cosmo(node.namesrv, "group", "reset", group, "-t", topic, "--to", str(offset), "--yes")
    assert done.code == 0, done.err


@contextlib.contextmanager
def member(
    node: blocking.Node,
    group: str,
    topic: str,
    handler: Callable[[Any], None] = lambda _: None,
    **settings: Any,
) -> Iterator[blocking.Consumer]:
    with blocking.Consumer(node.namesrv, group=group, **settings) as consumer:
        consumer.subscribe(topic, handler=handler)
        worker = threading.Thread(target=consumer.run)
        worker.start()
        try:
            yield consumer
        finally:
            consumer.stop()
            worker.join(60)


# --- forms -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("list",),
        ("list", "--all"),
        ("describe", "{group}"),
        ("lag", "{group}"),
        ("lag", "{group}", "--topic", "{topic}"),
        ("reset", "{group}", "--topic", "{topic}", "--to", "earliest", "--dry-run"),
        ("skip", "{group}", "--topic", "{topic}", "--dry-run"),
        ("clone", "{group}", "{group}x", "--topic", "{topic}", "--dry-run"),
        ("delete", "{group}", "--dry-run"),
        ("alter", "{group}", "--retries", "3", "--dry-run"),
        ("create", "{group}x", "--dry-run"),
    ],
    ids=" ".join,
)
def test_every_form_says_the_same(
    words: tuple[str, ...], namesrv: str, group: str, topic: str
) -> None:
    found = in_all_forms(
        namesrv, "group", *(word.format(group=group, topic=topic) for word in words)
    )
    assert group in json.dumps(found)


# --- looking ---------------------------------------------------------------------------------


def test_lag_in_messages_and_seconds(namesrv: str, group: str, topic: str) -> None:
    (row,) = rows(namesrv, "group", "lag", group)
    assert (row["offset"], row["end"], row["lag"], row["first"]) == (3, 5, 2, 0)
    assert 0 <= row["age_s"] < 60
    (listed,) = [one for one in rows(namesrv, "group", "list") if one["group"] == group]
    assert (listed["lag"], listed["members"], listed["topics"]) == (2, 0, [topic])
    assert isinstance(listed["age_s"], float)


def test_the_table_of_lag_says_unknown_and_why(
    node: blocking.Node, namesrv: str, group: str
) -> None:
    other = f"Wide{next(_numbers)}"
    cosmo(namesrv, "topic", "create", other, "-q", "2")
    with blocking.Producer(namesrv, group="senders") as producer:
        for _ in range(4):
            producer.send(Message(other, b"x"))
    done = cosmo(
        namesrv, "group", "reset", group, "-t", other, "--to", "1", "--queue", "1", "--yes"
    )
    assert done.code == 0, done.err
    lines = table(namesrv, "group", "lag", group, "-t", other)
    why = "the group has committed no offset here yet"
    assert lines[0] == (
        ["TOPIC", "BROKER", "QUEUE", "OFFSET", "END", "LAG", "AGE S", "UNKNOWN BECAUSE"]
    )
    assert lines[1] == [other, "embedded", "0", "unknown", "2", "unknown", "unknown", why]
    assert lines[2][:6] == [other, "embedded", "1", "1", "2", "1"]
    assert lines[3][0] == "TOTAL" and "unknown" in lines[3]
    machine = rows(namesrv, "group", "lag", group, "-t", other)
    assert [row["lag"] for row in machine] == [None, 1]


def test_describe_names_members_and_their_queues(
    node: blocking.Node, namesrv: str, group: str, topic: str
) -> None:
    with member(node, group, topic) as consumer:
        done = cosmo(namesrv, "group", "describe", group, "-o", "json")
        found = json.loads(done.out)
        text = cosmo(namesrv, "group", "describe", group).out
        assert consumer.assignment
    assert [one["queues"] for one in found["members"]] == [2]  # of the topic and of its retries
    assert found["mode"] == "clustering"
    assert {one["topic"] for one in found["subscriptions"]} == {topic, f"%RETRY%{group}"}
    assert found["settings"][0]["retry_max_times"] == 16
    for word in ("CLIENT ID", "FILTER", "RETRY MAX TIMES", topic):
        assert word in text


def test_broadcasting_says_where_the_offsets_are(
    node: blocking.Node, namesrv: str, topic: str, tmp_path: Any
) -> None:
    send(node, topic, 1)
    with member(node, "shouts", topic, model="broadcasting", offsets_dir=str(tmp_path)):
        done = cosmo(namesrv, "group", "lag", "shouts", "-o", "json")
    assert [row["lag"] for row in json.loads(done.out)] == [None]
    assert "keep their offsets themselves" in done.err


@pytest.mark.parametrize("verb", ["lag", "describe", "delete"])
def test_a_group_that_nobody_knows(verb: str, namesrv: str, group: str) -> None:
    done = cosmo(namesrv, "group", verb, group + "y")
    assert done.code == 4
    assert f"did you mean {group}?" in done.err
    assert done.out == ""


def test_a_topic_that_nobody_has(namesrv: str, group: str) -> None:
    assert cosmo(namesrv, "group", "lag", group, "-t", "Nothing").code == 4


def test_an_unreachable_cluster() -> None:
    assert cosmo("127.0.0.1:1", "group", "list", *TIMEOUT).code == 3


def test_a_silent_broker_makes_lag_unknown(namesrv: str, group: str, topic: str) -> None:
    with ghost(namesrv):
        done = cosmo(namesrv, "group", "lag", group, "-o", "json", *TIMEOUT)
        every = cosmo(namesrv, "group", "list", "-o", "json", *TIMEOUT)
    (listed,) = [one for one in json.loads(done.out) if one["topic"] == topic]
    assert listed["lag"] == 2
    assert done.code == every.code == 7
    (row,) = [one for one in json.loads(every.out) if one["group"] == group]
    assert (row["lag"], row["lag_at_least"]) == (None, 2)  # the silent one may have more


# --- moving ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "after"),
    [("earliest", 0), ("latest", 5), ("1", 1), ("99", 5), ("-1h", 0), ("2001-01-01T00:00:00", 0)],
)
def test_reset_without_members(
    target: str, after: int, namesrv: str, group: str, topic: str
) -> None:
    words = (namesrv, "group", "reset", group, "-t", topic, "--to", target)
    (planned,) = rows(*words, "--dry-run")
    assert (planned["before"], planned["after"], planned["moves"]) == (3, after, after - 3)
    assert rows(namesrv, "group", "lag", group)[0]["offset"] == 3
    refused = cosmo(*words)
    assert refused.code == 2 and "--yes" in refused.err
    (done,) = rows(*words, "--yes")
    assert (done["after"], done["outcome"]) == (after, "moved")
    assert rows(namesrv, "group", "lag", group)[0]["offset"] == after


def test_members_that_are_online_are_told(
    node: blocking.Node, namesrv: str, group: str, topic: str
) -> None:
    seen: list[int] = []
    again = threading.Event()

    def note(message: Any) -> None:
        seen.append(message.queue_offset)
        if seen.count(0):
            again.set()

    with member(node, group, topic, note, commit_every_ms=100):
        words = (namesrv, "group", "reset", group, "-t", topic)
        by_offset = cosmo(*words, "--to", "0", "--yes")
        assert by_offset.code == 1 and "1 member(s) online" in by_offset.err
        done = cosmo(*words, "--to", "earliest", "--yes", "-o", "json")
        assert done.code == 0, done.err
        assert json.loads(done.out)[0]["outcome"] in ("told", "unchanged")
        assert again.wait(60), seen


def test_skip_leaves_the_rest_out(namesrv: str, group: str, topic: str) -> None:
    (done,) = rows(namesrv, "group", "skip", group, "-t", topic, "--yes")
    assert (done["before"], done["after"]) == (3, 5)
    assert rows(namesrv, "group", "lag", group)[0]["lag"] == 0


def test_clone_copies_progress(node: blocking.Node, namesrv: str, group: str, topic: str) -> None:
    twin = f"{group}twin"
    cosmo(namesrv, "group", "create", twin)
    words = (namesrv, "group", "clone", group, twin, "-t", topic)
    assert rows(*words, "--dry-run")[0]["outcome"] == "would be copied"
    assert rows(*words, "--yes")[0]["before"] is None
    assert rows(namesrv, "group", "lag", twin)[0]["offset"] == 3
    with member(node, twin, topic):
        refused = cosmo(*words, "--yes")
    assert refused.code == 1 and "stop them first" in refused.err
    assert cosmo(namesrv, "group", "clone", group, group, "-t", topic, "--yes").code == 2


@pytest.mark.parametrize("text", ["soon", "-3x", "9" * 30, "1.5"])
def test_a_target_that_is_none(text: str, namesrv: str, group: str, topic: str) -> None:
    done = cosmo(namesrv, "group", "reset", group, "-t", topic, f"--to={text}", "--yes")
    assert done.code == 1 and text[:3] in done.err


# --- changing --------------------------------------------------------------------------------


def test_create_alter_delete(node: blocking.Node, namesrv: str, topic: str) -> None:
    made = rows(namesrv, "group", "create", "fleeting", "--retries", "2")
    assert (made[0]["outcome"], made[0]["retry_max_times"]) == ("created", 2)
    assert cosmo(namesrv, "group", "create", "fleeting").code == 1
    (changed,) = rows(namesrv, "group", "alter", "fleeting", "--consume", "off")
    assert (changed["consume_enabled"], changed["retry_max_times"]) == (False, 2)
    (same,) = rows(namesrv, "group", "alter", "fleeting", "--consume", "off")
    assert same["outcome"] == "unchanged"
    by_address = ("--broker", node.broker_address, "--retries", "5")
    (changed,) = rows(namesrv, "group", "alter", "fleeting", *by_address)
    assert (changed["broker"], changed["retry_max_times"]) == ("embedded", 5)
    assert cosmo(namesrv, "group", "alter", "fleeting").code == 2
    assert cosmo(namesrv, "group", "alter", "nobodys", "--consume", "on").code == 4
    cosmo(namesrv, "group", "alter", "fleeting", "--consume", "on")

    with member(node, "fleeting", topic):
        refused = cosmo(namesrv, "group", "delete", "fleeting", "--yes")
    assert refused.code == 1 and "1 member(s) connected" in refused.err
    planned = rows(namesrv, "group", "delete", "fleeting", "--dry-run")
    assert {(row["what"], row["name"]) for row in planned} >= {
        ("settings", "fleeting"),
        ("topic", "%RETRY%fleeting"),
    }
    assert cosmo(namesrv, "group", "delete", "fleeting").code == 2  # nobody can be asked
    gone = rows(namesrv, "group", "delete", "fleeting", "--yes")
    assert {row["outcome"] for row in gone} == {"deleted"}
    assert cosmo(namesrv, "group", "describe", "fleeting").code == 4
    assert cosmo(namesrv, "group", "delete", "TOOLS_CONSUMER", "--yes").code == 1


# --- explaining ------------------------------------------------------------------------------


def test_explain_shows_evidence_and_command(namesrv: str, group: str) -> None:
    done = cosmo(namesrv, "group", "explain", group, "--sample", "0.1")
    assert done.code == 6
    assert f"ERROR NO_MEMBERS: No consumer of group {group} is connected" in done.out
    assert "  lag: 2\n" in done.out
    assert f"  $ cosmo client list --group {group}\n" in done.out
    assert "1 problem(s) found" in done.err


@pytest.mark.parametrize("form", ["wide", "json", "jsonl", "csv", "yaml"])
def test_explain_in_every_form(form: str, namesrv: str, group: str) -> None:
    done = cosmo(namesrv, "group", "explain", group, "--sample", "0.1", "-o", form)
    assert done.code == 6
    assert "NO_MEMBERS" in done.out
    if form.startswith("json"):
        document = json.loads(done.out)
        row = document[0] if form == "json" else document
        assert row["evidence"] == {"members": 0, "brokers_asked": 1, "lag": 2}
        assert row["command"] == f"cosmo client list --group {group}"
    if form == "wide":
        assert "Checked and in order:" in done.out


def test_explain_a_healthy_group(node: blocking.Node, namesrv: str, group: str, topic: str) -> None:
    set_offset(node, group, topic, 5)
    with member(node, group, topic):
        done = cosmo(namesrv, "group", "explain", group, "--sample", "0.1")
        machine = cosmo(namesrv, "group", "explain", group, "--sample", "0.1", "-o", "jsonl")
    assert done.code == 0, done.out
    assert "CAUGHT_UP" in done.out and "  members are connected\n" in done.out
    assert [json.loads(line)["severity"] for line in machine.out.splitlines()] == ["info"]


def check_typed(text: str) -> None:
    """The command exists and takes these flags."""
    words = shlex.split(text)[1:]
    if words[0] == "dlq" and "dlq" not in COMMANDS:
        return
    command: click.Command | None = program
    context = click.Context(program, info_name="cosmo")
    while isinstance(command, click.Group):
        name = words.pop(0)
        command = command.get_command(context, name)
        assert command is not None, text
        context = click.Context(command, info_name=name, parent=context)
    assert command is not None
    command.make_context(command.name, words)


def test_commands_of_findings_can_be_typed_as_they_stand() -> None:
    folder = Path(causes.__file__).parent
    found = [
        text
        for name in ("causes.py", "member_causes.py", "checkup.py")
        for text in _commands((folder / name).read_text())
    ]
    assert len(found) >= 15
    for text in found:
        check_typed(text)


def test_commands_of_the_guide_can_be_typed() -> None:
    guide = Path(__file__).parents[3] / "docs" / "my-consumer-gets-nothing.md"
    found = re.findall(r"`(cosmo \w+ [^`]+)`|^\$ (cosmo .+)$", guide.read_text(), re.MULTILINE)
    assert len(found) >= 20
    for one, other in found:
        check_typed(re.sub(r"\bN\b", "6", one or other))


def _commands(source: str) -> Iterator[str]:
    """The f-strings that begin with `cosmo `, with something in place of their fields."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr | ast.Constant):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "6" for part in parts
            )
            if text.startswith("cosmo ") and isinstance(node, ast.JoinedStr):
                yield text
