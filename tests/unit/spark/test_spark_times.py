"""The search for the first message of a time, with brokers that guess anything."""

from __future__ import annotations

import bisect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmodrome.spark.read.times import Times


def search(times: list[int], first: int, guess: int, moment: int) -> tuple[int, int]:
    """What is found, and how many looks it took."""
    looks = [0]

    def look(positions: list[tuple[str, int]]) -> dict[tuple[str, int], int | None]:
        looks[0] += 1
        assert positions
        return {(queue, at): times[at - first] for queue, at in positions}

    bounds = {"q": (first, first + len(times))}
    return Times(look).first(moment, bounds, {"q": guess})["q"], looks[0]


@given(
    st.lists(st.integers(0, 50), max_size=60).map(sorted),
    st.integers(0, 1_000),
    st.integers(-5, 1_100),
    st.integers(-2, 52),
)
def test_any_guess_leads_to_the_first(
    times: list[int], first: int, guess: int, moment: int
) -> None:
    found, looks = search(times, first, guess, moment)
    assert found == first + bisect.bisect_left(times, moment)
    assert looks <= 14


def test_a_right_guess_costs_one_look() -> None:
    times = list(range(0, 20_000, 2))
    for guess in (0, 1, 500, 9_999, 10_000):
        assert search(times, 0, guess, 2 * guess) == (guess, 0 if not times else 1)


def test_a_wrong_guess_costs_a_logarithm() -> None:
    times = list(range(1_000_000))
    assert search(times, 0, 0, 777_777)[1] < 45
    assert search(times, 0, 1_000_000, 5)[1] < 45


@pytest.mark.parametrize("guess", [0, 3, 5])
def test_what_cannot_be_seen_is_left_to_the_broker(guess: int) -> None:
    unseen = Times[str](lambda positions: dict.fromkeys(positions))
    assert unseen.first(9, {"q": (0, 5)}, {"q": guess}) == {"q": guess}


def test_many_queues_are_looked_at_together() -> None:
    rounds = []

    def look(positions: list[tuple[int, int]]) -> dict[tuple[int, int], int | None]:
        rounds.append(len(positions))
        return {(queue, at): at * 10 for queue, at in positions}

    queues = range(50)
    bounds = dict.fromkeys(queues, (0, 100))
    found = Times(look).first(505, bounds, dict.fromkeys(queues, 51))
    assert set(found.values()) == {51}
    assert rounds == [100]
