"""Shares of queues: complete, disjoint, and the same for everybody who computes them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmodrome.client.receive.rebalance import (
    Averagely,
    AveragelyByCircle,
    ByMachineRoom,
    ConsistentHash,
    MachineRoomNearby,
    Strategy,
)
from cosmodrome.client.values import MessageQueue

NEARBY = MachineRoomNearby(
    Averagely(), lambda queue: queue.broker_name.partition("@")[0], lambda name: name[:1]
)
EVERY = [
    Averagely(),
    AveragelyByCircle(),
    ConsistentHash(),
    ConsistentHash(1),
    ByMachineRoom({"a", "b", "c"}),
    NEARBY,
]

members = st.lists(
    st.builds(str.__add__, st.sampled_from("abx"), st.text("0123456789@#.é", max_size=6)),
    min_size=1,
    max_size=12,
    unique=True,
)
queue = st.builds(
    MessageQueue,
    topic=st.just("T"),
    broker_name=st.sampled_from(["a@1", "b@1", "b@2", "c@1"]),
    queue_id=st.integers(0, 40),
)
queues = st.lists(queue, max_size=60, unique=True)


@pytest.mark.parametrize("strategy", EVERY, ids=lambda strategy: strategy.name)
@given(members=members, queues=queues)
def test_every_queue_belongs_to_exactly_one_member(
    strategy: Strategy, members: list[str], queues: list[MessageQueue]
) -> None:
    taken = [found for name in members for found in strategy.share(name, members, queues)]
    assert len(taken) == len(set(taken))
    assert set(taken) == set(queues)


@pytest.mark.parametrize("strategy", EVERY, ids=lambda strategy: strategy.name)
@given(members=members, queues=queues, chance=st.randoms(use_true_random=False))
def test_the_order_of_the_lists_does_not_matter(
    strategy: Strategy, members: list[str], queues: list[MessageQueue], chance: random.Random
) -> None:
    others, shuffled = chance.sample(members, len(members)), chance.sample(queues, len(queues))
    for name in members:
        assert strategy.share(name, members, queues) == strategy.share(name, others, shuffled)


@given(members=members, queues=queues)
def test_shares_differ_by_one_at_most(members: list[str], queues: list[MessageQueue]) -> None:
    for strategy in (Averagely(), AveragelyByCircle()):
        sizes = [len(strategy.share(name, members, queues)) for name in members]
        assert max(sizes) - min(sizes) <= 1


@given(members=members, queues=queues)
def test_when_a_member_leaves_only_its_queues_move(
    members: list[str], queues: list[MessageQueue]
) -> None:
    strategy = ConsistentHash()
    rest = members[1:]
    for name in rest:
        before = strategy.share(name, members, queues)
        assert set(before) <= set(strategy.share(name, rest, queues))
