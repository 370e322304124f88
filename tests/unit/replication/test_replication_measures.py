"""Rates and lags: what they say, and that they stay small."""

from __future__ import annotations

from cosmodrome.replication.measures import WRITE_TIMES_MAX, Rate, WriteTimes


def test_a_rate_is_that_of_the_last_seconds() -> None:
    rate = Rate()
    assert rate.per_second(0.0) == 0
    for second in range(100):
        rate.add(500, second + 0.1)
        rate.add(500, second + 0.6)
    assert rate.total == 100_000
    assert 900 <= rate.per_second(99.9) <= 1300
    assert rate.per_second(110.0) == 0
    assert len(rate._seconds) < 10


def test_a_burst_is_not_taken_for_its_rate_over_an_instant() -> None:
    rate = Rate()
    rate.add(1000, 50.001)
    assert rate.per_second(50.002) <= 1000


def test_a_lag_is_the_age_of_the_first_byte_that_is_missing() -> None:
    times = WriteTimes()
    assert times.age(0, 5.0) == 0
    for second in range(10):
        times.add(100 * (second + 1), float(second))
    assert times.age(1000, 20.0) == 0
    assert times.age(950, 20.0) == 11  # written at 9
    assert times.age(100, 20.0) == 19  # 101 was written at 1
    assert times.age(0, 20.0) == 20


def test_a_long_history_is_coarser_and_never_shows_too_little() -> None:
    times = WriteTimes()
    for second in range(50_000):
        times.add(second + 1, float(second))
        assert len(times._samples) <= WRITE_TIMES_MAX
    for end in range(0, 50_000, 997):
        exact = 50_000.0 - end
        assert exact <= times.age(end, 50_000.0) <= exact * 1.04 + 1


def test_writes_of_one_moment_are_one_sample() -> None:
    times = WriteTimes()
    for number in range(1000):
        times.add(number + 1, 1.0 + number / 1_000_000)
    assert len(times._samples) == 1 and times.age(10, 3.0) == 2
