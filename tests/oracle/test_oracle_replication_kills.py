"""Either half of a mixed pair is killed again and again under load; the logs stay the same.

`make oracle-replication` runs it: REPLICATION_SECONDS for each direction, a kill every
REPLICATION_KILL_S. `make oracle` does not: there each half is killed once, elsewhere.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from peers.clients import Client
from peers.pair import JAVA, Pair
from peers.raw import CallFailed
from tests.oracle.replication_kit import (
    FILE_BYTES,
    OK,
    await_status,
    check_same,
    check_tables,
    make_pair,
    mixed,
    new_history,
    our_kind,
    sized,
)
from tests.oracle.store_checker import History, read_log

SECONDS = float(os.environ.get("REPLICATION_SECONDS", "0"))
KILL_EVERY_S = float(os.environ.get("REPLICATION_KILL_S", "30"))
DOWN_S = 1.0
LINK_S = 60.0
SENDERS, PAUSE_S = 3, 0.01
SIZED_EVERY = 200  # messages of one sender


@contextmanager
def load(history: History, pair: Pair) -> Iterator[None]:
    """Senders that go on, whatever happens to the master."""
    over = threading.Event()

    def run(queue_id: int) -> None:
        number = 0
        while not over.wait(PAUSE_S):
            number += 1
            try:
                if number % SIZED_EVERY == 0 and queue_id == 0:
                    sized(history, pair.master.port)
                else:
                    history.send(pair.master.port, history.letter("Orders", queue_id))
            except (OSError, ValueError, CallFailed):
                over.wait(0.1)

    senders = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(SENDERS)]
    for sender in senders:
        sender.start()
    try:
        yield
    finally:
        over.set()
        for sender in senders:
            sender.join(20)


def kill_by_turns(pair: Pair) -> dict[str, list[float]]:
    """Returns how long each half took from its start until sends were OK again."""
    took: dict[str, list[float]] = {"master": [], "slave": []}
    due = time.monotonic() + KILL_EVERY_S
    deadline = due + SECONDS
    while due < deadline:
        time.sleep(max(0.0, due - time.monotonic()))
        due = max(due, time.monotonic()) + KILL_EVERY_S
        name = "master" if len(took["slave"]) > len(took["master"]) else "slave"
        broker = pair.master if name == "master" else pair.slave
        broker.kill9()
        time.sleep(DOWN_S)
        began = time.monotonic()
        broker.start()
        await_status(pair, OK, LINK_S)
        took[name].append(round(time.monotonic() - began, 1))
    return took


@pytest.mark.skipif(not SECONDS, reason="the long form is `make oracle-replication`")
@pytest.mark.timeout(900 + 2 * SECONDS)
@pytest.mark.parametrize("direction", ["ours-first", "upstream-first"])
def test_either_half_is_killed(
    direction: str,
    java: Client,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    kinds = (our_kind(), JAVA) if direction == "ours-first" else (JAVA, our_kind())
    history = new_history()
    with make_pair(tmp_path, *kinds) as pair:
        await_status(pair, OK)
        mixed(history, pair, "first")
        with load(history, pair):
            took = kill_by_turns(pair)
        await_status(pair, OK)
        end = check_same(pair)
        check_tables(history, pair)
        history.check_log(read_log(pair.slave.store, FILE_BYTES))
    report = {
        "direction": direction,
        "kills": {name: len(times) for name, times in took.items()},
        "ok_again_s": {name: [min(times), max(times)] for name, times in took.items() if times},
        "statuses": dict(Counter(sent.status for sent in history.acknowledged)),
        "unanswered": len(history.unanswered),
        "log_bytes": end,
    }
    record_property("replication", json.dumps(report))
    print(json.dumps(report))
