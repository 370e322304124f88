from __future__ import annotations

import gc
import tracemalloc

import pytest

from cosmodrome.broker.later.halves import Decisions, destination_of, op
from cosmodrome.store.store import Draft


def test_copies_are_followed_to_the_newest() -> None:
    decisions = Decisions()
    for half, copy in ((1, 5), (5, 9), (9, 12)):
        decisions.moved(half, copy)
    assert [decisions.newest(half) for half in (0, 1, 5, 9, 12)] == [0, 12, 12, 12, 12]
    decisions.moved(12, 20)
    assert decisions.newest(1) == 20


async def test_a_decision_holds_for_every_copy() -> None:
    decisions = Decisions()
    decisions.moved(1, 5)
    decision = decisions.begin(1, commit=True)
    assert decisions.find(1) is decisions.find(5) is decision
    decisions.end(decision, failed=False)
    assert decision.finished.is_set()
    for half in (1, 5):
        found = decisions.find(half)
        assert found is not None and found.commit and found.finished.is_set()


async def test_a_decision_holds_for_a_copy_made_meanwhile() -> None:
    decisions = Decisions()
    decision = decisions.begin(1, commit=False)
    decisions.moved(1, 5)
    decisions.end(decision, failed=False)
    found = decisions.find(1)
    assert found is decisions.find(5) is not None
    assert found.finished.is_set() and not found.commit


async def test_a_failed_decision_is_forgotten() -> None:
    decisions = Decisions()
    decision = decisions.begin(1, commit=True)
    decisions.end(decision, failed=True)
    assert decision.finished.is_set() and decision.failed
    assert decisions.find(1) is None


async def test_memory_is_bounded() -> None:
    decisions = Decisions(remembered_max=4)
    for half in range(10):
        decisions.end(decisions.begin(half, commit=bool(half % 2)), failed=False)
        decisions.moved(100 + half, 200 + half)
    found = {half: decision.commit for half in range(10) if (decision := decisions.find(half))}
    assert found == {6: False, 7: True, 8: False, 9: True}
    moved = [half for half in range(100, 110) if decisions.newest(half) != half]
    assert moved == [106, 107, 108, 109]


async def test_what_is_under_way_is_never_forgotten() -> None:
    decisions = Decisions(remembered_max=2)
    first = decisions.begin(1, commit=True)
    for half in range(2, 20):
        decisions.end(decisions.begin(half, commit=True), failed=False)
    assert decisions.find(1) is first


def test_a_remembered_decision_is_small() -> None:
    """A hundred thousand of them, and as many copies, belong to whoever is fastest."""
    count = 20_000
    decisions = Decisions()
    tracemalloc.start()
    try:
        for half in range(count):
            decisions.end(decisions.begin(1_000_000 + half, commit=True), failed=False)
            decisions.moved(2_000_000 + half, 3_000_000 + half)
        assert tracemalloc.get_traced_memory()[0] < 300 * count
    finally:
        tracemalloc.stop()


async def test_a_decision_that_is_stored_takes_no_memory() -> None:
    decisions = Decisions(remembered_max=5_000)
    before = len(gc.get_objects())
    for half in range(4_000):
        decisions.end(decisions.begin(half, commit=half % 2 == 0), failed=False)
    assert len(gc.get_objects()) - before < 100
    assert [decisions.find(half).commit for half in range(4)] == [True, False, True, False]


async def test_decisions_come_in_any_order() -> None:
    decisions = Decisions(remembered_max=4)
    for half in (12, 10, 2, 13, 40, 39):
        decisions.end(decisions.begin(half, commit=True), failed=False)
    assert [half for half in range(50) if decisions.find(half)] == [39, 40]


@pytest.mark.parametrize(
    "pairs",
    [
        {},
        {"REAL_TOPIC": "T"},
        {"REAL_QID": "1"},
        {"REAL_TOPIC": "T", "REAL_QID": "-1"},
        {"REAL_TOPIC": "T", "REAL_QID": "٣"},
        {"REAL_TOPIC": "T", "REAL_QID": "9999999999"},
    ],
)
def test_without_a_destination(pairs: dict[str, str]) -> None:
    assert destination_of(pairs) is None


def test_an_op_is_as_upstream_writes_it() -> None:
    assert op(17, b"host", 5) == Draft(
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        0,
        b"17",
        "WAIT\x01true\x02TAGS\x01d",
        b"host",
        b"host",
        born_ms=5,
    )
