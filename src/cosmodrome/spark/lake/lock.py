"""One writer per lake: a file says who writes it and when that writer was last alive.

A holder on this machine whose process is gone, and any holder that has been silent for
`SILENT_MS`, has lost it. `beat` keeps it, and fails when somebody else has taken it, so a writer
that slept through its time notices before it writes. Files have no compare-and-set: whoever takes
the lock reads back what it wrote, which leaves a window of one rename between two starts.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cosmodrome.env.base import Env
from cosmodrome.errors import CosmodromeError, DirectoryInUse
from cosmodrome.spark.lake.files import LakeFiles

log = logging.getLogger(__name__)

SILENT_MS = 60_000
BEAT_MS = 5_000


class LakeLock:
    def __init__(self, files: LakeFiles, name: str, env: Env) -> None:
        self._files = files
        self._name = name
        self._env = env
        self._token = ""
        self._beaten_ms = 0

    def acquire(self, purpose: str) -> None:
        holder = self.holder()
        if holder is not None:
            raise DirectoryInUse(
                f"{self._files.root} is being written by {_describe(holder, self._env)};"
                " wait for it, stop it, or use another path"
            )
        self._token = f"{self._env.random.getrandbits(64):016x}"
        self._write(purpose)
        if self._read().get("token") != self._token:
            self._token = ""
            raise DirectoryInUse(f"{self._files.root}: another writer has just started; wait")

    @contextmanager
    def held(self, purpose: str) -> Iterator[None]:
        """Hold the lock for the time of a `with` statement."""
        self.acquire(purpose)
        try:
            yield
        finally:
            self.release()

    def beat(self) -> None:
        """Renew the lock when it is time; DirectoryInUse when it is no longer ours."""
        now_ms = self._env.clock.now_ms()
        if not self._token or now_ms - self._beaten_ms < BEAT_MS:
            return
        self.check()
        self._write(str(self._read().get("purpose", "")))

    def check(self) -> None:
        if self._token and self._read().get("token") != self._token:
            self._token = ""
            raise DirectoryInUse(
                f"{self._files.root}: another writer has taken over while this one was silent;"
                " nothing is lost, start again when it has ended"
            )

    def release(self) -> None:
        token, self._token = self._token, ""
        try:
            if token and self._read().get("token") == token:
                self._files.remove(self._name)
        except Exception as error:
            # With the JVM gone there is no file system; a dead process holds nothing anyway.
            log.warning("event=lake-lock-left path=%s reason=%s", self._files.root, error)

    def holder(self) -> dict[str, Any] | None:
        """Who holds it; None when it is free or its holder is dead."""
        found = self._read()
        if not found:
            return None
        if self._env.clock.now_ms() - int(found.get("beat_ms", 0)) > SILENT_MS:
            return None
        if found.get("host") == socket.gethostname() and not _alive(int(found.get("pid", 0))):
            return None
        return found

    def _read(self) -> dict[str, Any]:
        try:
            found = self._files.read_json(self._name)
        except CosmodromeError:
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self, purpose: str) -> None:
        self._beaten_ms = self._env.clock.now_ms()
        self._files.write_json(
            self._name,
            {
                "token": self._token,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "beat_ms": self._beaten_ms,
                "purpose": purpose,
            },
        )


def _alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _describe(holder: dict[str, Any], env: Env) -> str:
    silent_s = (env.clock.now_ms() - int(holder.get("beat_ms", 0))) / 1000
    return (
        f"{holder.get('purpose') or 'a job'} (process {holder.get('pid')} on"
        f" {holder.get('host')}, heard of {silent_s:.0f} s ago)"
    )
