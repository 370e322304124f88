from __future__ import annotations

import pytest

from cosmodrome.broker.halves import Decisions, op, real_place
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
    decisions.end(1, decision, failed=False)
    assert decision.finished.is_set() and decisions.find(5) is decision


async def test_a_failed_decision_is_forgotten() -> None:
    decisions = Decisions()
    decision = decisions.begin(1, commit=True)
    decisions.end(1, decision, failed=True)
    assert decision.finished.is_set() and decision.failed
    assert decisions.find(1) is None


async def test_memory_is_bounded() -> None:
    decisions = Decisions(remembered_max=3)
    for half in range(10):
        decisions.begin(half, commit=True)
        decisions.moved(100 + half, 200 + half)
    assert [half for half in range(10) if decisions.find(half)] == [7, 8, 9]
    assert [half for half in range(100, 110) if decisions.newest(half) != half] == [107, 108, 109]


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
def test_without_a_real_place(pairs: dict[str, str]) -> None:
    assert real_place(pairs) is None


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
