"""Ordered consumption while members come and go."""

from __future__ import annotations

import itertools

from peers.clients import Client, Consumer
from tests.oracle.oracle_checks import Cluster, await_all, body


def check_order(members: tuple[Consumer, ...], orphans: set[int]) -> None:
    """New messages come in order over all members. Those of the killed member may come again,
    as far as it had not reported them, but a member never goes back."""
    lines = sorted(
        (line for one in members for line in one.messages), key=lambda line: int(line["at_ms"])
    )
    assert all(int(body(line)) % 4 == line["queue_id"] for line in lines)
    for queue_id in range(4):
        offsets = [int(line["queue_offset"]) for line in lines if line["queue_id"] == queue_id]
        assert list(dict.fromkeys(offsets)) == sorted(set(offsets))
        if queue_id not in orphans:
            assert len(offsets) == len(set(offsets)), "a message came twice"
        for one in members:
            mine = [line["queue_offset"] for line in one.messages if line["queue_id"] == queue_id]
            assert all(earlier < later for earlier, later in itertools.pairwise(mine))


def test_order_is_kept_when_members_join_and_die(
    java: Client, cluster: Cluster, topic: str, group: str
) -> None:
    """The queues of a killed member stay locked for a minute; then the others go on with them."""

    def member() -> Consumer:
        return Consumer(java, cluster.namesrv, topic, group, mode="orderly+poll=1000")

    def queues(*members: Consumer) -> list[int]:
        return sorted(queue for one in members for queue in one.assigned)

    with (
        member() as first,
        Consumer(
            java, cluster.namesrv, topic, f"p_{group}", verb="stream", mode="orderly+pace=30"
        ) as producer,
        member() as second,
    ):
        await_all(
            (first, second),
            lambda: len(first.assigned) == len(second.assigned) == 2 and len(second.messages) > 8,
            90,
            "share the queues",
        )
        with member() as third:
            trio = (first, second, third)
            await_all(
                trio,
                lambda: (
                    sorted(len(one.assigned) for one in trio) == [1, 1, 2]
                    and queues(*trio) == [0, 1, 2, 3]
                    and len(third.messages) > 8
                ),
                90,
                "share the queues with a third",
            )
            second.kill9()
            orphans = set(second.assigned)
            acknowledged = producer.close()
            everything = {(line["queue_id"], line["queue_offset"]) for line in acknowledged}

            def received() -> set[tuple[int, int]]:
                return {
                    (line["queue_id"], line["queue_offset"])
                    for one in trio
                    for line in one.messages
                }

            await_all((first, third), lambda: received() >= everything, 120, "take over")
            await_all(
                (first, third),
                lambda: queues(first, third) == [0, 1, 2, 3],
                60,
                "own all queues",
            )
    assert received() == everything
    assert orphans
    check_order(trio, orphans)
