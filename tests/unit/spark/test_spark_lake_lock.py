"""One writer per lake."""

from __future__ import annotations

import dataclasses
import os
import socket
from typing import Any

import pytest

from cosmodrome.env.real import real_env
from cosmodrome.errors import DirectoryInUse, StoreCorrupt
from cosmodrome.spark.lake.lock import BEAT_MS, SILENT_MS, LakeLock


class Files:
    root = "lake"

    def __init__(self) -> None:
        self.content: dict[str, Any] = {}
        self.stolen = False

    def read_json(self, name: str) -> Any:
        found = self.content.get(name)
        if found == "damaged":
            raise StoreCorrupt("damaged")
        return found

    def write_json(self, name: str, document: dict[str, Any]) -> None:
        self.content[name] = {**document, "token": "other"} if self.stolen else document

    def remove(self, name: str) -> None:
        self.content.pop(name, None)


class Clock:
    now = 1_000_000

    def now_ms(self) -> int:
        return self.now


def lock(files: Files, clock: Clock) -> LakeLock:
    fake_files: Any = files
    return LakeLock(fake_files, "lock", dataclasses.replace(real_env(), clock=clock))


def test_the_second_is_refused_until_the_first_lets_go() -> None:
    files, clock = Files(), Clock()
    first, second = lock(files, clock), lock(files, clock)
    first.acquire("the first")
    clock.now += 3_000
    with pytest.raises(DirectoryInUse, match=rf"the first \(process {os.getpid()} .* 3 s ago"):
        second.acquire("the second")
    first.release()
    second.acquire("the second")
    first.release()  # not its own any more
    assert second.holder() is not None
    second.check()


def test_a_dead_holder_loses_it() -> None:
    files, clock = Files(), Clock()
    lock(files, clock).acquire("old")
    files.content["lock"]["pid"] = 2**22 + 1  # no such process
    lock(files, clock).acquire("new")
    files.content["lock"]["host"] = socket.gethostname() + "-far"
    files.content["lock"]["pid"] = 2**22 + 1
    with pytest.raises(DirectoryInUse):
        lock(files, clock).acquire("newer")
    clock.now += SILENT_MS + 1
    lock(files, clock).acquire("newest")
    files.content["lock"]["pid"] = 1  # another user's process is alive too
    with pytest.raises(DirectoryInUse):
        lock(files, clock).acquire("never")
    files.content["lock"]["pid"] = 0
    lock(files, clock).acquire("again")
    files.content["lock"] = "damaged"
    assert lock(files, clock).holder() is None


def test_a_writer_that_slept_notices() -> None:
    files, clock = Files(), Clock()
    first, second = lock(files, clock), lock(files, clock)
    first.acquire("first")
    clock.now += BEAT_MS
    first.beat()
    assert files.content["lock"]["beat_ms"] == clock.now
    assert files.content["lock"]["purpose"] == "first"
    clock.now += SILENT_MS + 1
    second.acquire("second")
    with pytest.raises(DirectoryInUse, match="taken over"):
        first.beat()
    first.beat()  # it has none any more
    assert files.content["lock"]["purpose"] == "second"


def test_two_that_start_at_once() -> None:
    files = Files()
    files.stolen = True
    with pytest.raises(DirectoryInUse, match="just started"):
        lock(files, Clock()).acquire("late")
