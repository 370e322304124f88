"""A restarted cluster still has what it acknowledged, and the clients carry on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from peers.clients import Client, Consumer, run, send
from peers.raw import create_topic
from tests.oracle.oracle_checks import BOOKED_S, Cluster, check_arrived, letters


@pytest.mark.parametrize("end", ["stop", "kill9"])
def test_messages_and_progress_survive(
    end: str, java: Client, start_cluster: Callable[[Path], Cluster], tmp_path: Path
) -> None:
    cluster = start_cluster(tmp_path / "cluster")
    try:
        create_topic(cluster.namesrv_port, cluster.broker_port, "Kept", 4)
        before = letters(20, label="before")
        acknowledged = send(java, cluster.namesrv, "Kept", "p_kept", "sync", before)
        if end == "stop":
            with Consumer(java, cluster.namesrv, "Kept", "g_kept") as consumer:
                consumer.receive(len(before))
                consumer.listen(BOOKED_S)
            cluster.server.stop()
        else:
            cluster.server.kill9()
        cluster.server.start()

        pulled = run(java, ["pull", cluster.namesrv, "Kept", "g_pull", "*"])
        check_arrived(before, acknowledged, [line for line in pulled if line["event"] == "message"])
        (found,) = run(java, ["query-key", cluster.namesrv, "Kept", "key4"])
        assert found["msg_id"] == acknowledged[4]["msg_id"]

        after = letters(12, label="after")
        more = send(java, cluster.namesrv, "Kept", "p_kept", "sync", after)
        expected, answers = (
            (after, more) if end == "stop" else (before + after, acknowledged + more)
        )
        with Consumer(java, cluster.namesrv, "Kept", "g_kept") as consumer:
            consumer.receive(len(expected))
            received = consumer.listen(0.5)
        check_arrived(expected, answers, received)
    finally:
        cluster.server.stop()
