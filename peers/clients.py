"""The client drivers: one program per language, one interface.

    send    NAMESRV TOPIC GROUP MODE                         messages on standard input
    consume NAMESRV TOPIC GROUP EXPRESSION MODE PROPERTIES   until end of input

Input is one JSON object per line with body (base64), tags, keys, properties, delay (a level) and
shard (orderly mode: the queue is shard modulo the number of queues). Output is one JSON object
per line: `sent` (or `failed`) per message; `started`, `message`, `stopped` and, from Java,
`assigned`. A consumer that sees the end of its input shuts its client down, which commits
offsets, and exits. In the mode `failing:MAX:LEVEL` it processes nothing: each message comes again
at most MAX times, after the delay of LEVEL (0: the broker chooses).

A mode may carry options, `MODE+NAME+NAME=VALUE`: broadcast; from=first, from=last or
from=YYYYMMDDhhmmss (where a new group starts; first unless said); instance=NAME; namespace=NAME.
Not every client has every one; what only one has is said in its driver.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from peers import java
from peers.process import dying_with_parent
from peers.resolve import BUILD, SOURCES, make_once, require, run_with_tries

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Letter:
    """A message to be sent."""

    body: bytes
    tags: str | None = None
    keys: str | None = None
    properties: dict[str, str] = field(default_factory=dict)
    shard: int | None = None
    delay: int | None = None  # level

    def line(self) -> str:
        return json.dumps(
            {
                "body": base64.b64encode(self.body).decode(),
                "tags": self.tags,
                "keys": self.keys,
                "properties": self.properties,
                "shard": self.shard,
                "delay": self.delay,
            }
        )


@dataclass(frozen=True, slots=True)
class Client:
    """One client library: how its driver is started and what it can do."""

    name: str
    command: Callable[[], list[str]]  # resolves and builds on first use
    send_modes: frozenset[str]
    consume_modes: frozenset[str]
    zero_bytes: bool = True  # whether its binding can return a body with a zero byte
    creates_topics: bool = True  # whether a send to an unknown topic makes it


class Failed(Exception):
    """A driver ended badly or stayed silent; the text ends with what it said."""


def send(
    client: Client,
    namesrv: str,
    topic: str,
    group: str,
    mode: str,
    letters: Sequence[Letter],
    timeout_s: float = 60,
) -> list[Line]:
    """Sends all letters; returns their `sent` lines in the order of the letters."""
    lines = run(
        client,
        ["send", namesrv, topic, group, mode],
        "".join(f"{letter.line()}\n" for letter in letters),
        timeout_s,
    )
    failed = [line for line in lines if line["event"] != "sent"]
    if failed or len(lines) != len(letters):
        raise Failed(f"{client.name}: {len(lines)} answers to {len(letters)} sends: {failed}")
    return sorted(lines, key=lambda line: int(line["index"]))


def run(client: Client, words: Sequence[str], text: str = "", timeout_s: float = 60) -> list[Line]:
    """Runs a driver to its end; returns what it printed."""
    done = subprocess.run(
        [*client.command(), *words],
        input=text.encode(),
        capture_output=True,
        env=_environment(),
        cwd=BUILD,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode != 0:
        raise Failed(
            f"{client.name} {words[0]} ended with {done.returncode}\n"
            f"{done.stderr[-4000:].decode(errors='replace')}"
        )
    return [json.loads(line) for line in done.stdout.splitlines()]


class Consumer:
    """A running consumer driver; collects what it prints until it is closed."""

    def __init__(
        self,
        client: Client,
        namesrv: str,
        topic: str,
        group: str,
        *,
        expression: str = "*",
        mode: str = "push",
        verb: str = "consume",
        properties: Iterable[str] = (),
        await_start: bool = True,
    ) -> None:
        self.messages: list[Line] = []
        self.assigned: list[int] = []
        self.places: list[str] = []  # the same as broker/queue
        self._seen: tuple[str, ...] = ()
        self._name = client.name
        self._events: queue.Queue[Line | None] = queue.Queue()
        self._errors: list[bytes] = []
        words = [verb, namesrv, topic, group, expression, mode, ",".join(properties)]
        self._child = subprocess.Popen(
            dying_with_parent([*client.command(), *words]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(),
            cwd=BUILD,
        )
        self._threads = [
            threading.Thread(target=self._read_output, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        if await_start:
            self.await_start()

    def await_start(self) -> None:
        """Returns when the client runs; for callers that start several at once."""
        try:
            self.wait(lambda: "started" in self._seen, 90, "start")
        except BaseException:
            self.kill9()
            raise

    def receive(self, count: int, timeout_s: float = 90) -> list[Line]:
        """Waits for `count` messages in all; returns all that came.

        A Java consumer whose first balancing came too early tries again every 20 s, so on a
        busy machine even upstream's own broker may serve it only at the second or third try.
        """
        self.wait(lambda: len(self.messages) >= count, timeout_s, f"receive {count} messages")
        return list(self.messages)

    def listen(self, duration_s: float) -> list[Line]:
        """Collects for a while; to see that nothing more comes."""
        deadline = time.monotonic() + duration_s
        while (left_s := deadline - time.monotonic()) > 0:
            self._take(left_s)
        return list(self.messages)

    def wait(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._take(left_s):
                raise Failed(
                    f"{self._name} did not {what} within {timeout_s} s; events {self._seen}, "
                    f"{len(self.messages)} messages, exit {self._child.poll()}\n"
                    f"{b''.join(self._errors)[-4000:].decode(errors='replace')}"
                )

    def close(self, timeout_s: float = 40) -> list[Line]:
        """Ends the input, waits for an orderly shutdown; returns all messages."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            code = self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
            raise Failed(f"{self._name} did not end within {timeout_s} s") from None
        finally:
            self._finish()
        if code != 0:
            tail = b"".join(self._errors)[-4000:].decode(errors="replace")
            raise Failed(f"{self._name} consumer ended with {code}\n{tail}")
        return self.messages

    def kill9(self) -> None:
        """The consumer disappears without a word."""
        self._child.kill()
        self._child.wait()
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._finish()

    def pause(self) -> None:
        """Its connections stay open, nothing is read."""
        os.kill(self._child.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._child.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._child.poll() is not None and not self._threads:
            return
        if kind is None:
            self.close()
        else:
            self.kill9()

    def _finish(self) -> None:
        for thread in self._threads:
            thread.join(5)
        self._threads = []
        while self._take(0):
            continue
        for pipe in (self._child.stdout, self._child.stderr):
            if pipe is not None:
                pipe.close()

    def _take(self, timeout_s: float) -> bool:
        try:
            line = self._events.get(timeout=timeout_s) if timeout_s else self._events.get_nowait()
        except queue.Empty:
            return False
        if line is None:
            return False
        self._seen = (*self._seen[-8:], line["event"])
        self._note(line)
        return True

    def _note(self, line: Line) -> None:
        if line["event"] == "message":
            self.messages.append(line)
        elif line["event"] == "assigned":
            self.assigned = line["queues"]
            self.places = line["places"]

    def _read_output(self) -> None:
        assert self._child.stdout is not None
        for text in self._child.stdout:
            self._events.put(json.loads(text))
        self._events.put(None)

    def _read_errors(self) -> None:
        assert self._child.stderr is not None
        for text in self._child.stderr:
            self._errors.append(text)
            del self._errors[:-200]


def _environment() -> dict[str, str]:
    # The libraries write logs and offset files below the home folder.
    home = BUILD / "home"
    home.mkdir(parents=True, exist_ok=True)
    return {
        **os.environ,
        "HOME": str(home),
        "ROCKETMQ_GO_LOG_LEVEL": "error",
    }


def _java_command(header: str, *options: str) -> Callable[[], list[str]]:
    def command() -> list[str]:
        path = os.pathsep.join([str(java.driver_classes()), java.class_path("client")])
        return [
            *java.java_command("-Xmx256m", f"-Duser.home={BUILD / 'home'}", header=header),
            "-Drocketmq.client.logUseSlf4j=false",
            *options,
            "-cp",
            path,
            "cosmodrome.peers.Driver",
        ]

    return command


def _go_command() -> list[str]:
    folder = SOURCES / "go"
    product = BUILD / "go-driver"

    def make() -> None:
        require("go")
        run_with_tries(
            ["go", "build", "-modcacherw", "-o", str(product), "."],
            cwd=folder,
            env={"GOMODCACHE": str(BUILD / "gomod"), "CGO_ENABLED": "0"},
        )

    files = [folder / "go.mod", folder / "go.sum", *sorted(folder.glob("*.go"))]
    return [str(make_once("go-driver", files, product, make))]


def _node_command() -> list[str]:
    require("node")
    source = SOURCES / "nodejs"
    folder = BUILD / "nodejs"
    names = ("package.json", "package-lock.json", ".npmrc", "driver.js")

    def make() -> None:
        require("npm")
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copyfile(source / name, folder / name)
        run_with_tries(["npm", "ci", "--ignore-scripts"], cwd=folder)

    files = [source / name for name in names]
    make_once("nodejs", files, folder / "node_modules" / "ali-ons" / "package.json", make)
    return ["node", str(folder / "driver.js")]


def _cpp_command() -> list[str]:
    locked = SOURCES / "cpp-requirements.txt"
    folder = BUILD / "cpp-venv"
    python = folder / "bin" / "python"

    def make() -> None:
        venv.create(folder, clear=True, with_pip=True)
        run_with_tries(
            [
                *(str(python), "-m", "pip", "install", "--require-hashes", "--only-binary=:all:"),
                *("--no-deps", "--disable-pip-version-check", "-r", str(locked)),
            ],
            cwd=BUILD,
        )

    made = folder / "made"

    def make_and_mark() -> None:
        make()
        made.touch()

    make_once("cpp-venv", [locked, sys.version], made, make_and_mark)
    return [str(python), str(SOURCES / "cpp_client.py")]


_ALL_SENDS = frozenset({"sync", "async", "oneway", "batch", "orderly"})
_ALL_CONSUMES = frozenset({"push", "orderly"})

JAVA = Client("java", _java_command("JSON"), _ALL_SENDS, _ALL_CONSUMES)
JAVA_BINARY = Client("java-binary", _java_command("ROCKETMQ"), _ALL_SENDS, _ALL_CONSUMES)
# Looks for routes, brokers and queues each second instead of twice a minute.
JAVA_HURRIED = Client(
    "java",
    _java_command("JSON", "-Drocketmq.client.rebalance.waitInterval=1000", "-Dpeers.pollMs=1000"),
    _ALL_SENDS,
    _ALL_CONSUMES,
)
GO = Client("go", _go_command, _ALL_SENDS, _ALL_CONSUMES)
# The wheel's batches are marked in a way that upstream's broker does not take for a batch (it
# stores one message whose body is the encoded batch), so that mode is left out.
CPP = Client("cpp", _cpp_command, _ALL_SENDS - {"batch"}, _ALL_CONSUMES, zero_bytes=False)
NODE = Client(
    "node", _node_command, frozenset({"sync", "async"}), frozenset({"push"}), creates_topics=False
)

ALL = (JAVA, JAVA_BINARY, GO, CPP, NODE)
