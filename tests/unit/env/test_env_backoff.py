"""Pauses after failures."""

from __future__ import annotations

from random import Random

import pytest

from cosmodrome.env.backoff import Backoff


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(0.1, 1.0)
    assert [backoff.next_s() for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert backoff.failures == 6


def test_a_success_starts_again() -> None:
    backoff = Backoff(0.1, 1.0)
    backoff.next_s()
    backoff.next_s()
    backoff.reset()
    assert backoff.next_s() == 0.1


def test_many_failures_do_not_overflow() -> None:
    backoff = Backoff(0.1, 1.0)
    assert [backoff.next_s() for _ in range(5000)][-1] == 1.0


def test_chance_shortens_a_pause_by_half_at_most() -> None:
    backoff = Backoff(0.1, 1.0, Random(1))
    pauses = [backoff.next_s() for _ in range(200)]
    assert 0.05 <= pauses[0] <= 0.1
    assert all(0.5 <= pause <= 1.0 for pause in pauses[4:])
    assert len(set(pauses[4:])) > 100


@pytest.mark.parametrize(("first_s", "longest_s"), [(0, 1), (-1, 1), (2, 1)])
def test_a_first_pause_that_does_not_fit_is_refused(first_s: float, longest_s: float) -> None:
    with pytest.raises(ValueError, match="first pause"):
        Backoff(first_s, longest_s)
