"""Runs `cosmo` in this process and reads what it printed, whatever the form."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import fcntl
import io
import json
import os
import pty
import re
import select
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from click.testing import CliRunner

from cosmodrome.cli.main import cosmo as program
from cosmodrome.cli.support.output import FORMATS as FORMATS
from cosmodrome.transport.channel import Channel
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import (
    RegisterBrokerBody,
    TopicConfig,
    TopicConfigSerializeWrapper,
)
from cosmodrome.wire.commands import RegisterBroker


class Done(NamedTuple):
    code: int
    out: str
    err: str


def cosmo(namesrv: str, *words: str, stdin: str | None = None) -> Done:
    """One command; an exception that is not an exit is raised here."""
    result = CliRunner().invoke(
        program, [*words], input=stdin, env={"COSMO_NAMESRV": namesrv, "COLUMNS": "100"}
    )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Done(result.exit_code, result.stdout, result.stderr)


def table(namesrv: str, *words: str) -> list[list[str]]:
    """The cells of a table that was printed without a problem."""
    done = cosmo(namesrv, *words)
    assert done.code == 0, done
    return [re.split(r" {2,}", line.strip()) for line in done.out.splitlines()]


def rows(namesrv: str, *words: str) -> Any:
    """The data of a command that ended well."""
    done = cosmo(namesrv, *words, "-o", "json")
    assert done.code == 0, done
    return json.loads(done.out)


def in_all_forms(namesrv: str, *words: str) -> list[dict[str, Any]]:
    """Run a command once in each form: all of them must say the same. The rows as JSON has them.

    Figures that move between two runs are not compared, only whether they are there.
    """
    printed = {}
    for form in FORMATS:
        done = cosmo(namesrv, *words, "-o", form)
        assert done.code == 0, (form, done)
        printed[form] = done.out
    document = json.loads(printed["json"])
    found: list[dict[str, Any]] = document if isinstance(document, list) else [document]
    assert found, "nothing to compare"
    names = list(found[0])
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in names), names
    lines = [json.loads(line) for line in printed["jsonl"].splitlines()]
    assert steady(lines) == steady(found)
    yaml = read_yaml(printed["yaml"])
    assert steady(yaml if isinstance(yaml, list) else [yaml]) == steady(found)
    from_csv = list(csv.DictReader(io.StringIO(printed["csv"])))
    assert [list(row) for row in from_csv] == [names] * len(found)
    for row, expected in zip(from_csv, found, strict=True):
        assert {name: row[name] for name in steady([expected])[0]} == {
            name: csv_cell(value) for name, value in steady([expected])[0].items()
        }
    for form in ("table", "wide"):
        assert len(printed[form].splitlines()) >= (1 + len(found) if len(found) > 1 else 2)
        assert printed[form].splitlines()[0].isupper()
    return found


def steady(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without what depends on the moment: rates, percentages, ages."""
    moving = re.compile(r"per_s|percent|p99|stack|runtime|value|today|_24h|lag|age_s|last_seen")
    return [
        {name: value for name, value in row.items() if not moving.search(name)} for row in found
    ]


def csv_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


def read_yaml(text: str) -> Any:
    """Block maps and lists of scalars: what `cosmo` writes, read without its help."""
    lines = [line for line in text.split("\n") if line]
    value, rest = _block(lines, 0)
    assert not rest, rest
    return value


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


_NESTED = re.compile(r'- |("(\\.|[^"\\])*"|[^"\s][^:]*):( |$)')


def _block(lines: list[str], depth: int) -> tuple[Any, list[str]]:
    first = lines[0].lstrip(" ")
    if first == "-" or first.startswith("- "):
        items = []
        while lines and _indent(lines[0]) == depth and lines[0].lstrip(" ").startswith("-"):
            content = lines[0].lstrip(" ")[2:]
            if _NESTED.match(content):
                lines = [" " * (depth + 2) + content, *lines[1:]]
                item, lines = _block(lines, depth + 2)
            else:
                item, lines = _scalar(content), lines[1:]
            items.append(item)
        return items, lines
    entry = re.compile(r'("(?:\\.|[^"\\])*"|[^":]+):(?: (.*))?')
    if not entry.fullmatch(first):
        return _scalar(first), lines[1:]
    members: dict[str, Any] = {}
    while lines and _indent(lines[0]) == depth:
        match = entry.fullmatch(lines[0].lstrip(" "))
        assert match, lines[0]
        key, content = _scalar(match.group(1)), match.group(2)
        lines = lines[1:]
        if content is None:
            members[str(key)], lines = _block(lines, _indent(lines[0]))
        else:
            members[str(key)] = _scalar(content)
    return members, lines


def _scalar(text: str) -> Any:
    if text.startswith('"'):
        text = re.sub(r"\\x(..)", r"\\u00\1", text)
        text = re.sub(r"\\U(........)", lambda found: chr(int(found.group(1), 16)), text)
        return json.loads(text, strict=False)
    if text in ("null", "true", "false", "[]", "{}"):
        return json.loads(text)
    if text in (".nan", ".inf", "-.inf"):
        return float(text.replace(".", ""))
    try:
        return json.loads(text)
    except ValueError:
        assert not re.match(r"[0-9.+-]", text), f"{text} may be read as a number"
        return text


@contextlib.contextmanager
def ghost(namesrv: str, name: str = "ghost", topics: tuple[str, ...] = ()) -> Iterator[str]:
    """A broker that is registered and does not answer; its address."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # not listening: connections are refused
        address = f"127.0.0.1:{held.getsockname()[1]}"
        host, _, port = namesrv.rpartition(":")
        table = {topic: TopicConfig(topic_name=topic, read_queue_nums=3) for topic in topics}
        wrapper = TopicConfigSerializeWrapper(topic_config_table=table)
        with asyncio.Runner() as runner:

            async def register() -> Channel:
                channel = Channel(host, int(port))
                await channel.call(
                    RegisterBroker(
                        broker_name=name,
                        broker_addr=address,
                        cluster_name="DefaultCluster",
                        ha_server_addr="127.0.0.1:1",
                        broker_id=0,
                        body=bodies.encode(
                            RegisterBrokerBody(topic_config_serialize_wrapper=wrapper)
                        ),
                    )
                )
                return channel

            channel = runner.run(register())
            try:
                yield address
            finally:
                runner.run(channel.close())


_ON_TERMINAL = """
import fcntl, runpy, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.argv[0] = "cosmo"
runpy.run_module("cosmodrome.cli", run_name="__main__")
"""


def on_terminal(
    namesrv: str, *words: str, wait_for: str, then: bytes, columns: int = 120, lines: int = 40
) -> tuple[int, str]:
    """Run a command on a terminal of its own; the exit code and what was on it.

    `then` is typed as soon as the terminal shows what the expression `wait_for` describes.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environment = {**os.environ, "COSMO_NAMESRV": namesrv, "TERM": "xterm"}
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-c", _ON_TERMINAL, *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    text = b""
    typed = False
    deadline = time.monotonic() + 90
    try:
        while time.monotonic() < deadline:
            if not select.select([ours], [], [], 5.0)[0]:
                if typed:  # a key between a question and the reading of its answer may be lost
                    os.write(ours, then)
                continue
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the terminal is gone with its last user
                break
            if not piece:
                break
            text += piece
            if not typed and re.search(wait_for, text.decode(errors="replace"), re.DOTALL):
                time.sleep(0.2)  # mostly saves the five seconds above
                os.write(ours, then)
                typed = True
        assert typed, text
        return process.wait(timeout=60), text.decode(errors="replace")
    finally:
        os.close(ours)
        if process.poll() is None:
            process.kill()
            process.wait()
