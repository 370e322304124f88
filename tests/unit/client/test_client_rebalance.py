"""The strategies, against results of the Java client."""

from __future__ import annotations

import pytest

from cosmodrome.client.receive.rebalance import (
    Averagely,
    AveragelyByCircle,
    ByConfig,
    ByMachineRoom,
    ConsistentHash,
    MachineRoomNearby,
    Strategy,
)
from cosmodrome.client.values import MessageQueue
from cosmodrome.errors import ConfigError


def queues(count: int, broker: str = "broker-a") -> list[MessageQueue]:
    return [MessageQueue(topic="T", broker_name=broker, queue_id=number) for number in range(count)]


def shares(strategy: Strategy, count: int, members: int) -> list[list[int]]:
    names = [f"c{number}" for number in range(members)]
    return [
        [queue.queue_id for queue in strategy.share(name, names, queues(count))] for name in names
    ]


@pytest.mark.parametrize(
    ("strategy", "count", "members", "expected"),
    [
        (Averagely(), 8, 3, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (Averagely(), 10, 4, [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]),
        (Averagely(), 2, 3, [[0], [1], []]),
        (AveragelyByCircle(), 8, 3, [[0, 3, 6], [1, 4, 7], [2, 5]]),
        (AveragelyByCircle(), 10, 4, [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]),
        (ConsistentHash(), 8, 3, [[0, 1, 5, 6], [3, 4], [2, 7]]),
        (ConsistentHash(), 10, 4, [[0, 1, 5, 6], [4, 8], [2, 7], [3, 9]]),
        (ConsistentHash(), 4, 4, [[0, 1], [], [2], [3]]),
        (ConsistentHash(), 2, 3, [[0, 1], [], []]),
    ],
)
def test_shares_are_those_of_the_java_client(
    strategy: Strategy, count: int, members: int, expected: list[list[int]]
) -> None:
    assert shares(strategy, count, members) == expected


def test_a_machine_room_takes_its_own_queues_only() -> None:
    everything = queues(5, "room1@a") + queues(3, "room2@b")
    names = ["c0", "c1", "c2"]
    strategy = ByMachineRoom({"room1"})
    found = [[q.queue_id for q in strategy.share(name, names, everything)] for name in names]
    assert found == [[0, 3], [1, 4], [2]]
    with pytest.raises(ConfigError, match="at least one room"):
        ByMachineRoom(())


def test_a_fixed_list_ignores_the_group_but_not_the_topic() -> None:
    chosen = queues(2) + queues(1, "gone")
    assert ByConfig(chosen).share("c9", ["c0"], queues(4)) == queues(2)


def test_members_share_the_queues_of_their_room_and_orphans_are_shared_by_all() -> None:
    everything = queues(4, "east@a") + queues(2, "west@a") + queues(3, "moon@a")
    strategy = MachineRoomNearby(
        Averagely(),
        lambda queue: queue.broker_name.split("@")[0],
        lambda member: member.split("-")[0],
    )
    assert strategy.name == "MACHINE_ROOM_NEARBY-AVG"
    names = ["east-1", "east-2", "west-1"]
    found = {
        name: [(q.broker_name, q.queue_id) for q in strategy.share(name, names, everything)]
        for name in names
    }
    assert found == {
        "east-1": [("east@a", 0), ("east@a", 1), ("moon@a", 0)],
        "east-2": [("east@a", 2), ("east@a", 3), ("moon@a", 1)],
        "west-1": [("moon@a", 2), ("west@a", 0), ("west@a", 1)],
    }


@pytest.mark.parametrize(
    "strategy",
    [Averagely(), AveragelyByCircle(), ConsistentHash(), ByMachineRoom({"broker-a"})],
    ids=lambda strategy: strategy.name,
)
def test_a_stranger_gets_nothing(strategy: Strategy) -> None:
    assert strategy.share("stranger", ["c0", "c1"], queues(4)) == []
    assert strategy.share("c0", [], queues(4)) == []
    assert strategy.share("c0", ["c0"], []) == []


def test_names_are_ordered_as_java_orders_them() -> None:
    # A pair of surrogates sorts before U+FF21 by code units and behind it by code points.
    members = ["\U0001d400", "\uff21"]
    assert [q.queue_id for q in Averagely().share("\U0001d400", members, queues(2))] == [0]


def test_a_ring_needs_places() -> None:
    with pytest.raises(ConfigError, match="virtual_nodes"):
        ConsistentHash(0)
