"""The store is RocketMQ's: its broker serves what we wrote, we serve what it wrote.

Both brokers run in turn on one directory with the same file sizes, and the checker compares
what was sent, what the files say and what the broker at hand answers.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from peers.clients import Client, run
from peers.java import JavaCluster
from peers.node import CosmoNode
from peers.process import free_port
from tests.oracle.oracle_checks import body
from tests.oracle.store_checker import (
    CHECKPOINT_MARGIN_MS,
    GEOMETRY,
    HALF_TOPIC,
    OP_TOPIC,
    SCHEDULE_TOPIC,
    History,
    Record,
    check_files,
    read_checkpoint,
    read_log,
    wait_until,
)
from tests.oracle.store_loads import delay_offsets, pending, special_messages

ENDS = ("stop", "kill9")
Server = CosmoNode | JavaCluster


@pytest.fixture
def ports() -> tuple[int, int]:
    """Kept over all restarts: message ids name the broker's port."""
    return free_port(), free_port(-2, 1)


@pytest.fixture
def upstream(java: Client, ports: tuple[int, int], tmp_path: Path) -> JavaCluster:
    return JavaCluster(tmp_path, *ports, settings=GEOMETRY)


@pytest.fixture
def ours(upstream: JavaCluster, ports: tuple[int, int]) -> CosmoNode:
    settings = {
        **GEOMETRY,
        "brokerName": JavaCluster.broker_name,
        "flushIntervalConsumeQueue": "200",
        "flushConsumeQueueThoroughInterval": "1000",
        "flushConsumerOffsetInterval": "300",
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return CosmoNode(upstream.store, *ports, options=words)


def stop(server: Server) -> None:
    server.stop() if isinstance(server, CosmoNode) else server.broker.stop()
    server.kill9()  # a name server has nothing to lose, and takes its time to stop


def finish(server: Server, store: Path, history: History, how: str, label: str) -> None:
    """An orderly stop, or a kill while messages keep coming."""
    if how == "stop":
        stop(server)
        check_files(store, complete=True)
        assert not (store / "abort").exists()
        return
    wait_until(lambda: _offsets_saved(store, history), "progress is not on disk")
    senders = history.load(server.broker_port, label)
    time.sleep(0.4)
    server.kill9()
    for sender in senders:
        sender.join(10)
    check_files(store, complete=False)
    assert (store / "abort").exists()


def await_checkpoint(store: Path) -> None:
    """Until the checkpoint vouches for all that is in the store now."""
    last_ms = read_log(store)[-1].store_ms
    wait_until(lambda: min(read_checkpoint(store)) >= last_ms, "no checkpoint of the last record")


def _offsets_saved(store: Path, history: History) -> bool:
    file = store / "config" / "consumerOffset.json"
    text = file.read_text() if file.exists() else ""
    return all(
        f'"{topic}@{group}"' in text and f"{queue_id}:{offset}" in text
        for (group, topic, queue_id), offset in history.committed.items()
    )


@pytest.mark.parametrize("end", ENDS)
def test_upstream_serves_our_store(
    end: str, java: Client, ours: CosmoNode, upstream: JavaCluster
) -> None:
    history, store, port = History(), upstream.store, ours.broker_port
    with ours:
        history.fill(port, "first", 240)
        if end == "kill9":
            await_checkpoint(store)
            time.sleep(CHECKPOINT_MARGIN_MS / 1000 + 0.1)
            history.fill(port, "late")
            await_checkpoint(store)  # so it is later than the first messages by that margin
        history.check(port, store)
        finish(ours, store, history, end, "first")
    assert len(list((store / "commitlog").iterdir())) >= 5
    if end == "kill9":
        # Upstream trusts our checkpoint: it does not read the whole log again.
        assert history.excuse_keys(store) > 0
    else:
        # Queues built again from a log that has lost its beginning do not begin at 0.
        history.expire(store, files=2)
        with ours:
            history.check(port, store)
            finish(ours, store, history, end, "again")
    with upstream:
        history.check(port, store)
        pulled = run(java, ["pull", upstream.namesrv_address, "Orders", "g_pull", "*"])
        assert [
            body(line) for line in pulled if line["event"] == "message" and line["queue_id"] == 2
        ] == [r.body for r in read_log(store) if r.queue == ("Orders", 2)]
        # It goes on where we stopped.
        history.fill(port, "second")
        history.check(port, store)
        finish(upstream, store, history, "stop", "second")


@pytest.mark.parametrize("end", ENDS)
def test_we_serve_upstreams_store(end: str, ours: CosmoNode, upstream: JavaCluster) -> None:
    history, store, port = History(), upstream.store, ours.broker_port
    with upstream:
        history.fill(port, "first", 160)
        special_messages(port, store, history)
        history.check(port, store)
        finish(upstream, store, history, end, "first")
    before = read_log(store)
    delays = delay_offsets(store)
    with ours:
        after = history.check(port, store)
        assert after == before
        assert {r.topic for r in after} >= {
            *(SCHEDULE_TOPIC, HALF_TOPIC, OP_TOPIC, "%RETRY%g_first", "%DLQ%g_first"),
        }
        history.fill(port, "second")
        history.check(port, store)
        finish(ours, store, history, "stop", "second")
    assert delay_offsets(store) == delays


@pytest.mark.parametrize("ends", [("stop", "kill9"), ("kill9", "stop")], ids="-".join)
def test_round_trip(ends: tuple[str, str], ours: CosmoNode, upstream: JavaCluster) -> None:
    history, store, port = History(), upstream.store, ours.broker_port
    log: list[Record] = []
    servers: list[Server] = [upstream, ours, upstream, ours]
    for turn, server in enumerate(servers):
        end = ends[turn % 2]
        if server is upstream and (store / "abort").exists():
            history.excuse_keys(store)
        with server:
            served = history.check(port, store) if log else []
            assert served[: len(log)] == log
            history.fill(port, f"turn{turn}")
            if turn == 0:
                pending(port, history)
            log = history.check(port, store)
            finish(server, store, history, end, f"turn{turn}")
    with ours:
        assert history.check(port, store)[: len(log)] == log
