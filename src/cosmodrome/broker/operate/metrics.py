"""The metrics of a broker, made when it is scraped: `metric_table`, filled from existing counts.

Nothing here runs between scrapes, and no service counts anything for it on the way of a send or a
pull: `Stats` rolls up the sums of both lanes when it is read, as every ten seconds anyway.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterator

from cosmodrome.broker.foundation import Foundation
from cosmodrome.broker.later.room import Later
from cosmodrome.broker.members.clients import Member
from cosmodrome.broker.members.room import Members
from cosmodrome.broker.operate import metric_table as table
from cosmodrome.broker.operate.lag import Lag, Lags
from cosmodrome.broker.operate.replication_metrics import replication_samples
from cosmodrome.broker.operate.replication_view import ReplicationView
from cosmodrome.broker.receive.room import Receive
from cosmodrome.broker.send.room import Send
from cosmodrome.errors import ConfigError
from cosmodrome.transport.http.exposition import NODE_LABELS, Histogram, Metric, Sample, WalkItem
from cosmodrome.transport.http.request_metrics import RequestMetrics
from cosmodrome.wire.frame import LANGUAGES
from cosmodrome.wire.names import (
    DLQ_PREFIX,
    HALF_TOPIC,
    OP_HALF_TOPIC,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    SYSTEM_GROUP_PREFIX,
    TIMER_TOPIC,
)
from cosmodrome.wire.releases import release

REMOTING = "remoting"
LOCAL_DISK = ("local", "disk")
SENDS = (REMOTING, "send_message", "success", "false", "success")
# Upstream's upper ends of rpc times, in ms.
RPC_EDGES = (1, 3, 5, 7, 10, 100, 1000, 2000, 3000)
CONSUME_MODES = {"CONSUME_ACTIVELY": "pull", "CONSUME_PASSIVELY": "push", "CONSUME_POP": "pop"}
# Only of some topics is it known of which type all their messages are.
MESSAGE_TYPES = {
    SCHEDULE_TOPIC: "delay",
    TIMER_TOPIC: "delay",
    HALF_TOPIC: "transaction",
    OP_HALF_TOPIC: "transaction",
}
UNSPECIFIED = "unspecified"
LEVELS_MAX = 256
EXTRA_LABELS_MAX = 16
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*\Z")


class BrokerMetrics:
    """A source of `Exposition`; what concerns the whole broker comes first."""

    def __init__(
        self,
        base: Foundation,
        members: Members,
        receive: Receive,
        later: Later,
        send: Send,
        *,
        replication: ReplicationView,
        requests: RequestMetrics,
        ready: Callable[[], tuple[bool, str]],
    ) -> None:
        self._options = base.options
        self._store = base.store
        self._stats = base.stats
        self._clock = base.env.clock
        self._tls = base.tls
        self._members = members
        self._receive = receive
        self._later = later
        self._send = send
        self._replication = replication
        self._requests = requests
        self._ready = ready
        self._lags = Lags(
            base.store, members.topics, members.offsets, members.clients, base.stats, self._clock
        )
        members.topics.gone.subscribe(self._lags.forget_topic)
        self.labels = {
            "cluster": base.options.broker_cluster_name,
            "node_type": "broker",
            "node_id": base.options.broker_name,
            **extra_labels(base.options.metrics_label),
        }

    async def prepare(self) -> None:
        """Nothing has to be fetched before the walk."""

    def walk(self) -> Iterator[WalkItem]:
        yield Sample(table.READY, (), int(self._ready()[0]))
        yield from self._broker()
        yield from self._storage()
        yield from replication_samples(self._replication)
        yield from self._sends_and_pulls()
        yield from self._waiting()
        yield from self._connected()
        yield from self._by_topic()
        yield from self._by_group()
        yield from self._lag()

    # --- the broker as a whole ---------------------------------------------------------------

    def _broker(self) -> Iterator[WalkItem]:
        requests = self._requests
        held, tasks, in_flight = self._receive.waiters.held, requests.tasks, requests.in_flight
        yield Sample(table.PERMISSION, (), self._options.broker_permission)
        yield Sample(table.TOPICS, (), len(self._members.topics.table))
        yield Sample(table.GROUPS, (), len(self._members.groups.table))
        yield Sample(table.WATERMARK, ("send",), max(0, in_flight - held - tasks))
        yield Sample(table.WATERMARK, ("admin",), tasks)
        yield Sample(table.LOOP_LATE, (), self._send.pressure.late_ms / 1000)
        ends_ms = self._tls.certificate_ends_ms
        if ends_ms is not None:
            yield Sample(table.CERTIFICATE, (), (ends_ms - self._clock.now_ms()) / 1000)
        yield Sample(table.CONNECTIONS, (), requests.connections)
        yield Sample(table.IN_FLIGHT, (), in_flight)
        yield Sample(table.HELD_BYTES, (), requests.held_bytes)
        yield Sample(table.PULLS_HELD, (), held)
        yield from requests.counts(table.REQUESTS, table.ERRORS, table.SLOW)

    def _storage(self) -> Iterator[WalkItem]:
        facts = self._store.facts()
        behind = max(0, facts.written_offset - facts.flushed_offset)
        yield Sample(table.WRITABLE, (), int(facts.unwritable is None))
        yield Sample(table.STORAGE_SIZE, LOCAL_DISK, facts.max_offset - facts.min_offset)
        yield Sample(table.FLUSH_BEHIND, LOCAL_DISK, behind)
        yield Sample(table.DISPATCH_BEHIND, LOCAL_DISK, facts.dispatch_behind_bytes)
        if facts.earliest_ms >= 0:
            age_ms = max(0, self._clock.now_ms() - facts.earliest_ms)
            yield Sample(table.RESERVE_TIME, LOCAL_DISK, age_ms)
        yield Sample(table.DISK_RATIO, (), facts.disk_ratio)
        yield Sample(table.LOG_END, (), facts.max_offset)
        yield Sample(table.PUTS, (), facts.put_count)
        yield Sample(table.PUT_FAILURES, (), facts.put_failed_count)
        yield Sample(table.QUEUES, (), facts.queue_count)

    def _sends_and_pulls(self) -> Iterator[WalkItem]:
        send, consume, later = self._send, self._receive.consume, self._later
        counts = send.put_times.below(RPC_EDGES)
        yield Sample(table.RPC_LATENCY, SENDS, Histogram(tuple(map(str, RPC_EDGES)), counts))
        yield Sample(table.OVERLOADED, (), send.pressure.refused_total)
        yield Sample(table.SEND_FAILURES, (), send.produce.failures_total)
        for status, count in send.produce.unpromised.items():
            yield Sample(table.SENDS_UNPROMISED, (status.value,), count)
        yield Sample(table.PULLS_FOUND, (), consume.found_total)
        yield Sample(table.PULLS_MISSED, (), consume.missed_total)
        yield Sample(table.PULL_FAILURES, (), consume.failures_total)
        yield Sample(table.PULL_SECONDS, (), self._stats.gets.ms / 1000)
        yield Sample(table.RETRIED, (), later.retry.retried_total)
        yield Sample(table.TRANSACTIONS_ASKED, (), later.check_back.asked_total)
        yield Sample(table.TRANSACTIONS_GIVEN_UP, (), later.check_back.given_up_total)

    # --- messages that wait ------------------------------------------------------------------

    def _waiting(self) -> Iterator[WalkItem]:
        now_ms = self._clock.now_ms()
        for waiting in self._later.delays.waiting()[:LEVELS_MAX]:
            level = (str(waiting.level),)
            yield Sample(table.DELAYED, level, waiting.messages)
            if waiting.due_ms is not None:
                late_s = max(0, now_ms - waiting.due_ms) / 1000
                yield Sample(table.DELAY_LATE, level, late_s)
            elif not waiting.messages:
                yield Sample(table.DELAY_LATE, level, 0)
        timers = self._later.timers
        end = self._store.bounds(TIMER_TOPIC, 0)[1]
        unread = max(0, end - timers.scanned)
        yield Sample(table.TIMED, (), timers.waiting)
        yield Sample(table.TIMER_ENQUEUE_LAG, (), unread)
        stored_ms = self._store.store_time(TIMER_TOPIC, 0, timers.scanned) if unread else now_ms
        if stored_ms >= 0:
            yield Sample(table.TIMER_ENQUEUE_LATENCY, (), max(0, now_ms - stored_ms))
        due_ms = timers.next_due_ms
        late_ms = 0 if due_ms is None else max(0, now_ms - due_ms)
        yield Sample(table.TIMER_DEQUEUE_LATENCY, (), late_ms)
        yield Sample(table.TIMER_ENQUEUED, (), end)

    # --- clients -----------------------------------------------------------------------------

    def _connected(self) -> Iterator[WalkItem]:
        counts: collections.Counter[tuple[str, ...]] = collections.Counter()
        for producers in self._members.clients.producer_members():
            counts.update((*_client(member), REMOTING) for member in producers)
            yield None
        for labels, count in counts.items():
            yield Sample(table.PRODUCERS, labels, count)
        for group in self._members.clients.consumer_groups():
            mode = CONSUME_MODES.get(group.consume_type, "unknown")
            system = _truth(_is_system_group(group.name))
            kinds = collections.Counter(_client(member) for member in group.members.values())
            for kind, count in kinds.items():
                labels = (group.name, *kind, mode, REMOTING, system)
                yield Sample(table.CONSUMERS, labels, count)
            yield None

    # --- by topic and group ------------------------------------------------------------------

    def _by_topic(self) -> Iterator[WalkItem]:
        # Families one after the other: were there too many series, the first would be whole.
        puts = self._stats.topics()
        for topic, item in puts:
            yield Sample(table.MESSAGES_IN, self._of_topic(topic), item.messages)
        for topic, item in puts:
            yield Sample(table.BYTES_IN, self._of_topic(topic), item.size)
        for topic in [name for name in self._members.topics.table if name.startswith(DLQ_PREFIX)]:
            group = topic.removeprefix(DLQ_PREFIX)
            labels = (group, topic, _truth(_is_system_group(group)))
            yield Sample(table.DEAD, labels, self._store.bounds(topic, 0)[1])
        ends = list(self._later.transaction_counts.by_topic())
        for topic, end in ends:
            yield Sample(table.COMMITS, (topic,), end.committed)
        for topic, end in ends:
            yield Sample(table.ROLLBACKS, (topic,), end.rolled_back)
        for topic, end in ends:
            yield Sample(table.FINISH_LATENCY, (topic,), end.times())

    def _by_group(self) -> Iterator[WalkItem]:
        gets = self._stats.groups()
        for key, item in gets:
            yield Sample(table.MESSAGES_OUT, self._of_group(*key), item.messages)
        for key, item in gets:
            yield Sample(table.BYTES_OUT, self._of_group(*key), item.size)

    def _lag(self) -> Iterator[WalkItem]:
        lags: list[Lag] = []
        for lag in self._lags.walk():
            if lag is not None:
                lags.append(lag)
            yield None
        figures: tuple[tuple[Metric, Callable[[Lag], float | None]], ...] = (
            (table.LAG_MESSAGES, lambda lag: lag.messages),
            (table.LAG_SECONDS, lambda lag: None if lag.age_ms is None else lag.age_ms / 1000),
            (table.LAG_UNKNOWN, lambda lag: lag.unknown_queues),
            (table.LAG_LATENCY, lambda lag: lag.age_ms),
            (table.IN_FLIGHT_MESSAGES, lambda lag: lag.in_flight),
            (table.READY_MESSAGES, lambda lag: lag.ready),
            (table.QUEUEING_LATENCY, lambda lag: lag.queueing_ms),
        )
        for metric, figure in figures:
            for lag in lags:
                value = figure(lag)
                if value is not None:
                    system = self._system(lag.topic, lag.group)
                    labels = (lag.group, lag.topic, _is_retry(lag.topic), system)
                    yield Sample(metric, labels, value)
        yield self._lags.left_out * len(figures)

    # --- inside ------------------------------------------------------------------------------

    def _of_topic(self, topic: str) -> tuple[str, ...]:
        return topic, MESSAGE_TYPES.get(topic, UNSPECIFIED), self._system(topic)

    def _of_group(self, topic: str, group: str) -> tuple[str, ...]:
        return topic, group, self._system(topic, group), _is_retry(topic)

    def _system(self, topic: str, group: str = "") -> str:
        return _truth(self._members.topics.is_system(topic) or _is_system_group(group))


def extra_labels(text: str) -> dict[str, str]:
    """The labels of `metricsLabel`; ConfigError for what cannot be one."""
    pairs = [part.strip().partition(":") for part in text.split(",") if part.strip()]
    taken = {*NODE_LABELS, "le", *(name for metric in table.TABLE for name in metric.labels)}
    for name, colon, _ in pairs:
        if not colon or not _LABEL.match(name) or name in taken:
            raise ConfigError(
                f"metricsLabel has {name[:64]!r}; write name:value,name:value with names of"
                " letters, digits and _ that no metric has yet"
            )
    if len(pairs) > EXTRA_LABELS_MAX:
        raise ConfigError(f"metricsLabel has {len(pairs)} labels; use at most {EXTRA_LABELS_MAX}")
    return {name: value.strip() for name, _, value in pairs}


def _client(member: Member) -> tuple[str, str]:
    known = 0 <= member.language < len(LANGUAGES)
    language = LANGUAGES[member.language].lower() if known else "other"
    version = release(member.version).replace(".", "_").replace("-", "_").lower()
    return language, f"v{version}"


def _is_system_group(group: str) -> bool:
    return group.startswith(SYSTEM_GROUP_PREFIX)


def _is_retry(topic: str) -> str:
    return _truth(topic.startswith((RETRY_PREFIX, DLQ_PREFIX)))


def _truth(value: bool) -> str:
    return "true" if value else "false"
