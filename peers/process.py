"""Child processes: started with a log file, awaited until ready, stopped or killed.

A child dies with its parent (Linux), so an interrupted test run leaves no servers behind.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

# Asks the kernel (prctl PR_SET_PDEATHSIG) to kill this process when its parent ends, then becomes
# the command. Code between fork and exec would not do: the tests have threads.
_GUARD = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
os.execvp(sys.argv[1], sys.argv[1:])
"""

_given: set[int] = set()  # ports, by this process


class NotReady(Exception):
    """The child ended or stayed silent; the text ends with the tail of its log."""


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """The same command, but it is killed when this process ends. Its pid is the child's pid."""
    return [sys.executable, "-I", "-S", "-c", _GUARD, *command]


class Process:
    """One server process. Its output is appended to `log`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self._command = list(command)
        self._env = {**os.environ, **(env or {})}
        self._cwd = cwd
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        if self._child is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        if self.running:
            return
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                dying_with_parent(self._command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                cwd=self._cwd,
            )

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Polls `ready`; raises NotReady when the child ends first or time runs out."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if not self.running:
                code = self._child.returncode if self._child else None
                raise NotReady(f"{self.name} ended with {code}\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise NotReady(f"{self.name} not ready after {timeout_s} s\n{self.log_tail()}")
            time.sleep(0.1)

    def stop(self, grace_s: float = 60) -> int | None:
        """SIGTERM, then SIGKILL after `grace_s`. Returns the exit code; safe to call twice."""
        if self._child is None:
            return None
        if self.running:
            self._child.terminate()
            try:
                self._child.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._child.kill()
        return self._child.wait()

    def kill9(self) -> None:
        """SIGKILL: what a crash looks like to the files left behind."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def log_tail(self, size_bytes: int = 4000) -> str:
        if not self.log.exists():
            return "(no log)"
        return self.log.read_bytes()[-size_bytes:].decode(errors="replace")


class Running(ABC):
    """What runs between start() and stop(), as a context."""

    @abstractmethod
    def start(self) -> None:
        """Returns when it can be used."""

    @abstractmethod
    def stop(self) -> object:
        """Ends it in an orderly way."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def free_port(*neighbours: int) -> int:
    """A port that is free now, and so are port + n for every neighbour n.

    A broker also takes its port - 2 (VIP) and + 1 (replication). Ports are taken below the
    ephemeral range, otherwise an outgoing connection may grab one before the server binds it. No
    port is given twice, and processes of one test run have ranges of their own: a server may bind
    its port much later.
    """
    first, count = _own_ports()
    for _ in range(1000):
        port = first + 16 + int.from_bytes(os.urandom(2)) % (count - 32)
        wanted = {port + n for n in (0, *neighbours)}
        if _given.isdisjoint(wanted) and all(map(_is_free, wanted)):
            _given.update(wanted)
            return port
    raise RuntimeError(f"no free port found between {first} and {first + count}")


def _own_ports() -> tuple[int, int]:
    """First and number of those that this process may give away."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    count = 15_000 // workers
    return 15_000 + count * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]), count


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def accepts(port: int) -> bool:
    """Whether something listens on this loopback port."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
