"""Upstream's admin tool, many commands in one JVM.

    with AdminTool(namesrv_address, tmp_path) as tool:
        print(tool("topicRoute", "-t", "orders"))

The commands are upstream's, unmodified; `peers/java/src/cosmodrome/peers/AdminTool.java` calls them
one after the other. `peers.java.mqadmin` runs a single command in a JVM of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from peers.java import class_path, driver_classes, java_command, write_home
from peers.process import dying_with_parent

_SPARE_S = 30.0  # beyond a command's own time, before the JVM counts as hanging

# What commands print when they go wrong: a stack trace, or the words of a failed command.
_TROUBLE = re.compile(r"^\s+at [\w.$]+\(|Exception: |command (?:execute )?failed", re.MULTILINE)


class CommandFailed(Exception):
    """The command printed an error; the text is everything that it printed."""


class AdminTool:
    """`tool(command, *flags)` is what the command printed.

    A command that fails raises CommandFailed, unless `fails=True`: then it must. One that never
    ends is stopped when what it printed matches `until`.
    """

    def __init__(self, namesrv_address: str, home: Path) -> None:
        write_home(home)
        self._home = home
        self._namesrv = namesrv_address
        self._child: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def __call__(
        self, *words: str, until: str | None = None, fails: bool = False, timeout_s: float = 120
    ) -> str:
        child = self._running()
        assert child.stdin is not None
        ask = {"words": words, "until": until, "timeout_ms": int(timeout_s * 1000)}
        child.stdin.write(json.dumps(ask) + "\n")
        child.stdin.flush()
        try:
            line = self._answers.get(timeout=timeout_s + _SPARE_S)
        except queue.Empty:
            line = None
        if line is None:
            self.stop()
            raise CommandFailed(f"{words}: the tool ended itself (wrong flags), or hangs")
        answer = json.loads(line)
        printed: str = answer["printed"]
        if not answer["ended"] and (until is None or not re.search(until, printed)):
            self.stop()
            raise CommandFailed(f"{words} did not end in {timeout_s} s: {printed}")
        if answer["ended"] and bool(_TROUBLE.search(printed)) != fails:
            raise CommandFailed(f"{words} printed: {printed}")
        return printed

    def until(self, wanted: Callable[[str], object], *words: str, deadline_s: float = 120) -> str:
        """Repeats a command until what it prints is as wanted; the last text is in the error."""
        end = time.monotonic() + deadline_s
        while True:
            try:
                printed = self(*words)
            except CommandFailed as failure:
                printed = str(failure)
            else:
                if wanted(printed):
                    return printed
            if time.monotonic() > end:
                raise CommandFailed(f"{words}: not as expected in {deadline_s} s: {printed}")
            time.sleep(0.3)

    def stop(self) -> None:
        child, self._child = self._child, None
        reader, self._reader = self._reader, None
        if child is not None and reader is not None:
            child.kill()
            child.wait()
            reader.join()
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()

    def __enter__(self) -> AdminTool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _running(self) -> subprocess.Popen[str]:
        if self._child is None:
            self._answers = queue.SimpleQueue()
            self._child = start_tool(self._namesrv, self._home, "cosmodrome.peers.AdminTool")
            self._reader = threading.Thread(
                target=_read, args=(self._child, self._answers), daemon=True
            )
            self._reader.start()
        return self._child


def start_tool(namesrv_address: str, home: Path, main: str, *words: str) -> subprocess.Popen[str]:
    """A JVM with the tool's classes; everything that it writes goes below `home`."""
    write_home(home)
    libraries = os.pathsep.join((str(driver_classes()), class_path("client")))
    command = [
        *java_command(f"-Drocketmq.home.dir={home}", f"-Duser.home={home}", "-Xmx256m"),
        *(f"-Drocketmq.namesrv.addr={namesrv_address}", "-cp", libraries, main, *words),
    ]
    with (home / "errors.log").open("ab") as errors:
        return subprocess.Popen(
            dying_with_parent(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=home,
            text=True,
            env={**os.environ, "ROCKETMQ_HOME": str(home)},
        )


def _read(child: subprocess.Popen[str], answers: queue.SimpleQueue[str | None]) -> None:
    assert child.stdout is not None
    with child.stdout as lines:
        for line in lines:
            answers.put(line)
    answers.put(None)
