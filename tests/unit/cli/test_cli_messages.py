"""`cosmo produce`, `consume`, `tail`, `request`, `bench`, `context` as processes against a node."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest

from cosmodrome import blocking
from cosmodrome.cli.messages.rows import message_from_json
from cosmodrome.errors import ConfigError
from cosmodrome.layout import SYS_COMPRESSED
from cosmodrome.transport.channel import Channel
from cosmodrome.wire.commands.produce import SendMessageV2

_numbers = count(1)


@pytest.fixture(scope="module")
def node() -> Iterator[blocking.Node]:
    with blocking.embedded() as node:
        yield node


@pytest.fixture
def topic() -> str:
    return f"Cli{next(_numbers)}"


def cosmo(
    *arguments: str, namesrv: str | None = None, stdin: bytes = b"", home: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    environment = {name: value for name, value in os.environ.items() if "NAMESRV" not in name}
    if namesrv is not None:
        environment["COSMO_NAMESRV"] = namesrv
    if home is not None:
        environment["XDG_CONFIG_HOME"] = str(home)
    return subprocess.run(
        [sys.executable, "-m", "cosmodrome.cli", *arguments],
        input=stdin,
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
    )


def send(node: blocking.Node, topic: str, *lines: str) -> None:
    done = cosmo("produce", topic, namesrv=node.namesrv, stdin="\n".join(lines).encode())
    assert done.returncode == 0, done.stderr


def rows(done: subprocess.CompletedProcess[bytes]) -> list[dict[str, object]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_lines_of_stdin_become_messages_and_come_back(node: blocking.Node, topic: str) -> None:
    done = cosmo(
        "produce",
        topic,
        "-n",
        node.namesrv,
        "-o",
        "jsonl",
        "--tag",
        "t",
        "--key",
        "k",
        "--property",
        "colour=red",
        stdin="ene\n\nmene\r\nmiste ü".encode(),
    )
    results = rows(done)
    assert sorted(str(result["line"]) for result in results) == ["1", "3", "4"]
    assert {result["status"] for result in results} == {"OK"}
    assert b"sent 3 messages" in done.stderr

    found = rows(cosmo("consume", topic, "-n", node.namesrv, "--count", "3", "-o", "jsonl"))
    assert {row["body"] for row in found} == {"ene", "mene", "miste ü"}
    assert {row["msg_id"] for row in found} == {result["msg_id"] for result in results}
    for row in found:
        assert (row["topic"], row["tags"], row["keys"]) == (topic, "t", ["k"])
        assert row["properties"]["colour"] == "red"  # type: ignore[index]


def test_json_lines_carry_every_field_and_what_consume_prints_can_be_sent_again(
    node: blocking.Node, topic: str
) -> None:
    binary = bytes(range(256))
    lines: list[dict[str, Any]] = [
        {"body": "plain", "tags": "a", "keys": ["k1", "k2"], "properties": {"n": "1"}},
        {"body_base64": base64.b64encode(binary).decode(), "keys": "x y"},
        {"body": {"a": [1]}},
    ]
    stdin = "\n".join(json.dumps(line) for line in lines).encode()
    done = cosmo("produce", topic, "--jsonl", namesrv=node.namesrv, stdin=stdin)
    assert done.returncode == 0, done.stderr
    found = cosmo("consume", topic, "--exit-at-end", "-o", "jsonl", namesrv=node.namesrv)
    by_key = {tuple(cast(Any, row["keys"])): row for row in rows(found)}
    assert by_key["k1", "k2"]["body"] == "plain"
    assert by_key["x", "y"]["body_base64"] == lines[1]["body_base64"]
    assert "body" not in by_key["x", "y"]
    assert by_key[()]["body"] == '{"a": [1]}'

    again = topic + "_again"
    done = cosmo("produce", again, "--jsonl", namesrv=node.namesrv, stdin=found.stdout)
    assert done.returncode == 0, done.stderr
    copies = rows(cosmo("consume", again, "--exit-at-end", "-o", "jsonl", namesrv=node.namesrv))
    assert {tuple(row["keys"]) for row in copies} == set(by_key)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("no json", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"bodi": "x"}', "unknown field 'bodi'"),
        ("{}", "no body"),
        ('{"body": "x", "delay": "soon"}', "delay"),
        ('{"body": "x", "delay": -1}', "delay"),
        ('{"body": "x", "tags": 3}', "tags"),
        ('{"body": "x", "properties": []}', "properties"),
        ('{"body_base64": "%"}', "body_base64"),
    ],
)
def test_a_line_that_is_no_message_says_why(line: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        message_from_json("T", line)


def test_a_bad_line_is_named_and_nothing_after_it_is_sent(node: blocking.Node, topic: str) -> None:
    stdin = b'{"body": "good"}\n{"bodi": "x"}\n{"body": "after"}'
    done = cosmo("produce", topic, "--jsonl", namesrv=node.namesrv, stdin=stdin)
    assert done.returncode == 1
    assert b"line 2: unknown field 'bodi'" in done.stderr
    assert b"sent 1 message in" in done.stderr
    kept = cosmo("produce", topic, "--jsonl", "--keep-going", namesrv=node.namesrv, stdin=stdin)
    assert kept.returncode == 1
    assert b"sent 2 messages" in kept.stderr
    assert b"1 failed" in kept.stderr


def test_forms_filters_and_starts(node: blocking.Node, topic: str) -> None:
    stdin = b'{"body": "one", "tags": "a", "properties": {"n": "1"}, "queue_key": "q"}\n' + (
        b'{"body": "two", "tags": "b", "properties": {"n": "2"}, "queue_key": "q"}'
    )
    assert cosmo("produce", topic, "--jsonl", namesrv=node.namesrv, stdin=stdin).returncode == 0

    def consumed(*flags: str) -> bytes:
        done = cosmo("consume", topic, "--exit-at-end", *flags, namesrv=node.namesrv)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert sorted(consumed("-o", "raw").split()) == [b"one", b"two"]
    assert consumed("-o", "raw", "--tag", "a || c") == b"one\n"
    assert consumed("-o", "raw", "--sql", "n BETWEEN 2 AND 3") == b"two\n"
    assert [row["body"] for row in json.loads(consumed("-o", "json", "--tag", "b"))] == ["two"]
    assert json.loads(consumed("-o", "json", "--tag", "none")) == []
    assert consumed("-o", "raw", "--from", "end") == b""
    assert consumed("-o", "raw", "--from", "2001-01-01T00:00:00").count(b"\n") == 2
    assert consumed("-o", "raw", "--from", "2100-01-01") == b""
    assert consumed("-o", "raw", "--from", "99") == b""
    table = consumed("-o", "table").decode().splitlines()
    assert table[0].split() == ["TIME", "QUEUE", "OFFSET", "TAGS", "KEYS", "BODY"]
    assert len(table) == 3


def test_a_message_that_cannot_be_read_is_shown_as_it_is_stored(
    node: blocking.Node, topic: str
) -> None:
    send(node, topic, "good")
    rubbish = b"no compressed body"
    record = SendMessageV2(
        producer_group="p",
        topic=topic,
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=0,
        sys_flag=SYS_COMPRESSED,
        born_timestamp=1,
        flag=0,
        properties="",
        body=rubbish,
    )

    async def store() -> None:
        host, _, port = node.broker_address.rpartition(":")
        channel = Channel(host, int(port))
        await channel.call(record)
        await channel.close()

    asyncio.run(store())
    consumed = ("consume", topic, "--exit-at-end", "-q")
    (damaged,) = [
        row
        for row in rows(cosmo(*consumed, "-o", "jsonl", namesrv=node.namesrv))
        if "damage" in row
    ]
    assert base64.b64decode(str(damaged["body_base64"])) == rubbish
    assert str(damaged["damage"]).startswith("the compressed body is damaged")
    assert "stored_body" not in str(damaged["damage"])
    with pytest.raises(ConfigError, match="damage"):
        message_from_json(topic, json.dumps(damaged))
    assert b"(cannot be read)" in cosmo(*consumed, namesrv=node.namesrv).stdout
    raw = cosmo(*consumed, "-o", "raw", namesrv=node.namesrv)
    assert raw.stdout == b"good\n"
    assert raw.stderr.count(b"cannot be read") == 1 and topic.encode() in raw.stderr


def test_a_group_goes_on_where_it_was(node: blocking.Node, topic: str) -> None:
    send(node, topic, *"abcd")
    first = cosmo(
        "consume", topic, "--group", "cli_g", "--count", "3", "-o", "raw", namesrv=node.namesrv
    )
    assert first.returncode == 0, first.stderr
    rest = cosmo(
        "consume", topic, "--group", "cli_g", "--count", "1", "-o", "raw", namesrv=node.namesrv
    )
    assert rest.returncode == 0, rest.stderr
    assert sorted((first.stdout + rest.stdout).split()) == [b"a", b"b", b"c", b"d"]


def test_tail_shows_what_arrives_and_ends_with_ctrl_c(node: blocking.Node, topic: str) -> None:
    send(node, topic, "old")
    environment = dict(os.environ, COSMO_NAMESRV=node.namesrv)
    tail = subprocess.Popen(
        [sys.executable, "-m", "cosmodrome.cli", "tail", topic, "-o", "raw"],
        env=environment,
        stdout=subprocess.PIPE,
    )
    assert tail.stdout is not None
    try:
        deadline = time.monotonic() + 90
        os.set_blocking(tail.stdout.fileno(), False)
        seen = b""
        while b"new" not in seen and time.monotonic() < deadline:
            send(node, topic, "new")
            seen += tail.stdout.read() or b""
        assert b"new" in seen
        assert b"old" not in seen
        tail.send_signal(signal.SIGINT)
        assert tail.wait(60) == 130
    finally:
        tail.kill()
        tail.wait()
        tail.stdout.close()


def test_a_request_is_answered(node: blocking.Node, topic: str) -> None:
    send(node, topic, "makes the topic")
    with (
        blocking.Producer(node.namesrv, group="cli_answers") as producer,
        blocking.Consumer(node.namesrv, group="cli_service") as consumer,
    ):
        import threading

        def answer(message: blocking.ReceivedMessage) -> None:
            producer.reply(message, message.body[::-1])

        consumer.subscribe(topic, tags="ask", handler=answer)
        worker = threading.Thread(target=consumer.run)
        worker.start()
        try:
            done = cosmo("request", topic, "abc", "--tag", "ask", namesrv=node.namesrv)
            assert done.stdout == b"cba\n", done.stderr
            late = cosmo("request", topic, "x", "--timeout", "1", namesrv=node.namesrv)
            assert late.returncode == 1
            assert late.stderr.startswith(b"cosmo: ")
        finally:
            consumer.stop()
            worker.join(60)


def test_bench_measures(node: blocking.Node) -> None:
    done = cosmo("bench", "produce", "--msgs", "300", "-o", "json", namesrv=node.namesrv)
    row = rows(done)[0]
    assert (row["messages"], row["failed"]) == (300, 0)
    done = cosmo("bench", "produce", "--msgs", "300", "--batch", "32", namesrv=node.namesrv)
    assert b"msgs/s" in done.stdout, done.stderr
    done = cosmo("bench", "consume", "--msgs", "500", "-o", "json", namesrv=node.namesrv)
    assert rows(done)[0]["messages"] == 500
    done = cosmo(
        "bench", "e2e", "--msgs", "100", "--rate", "500", "-o", "json", namesrv=node.namesrv
    )
    row = rows(done)[0]
    assert row["messages"] == 100
    assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["max_ms"]  # type: ignore[operator]


def test_contexts_name_clusters(node: blocking.Node, topic: str, tmp_path: Path) -> None:
    assert cosmo("context", "add", "here", node.namesrv, home=tmp_path).returncode == 0
    assert cosmo("context", "add", "there", "127.0.0.1:1", home=tmp_path).returncode == 0
    assert cosmo("produce", topic, stdin=b"x", home=tmp_path).returncode == 0
    listed = cosmo("context", "list", home=tmp_path).stdout.decode().splitlines()
    assert [line[0] for line in listed] == [" ", "*", " "]
    assert cosmo("context", "use", "there", home=tmp_path).returncode == 0
    failed = cosmo("produce", topic, stdin=b"x", home=tmp_path)
    assert failed.returncode == 1
    assert b"127.0.0.1:1" in failed.stderr
    unknown = cosmo("context", "use", "nowhere", home=tmp_path)
    assert unknown.returncode == 4
    assert b"here, there" in unknown.stderr


def test_errors_say_what_to_do(node: blocking.Node, topic: str) -> None:
    for arguments, code, text in (
        (("consume", "Nope", "--count", "1"), 4, b"no broker has topic Nope"),
        (("consume", topic, "--from", "noon"), 1, b"--from 'noon'"),
        (("consume", topic, "-n", "nonsense"), 1, b"host:port"),
        (("produce", "bad topic"), 1, b"not allowed"),
        (("produce", topic, "--property", "x"), 1, b"NAME=VALUE"),
    ):
        done = cosmo(*arguments, namesrv=node.namesrv, stdin=b"x")
        assert done.returncode == code, arguments
        assert text in done.stderr, done.stderr
        assert b"Traceback" not in done.stderr
