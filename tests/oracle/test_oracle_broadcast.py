"""Broadcasting: every member gets everything and keeps its own place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from peers.clients import CPP, GO, JAVA, NODE, Client, send
from peers.raw import committed_offset, max_offset
from peers.resolve import BUILD
from tests.oracle.oracle_checks import Cluster, body, check_arrived, consumers, letters, names

Ready = Callable[[Client], Client]

CLIENTS = (JAVA, GO, CPP, NODE)
LEVELS = 18


@pytest.mark.parametrize("client", CLIENTS, ids=names(CLIENTS))
def test_every_member_gets_everything_once(
    client: Client, ready: Ready, cluster: Cluster, topic: str, group: str
) -> None:
    ready(client)

    def member(number: int, mode: str) -> tuple[str, str]:
        return group, f"{mode}+broadcast+instance={group}_{number}"

    delayed = _delayed(cluster)
    members = (member(1, "failing:16:1"), member(2, "push"))
    with consumers(client, cluster, topic, *members) as (first, second):
        # The C++ client starts behind the last message, wherever that is when it has its queues.
        first.listen(5 if client is CPP else 0.5)
        sent = letters(24)
        acknowledged = send(client, cluster.namesrv, topic, f"p_{group}", "sync", sent)
        second.receive(len(sent))
        check_arrived(sent, acknowledged, second.listen(0.5))
        if client is CPP:
            # A C++ member skips some of what follows a failure in the same answer.
            bodies = [body(line) for line in first.listen(1)]
            assert len(bodies) == len(set(bodies)) > 0
        else:
            first.receive(len(sent))
            check_arrived(sent, acknowledged, first.listen(0.5))
    # What a member failed to process is not tried again, and the broker knows no progress.
    assert _delayed(cluster) == delayed
    assert max_offset(cluster.broker_port, f"%RETRY%{group}", 0) == 0
    for queue_id in range(4):
        assert committed_offset(cluster.broker_port, group, topic, queue_id) in (0, None)

    for number in (1, 2):
        assert _offsets(f"{group}_{number}", group).stat().st_size > 0
    later = letters(12, label="later")
    acknowledged = send(client, cluster.namesrv, topic, f"p_{group}", "sync", later)
    # In the Go client a message that was dropped still holds up the place of its member.
    members = (member(2, "push"), *((member(1, "push"),) if client not in (GO, CPP) else ()))
    with consumers(client, cluster, topic, *members) as again:
        for consumer in again:
            consumer.receive(len(later))
            check_arrived(later, acknowledged, consumer.listen(0.5))


def _delayed(cluster: Cluster) -> int:
    """How many messages were ever put off, retries among them."""
    return sum(
        max_offset(cluster.broker_port, "SCHEDULE_TOPIC_XXXX", level) for level in range(LEVELS)
    )


def _offsets(instance: str, group: str) -> Path:
    """The file in which a member keeps its place; each client has its own folder for it."""
    files = (BUILD / "home").glob(".rocketmq*/*/*/offset*son")
    (file,) = [
        file
        for file in files
        if file.match(f"*{instance}*/{group}/*") or file.match(f"{group}/*{instance}*/*")
    ]
    return file
