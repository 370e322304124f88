"""`cosmo top`: live on a terminal, one snapshot elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from tests.unit.cli.operating_kit import cosmo, csv_cell, ghost, on_terminal, read_yaml, steady

from cosmodrome import blocking
from cosmodrome.cli.diagnose.top import fit, screen_lines
from cosmodrome.cli.support.output import text_width
from cosmodrome.client.operate.overview import BrokerLine, GroupLine, Overview, TopicLine
from cosmodrome.client.values import Message


@pytest.fixture(scope="module")
def node() -> Iterator[blocking.Node]:
    with blocking.embedded() as node:
        with blocking.Producer(node.namesrv, group="senders") as producer:
            for _ in range(3):
                producer.send(Message("Busy", b"x"))
        consumer = blocking.Consumer(node.namesrv, group="Slow", consume_from="first")
        with consumer:
            consumer.subscribe("Busy")
            for message in consumer:
                message.ack()
                break
        yield node


def test_a_snapshot_says_the_same_in_every_form(node: blocking.Node) -> None:
    done = cosmo(node.namesrv, "top", "-o", "json")
    assert done.code == 0, done
    seen = json.loads(done.out)
    assert seen.keys() == {"brokers", "topics", "groups"}
    broker = seen["brokers"][0]
    assert (broker["broker"], broker["state"], broker["role"]) == ("embedded", "up", "master")
    assert isinstance(broker["disk_used_percent"], int)
    assert [row["topic"] for row in seen["topics"]] == ["Busy"]
    assert seen["topics"][0]["groups"] == 1
    group = next(row for row in seen["groups"] if row["group"] == "Slow")
    assert group["members"] == 0

    again = read_yaml(cosmo(node.namesrv, "top", "-o", "yaml").out)
    lines = [
        json.loads(line) for line in cosmo(node.namesrv, "top", "-o", "jsonl").out.splitlines()
    ]
    csv_lines = cosmo(node.namesrv, "top", "-o", "csv").out.splitlines()
    assert len(lines) == sum(map(len, seen.values())) == len(csv_lines) - 1
    for kind in ("broker", "topic", "group"):
        assert steady(again[f"{kind}s"]) == steady(seen[f"{kind}s"])
        mine = [line for line in lines if line["kind"] == kind]
        names = seen[f"{kind}s"][0].keys()
        trimmed = [{name: line[name] for name in names} for line in mine]
        assert steady(trimmed) == steady(seen[f"{kind}s"])
    assert csv_lines[0].split(",") == list(lines[0])
    assert csv_lines[1].split(",")[1] == csv_cell(broker["broker"])
    for form in ("table", "wide"):
        heads = [
            line.split()[0]
            for line in cosmo(node.namesrv, "top", "-o", form).out.splitlines()
            if line and line.split()[0].isupper()
        ]
        assert heads == ["BROKER", "TOPIC", "GROUP"]


def test_silent_brokers_are_shown_as_such(node: blocking.Node) -> None:
    with ghost(node.namesrv, topics=("Elsewhere",)):
        done = cosmo(node.namesrv, "top", "-o", "json")
    assert done.code == 0
    seen = json.loads(done.out)
    row = next(row for row in seen["brokers"] if row["broker"] == "ghost")
    assert row["state"] == "silent"
    assert row["in_per_s"] is None
    elsewhere = [row for row in seen["topics"] if row["topic"] == "Elsewhere"]
    assert all(row["in_per_s"] is None for row in elsewhere)
    assert [(row["group"], row["lag"]) for row in seen["groups"]] == [("Slow", None)]


def test_no_name_server_ends_with_3() -> None:
    assert cosmo("127.0.0.1:1", "top").code == 3


@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_a_terminal_is_drawn_until_a_key_ends_it(key: bytes, node: blocking.Node) -> None:
    code, text = on_terminal(
        node.namesrv,
        "top",
        "--every",
        "0.3",
        wait_for=r"Busy.*Slow.*q ends.*Busy",
        then=key,
    )
    assert code == 0, text
    assert text.index("\x1b[?1049h") < text.index("Busy") < text.index("\x1b[?1049l")
    assert text.rstrip().endswith("\x1b[?1049l")
    assert "Traceback" not in text


def test_a_terminal_waits_for_a_cluster_that_is_not_there() -> None:
    code, text = on_terminal(
        "127.0.0.1:1", "top", "--every", "0.3", wait_for="no name server answers", then=b"q"
    )
    assert code == 0, text


# --- the screen ------------------------------------------------------------------------------

SEEN = Overview(
    [
        BrokerLine("c", "broker-a", 0, "127.0.0.1:10911", {}),
        BrokerLine("c", "b", 1, "x:1", None, "silent"),
    ],
    [TopicLine(f"topic-{number:02}", 1.0, None, 0) for number in range(30)],
    [GroupLine(f"group-{number:02}", 1, 1.0, 5, 1500) for number in range(30)],
    0,
)


@pytest.mark.parametrize("height", [12, 20, 24, 60, 200])
@pytest.mark.parametrize("width", [20, 80, 200])
def test_the_screen_is_never_overfull(height: int, width: int) -> None:
    lines = screen_lines(SEEN, width, height)
    assert len(lines) <= height
    assert all(text_width(line) <= width for line in lines)


def test_topics_and_groups_share_the_screen() -> None:
    text = "\n".join(screen_lines(SEEN, 100, 24))
    assert "topic-00" in text and "group-00" in text
    assert "(+22 more)" in text
    assert "silent" in text and "unknown" in text
    full = "\n".join(screen_lines(SEEN, 100, 80))
    assert "topic-29" in full and "group-29" in full and "more)" not in full


def test_a_line_is_cut_by_what_it_takes_on_the_screen() -> None:
    assert fit("abcdef", 4) == "abcd"
    assert fit("日本語", 4) == "日本"
    assert fit("ab", 4) == "ab"
    assert fit("abc", 0) == ""
