"""What the tests of a pair share: its settings, a mixed load, the comparison of both halves."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from peers.pair import JAVA, OURS, Pair
from peers.raw import CallFailed, call
from tests.oracle.store_checker import GEOMETRY, History, Sent, read_log, send
from tests.oracle.store_loads import (
    COMMIT,
    ROLLBACK,
    delay_offsets,
    delayed,
    special_messages,
    transaction,
)

FILE_BYTES = 2 << 20  # has room for the largest body, and is soon full
SIZES = (1, 300, 5_000, 32_768, 200_000, 1 << 20)
LARGE_EVERY = 4  # rounds of a load that lasts, so that it can still be read at once
OK, SLAVE_TIMEOUT, NO_SLAVE = 0, 12, 11
SLAVE_TIMEOUT_S = 1.5
STORED = frozenset({OK, 10, NO_SLAVE, SLAVE_TIMEOUT})

SETTINGS = {
    **GEOMETRY,
    "mappedFileSizeCommitLog": str(FILE_BYTES),
    # Upstream's halves notice each other after a second and silence after five.
    "haSendHeartbeatInterval": "1000",
    "haHousekeepingInterval": "5000",
    "slaveTimeout": str(int(1000 * SLAVE_TIMEOUT_S)),
}
# A busy machine is no reason to refuse a send.
JAVA_SETTINGS = {"brokerFastFailureEnable": "false", "osPageCacheBusyTimeOutMills": "10000"}


def our_kind() -> str:
    """What the broker under test is: ORACLE_TARGET=java tries the tests on upstream's pair."""
    return JAVA if os.environ.get("ORACLE_TARGET") == "java" else OURS


def make_pair(
    folder: Path, master: str, slave: str, settings: Mapping[str, str] | None = None
) -> Pair:
    """A SYNC_MASTER and its slave, not started."""
    return Pair(
        folder,
        master=master,
        slave=slave,
        settings={**SETTINGS, **(settings or {})},
        master_settings=JAVA_SETTINGS if master == JAVA else None,
        slave_settings=JAVA_SETTINGS if slave == JAVA else None,
    )


def new_history() -> History:
    return History(statuses=STORED, log_file_bytes=FILE_BYTES)


def sized(history: History, port: int) -> None:
    """Messages of one byte to a mebibyte, none like another; there are 256 of one byte."""
    used = {sent.body for sent in (*history.acknowledged, *history.unanswered)}
    singles = (body for body in map(bytes, zip(range(256), strict=True)) if body not in used)
    for number, size in enumerate(SIZES):
        sent = history.letter("Orders", number % 3, label="sized")
        sent.sys_flag = 0
        content = random.Random(sent.properties["UNIQ_KEY"]).randbytes(max(size, 9))
        sent.body = next(singles, content) if size == 1 else content
        history.send(port, sent)


def mixed(history: History, pair: Pair, label: str) -> None:
    """Topics, batches, groups and offsets; with the label `first` also what is moved about."""
    master = pair.master
    history.fill(master.port, label)
    for _ in range(3):
        sized(history, master.port)
    if label == "first":
        special_messages(master.port, master.store, history)


def lasting(history: History, pair: Pair, seconds: float) -> int:
    """Mixed load for so long, with messages that wait and transactions; returns the rounds."""
    port = pair.master.port
    mixed(history, pair, "first")
    deadline = time.monotonic() + seconds
    rounds = 0
    while time.monotonic() < deadline:
        rounds += 1
        history.fill(port, f"round{rounds}")
        if rounds % LARGE_EVERY == 1:
            sized(history, port)
        delayed(port, history)
        for decision in (COMMIT, ROLLBACK):
            transaction(port, history, decision)
    wanted = {sent.body for sent in history.delivered}

    def delivered() -> None:
        log = read_log(pair.master.store, FILE_BYTES)
        assert wanted <= {record.body for record in log if record.topic in history.topics}

    came(delivered, 60)
    return rounds


def status(port: int) -> tuple[int, float]:
    """What one more send is answered, and after how many seconds."""
    sent = Sent("Probe", 0, os.urandom(12).hex().encode(), {"WAIT": "true"})
    began = time.monotonic()
    send(port, sent, STORED)
    return sent.status, time.monotonic() - began


def await_status(pair: Pair, wanted: int, timeout_s: float = 40) -> float:
    """Sends until one is answered so; returns the seconds until then."""
    began = time.monotonic()
    pair.wait(lambda: status(pair.master.port)[0] == wanted, timeout_s)
    return time.monotonic() - began


def check_same(pair: Pair, start: int = 0) -> int:
    """The slave has the whole log of its quiet master, byte for byte; returns its end."""
    master, slave = pair.brokers
    pair.wait(lambda: slave.end >= master.end, 60)
    end = master.end
    assert slave.end == end
    files = {int(file.name): file for file in (slave.store / "commitlog").iterdir()}
    assert min(files) == start
    for base in range(start, end, FILE_BYTES):
        size = min(FILE_BYTES, end - base)
        theirs = (master.store / "commitlog" / f"{base:020d}").read_bytes()[:size]
        differ = first_difference(files[base].read_bytes()[:size], theirs)
        assert differ is None, f"the logs differ at {base + (differ or 0)} of {end}"
    return end


def first_difference(one: bytes, other: bytes) -> int | None:
    """Where they differ first; None when they do not."""
    if one == other:
        return None
    pairs = zip(one, other, strict=False)
    shorter = min(len(one), len(other))
    return next((at for at, (a, b) in enumerate(pairs) if a != b), shorter)


def check_tables(history: History, pair: Pair) -> None:
    """Topics, groups, offsets and delay progress of the master reach the slave."""
    came(lambda: history.check_tables(pair.slave.port), 30)

    def delays() -> None:
        said = dict(re.findall(rb"(\d+)\s*:\s*(\d+)", call(pair.master.port, 45)[3]))
        wanted = {level.decode(): offset.decode() for level, offset in said.items()}
        assert delay_offsets(pair.slave.store) == wanted

    came(delays, 30)


def came(check: Callable[[], object], timeout_s: float) -> None:
    """Checks until it holds; what it lacked last is raised when time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            check()
        except (AssertionError, CallFailed, KeyError, OSError, ValueError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return
