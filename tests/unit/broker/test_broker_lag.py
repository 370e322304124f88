"""How far groups are behind: what is known is right, what is not known is not 0."""

from __future__ import annotations

from typing import Any

from cosmodrome.broker.counts.stats import Stats
from cosmodrome.broker.operate import lag as lag_module
from cosmodrome.broker.operate.lag import Lag, Lags
from cosmodrome.wire.bodies import TopicConfig

NOW_MS = 1_000_000


class Store:
    """Queues as (first, end); the message at offset n was stored at n seconds."""

    def __init__(self) -> None:
        self.queues: dict[tuple[str, int], tuple[int, int]] = {}
        self.gone: set[tuple[str, int, int]] = set()
        self.reads = 0

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        return self.queues.get((topic, queue_id), (0, 0))

    def store_time(self, topic: str, queue_id: int, offset: int) -> int:
        self.reads += 1
        first, end = self.bounds(topic, queue_id)
        known = first <= offset < end and (topic, queue_id, offset) not in self.gone
        return offset * 1000 if known else -1


class Topics(dict[str, TopicConfig]):
    def add(self, name: str, queues: int) -> None:
        self[name] = TopicConfig(
            topic_name=name, read_queue_nums=queues, write_queue_nums=queues, perm=6
        )


class Offsets:
    def __init__(self) -> None:
        self.table: dict[tuple[str, str], dict[int, int]] = {}

    def pairs(self) -> Any:
        return iter(list(self.table))

    def of(self, group: str, topic: str) -> dict[int, int]:
        return dict(self.table.get((topic, group), {}))


class Group:
    def __init__(self, *topics: str, model: str = "CLUSTERING") -> None:
        self.subscriptions = dict.fromkeys(topics)
        self.message_model = model


class Kit:
    def __init__(self) -> None:
        self.store, self.topics, self.offsets, self.stats = Store(), Topics(), Offsets(), Stats()
        self.online: dict[str, Group] = {}
        self.lags = Lags(self.store, self.topics, self.offsets, self, self.stats, self)  # type: ignore[arg-type]

    def group(self, name: str) -> Group | None:
        return self.online.get(name)

    def now_ms(self) -> int:
        return NOW_MS

    def look(self) -> dict[tuple[str, str], Lag]:
        found = [lag for lag in self.lags.walk() if lag is not None]
        return {(lag.group, lag.topic): lag for lag in found}

    def only(self) -> Lag:
        (lag,) = self.look().values()
        return lag


def kit(queues: dict[int, tuple[int, int]], committed: dict[int, int]) -> Kit:
    made = Kit()
    made.topics.add("T", max(queues) + 1)
    made.store.queues = {("T", queue_id): bounds for queue_id, bounds in queues.items()}
    made.offsets.table["T", "G"] = committed
    return made


def test_messages_and_the_age_of_the_oldest() -> None:
    lag = kit({0: (0, 100), 1: (0, 50)}, {0: 90, 1: 40}).only()
    assert lag.messages == 20 and lag.age_ms == NOW_MS - 40_000 and lag.unknown_queues == 0


def test_who_has_consumed_all_is_known_to_be_at_0() -> None:
    lag = kit({0: (0, 100), 1: (0, 0)}, {0: 100}).only()
    assert (lag.messages, lag.age_ms, lag.in_flight, lag.ready, lag.queueing_ms) == (0, 0, 0, 0, 0)
    assert lag.unknown_queues == 0, "an empty queue has nothing to consume"


def test_without_any_offset_nothing_is_known() -> None:
    lag = kit({0: (0, 100)}, {}).only()
    assert (lag.messages, lag.age_ms, lag.in_flight, lag.unknown_queues) == (None, None, None, 1)
    assert kit({0: (0, 100)}, {0: 101}).only().messages is None, "beyond the end"


def test_a_queue_without_an_offset_is_counted_apart() -> None:
    lag = kit({0: (0, 100), 1: (0, 7)}, {0: 90}).only()
    assert (lag.messages, lag.unknown_queues) == (10, 1)


def test_messages_that_expired_are_not_waited_for() -> None:
    lag = kit({0: (60, 100)}, {0: 10}).only()
    assert lag.messages == 40 and lag.age_ms == NOW_MS - 60_000


def test_an_age_that_cannot_be_read_is_not_0() -> None:
    made = kit({0: (0, 100), 1: (0, 100)}, {0: 90, 1: 99})
    made.store.gone.add(("T", 0, 90))
    lag = made.only()
    assert lag.messages == 11 and lag.age_ms is None


def test_pulled_and_not_committed() -> None:
    made = kit({0: (0, 100)}, {0: 90})
    assert made.only().in_flight is None and made.only().ready is None, "nobody has pulled yet"
    made.stats.got("G", "T", 0, 4, 400, took_ms=1, next_offset=94)
    lag = made.only()
    assert (lag.in_flight, lag.ready, lag.queueing_ms) == (4, 6, NOW_MS - 94_000)
    made.offsets.table["T", "G"] = {0: 97}  # moved on by hand
    lag = made.only()
    assert (lag.in_flight, lag.ready) == (0, 3)


def test_groups_count_with_what_they_subscribe_to() -> None:
    made = kit({0: (0, 100)}, {0: 90})
    assert ("G", "T") in made.look(), "groups without members count"
    made.online["G"] = Group("Other")
    assert made.look() == {}
    made.online["G"] = Group("T")
    assert ("G", "T") in made.look()
    made.online["G"] = Group("T", model="BROADCASTING")
    assert made.look() == {}, "members keep such offsets themselves"
    made.online.clear()
    del made.topics["T"]
    assert made.look() == {}


def test_a_group_that_stands_still_is_not_read_again() -> None:
    made = kit({0: (0, 100)}, {0: 90})
    first = made.only()
    assert made.store.reads == 1
    assert made.only() == first and made.store.reads == 1
    made.offsets.table["T", "G"] = {0: 91}
    assert made.only().age_ms == NOW_MS - 91_000 and made.store.reads == 2
    assert len(made.lags._times) == 1, "what is no longer asked for is forgotten"
    made.lags.forget_topic("T")
    made.only()
    assert made.store.reads == 3, "a topic made anew has other messages at the same offsets"


def test_one_walk_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(lag_module, "PAIRS_MAX", 5)
    monkeypatch.setattr(lag_module, "READS_MAX", 3)
    made = kit({0: (0, 100)}, {0: 90})
    made.offsets.table = {("T", f"G{number}"): {0: number} for number in range(8)}
    found = made.look()
    assert len(found) == 5 and made.lags.left_out == 3
    assert made.store.reads == 3
    ages = [lag.age_ms for lag in found.values()]
    assert ages.count(None) == 2 and all(lag.messages for lag in found.values())
    assert [lag.age_ms for lag in made.look().values()].count(None) == 0, "the next one goes on"
    monkeypatch.setattr(lag_module, "QUEUES_MAX", 2)
    assert len(made.look()) == 2 and made.lags.left_out == 6


def test_large_topics_give_way_between_queues() -> None:
    made = kit(dict.fromkeys(range(1000), (0, 10)), dict.fromkeys(range(1000), 3))
    steps = list(made.lags.walk())
    assert steps.count(None) > 1000 / lag_module.QUEUES_PER_STEP
    assert steps[-1] is not None and steps[-1].messages == 7000
