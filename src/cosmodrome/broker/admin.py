"""What operators ask about the broker as a whole: figures, queue ends and consumer progress.

Rates come from samples taken every second; ten minutes of them are kept.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from cosmodrome.broker import put_times
from cosmodrome.broker.put_times import PutTimes
from cosmodrome.broker.stats import Stats
from cosmodrome.env.base import DiskUsage, Env
from cosmodrome.env.options import BrokerOptions
from cosmodrome.errors import Code, Refused
from cosmodrome.store.store import Store, StoreFacts
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import (
    ConsumeStats,
    ConsumeStatsList,
    GroupList,
    KVTable,
    MessageQueue,
    OffsetWrapper,
    TopicConfig,
    TopicOffset,
    TopicStatsTable,
)
from cosmodrome.wire.commands.broker import GetBrokerRuntimeInfo
from cosmodrome.wire.commands.group import GetBrokerConsumeStats, GetConsumeStats
from cosmodrome.wire.commands.topic import GetTopicStatsInfo, QueryTopicConsumeByWho
from cosmodrome.wire.frame import VERSION
from cosmodrome.wire.names import check_group, check_topic
from cosmodrome.wire.table import Call, Reply

log = logging.getLogger(__name__)

SAMPLE_SECONDS = 1.0
WINDOWS_SECONDS = (10, 60, 600)
# Compat: tools compare and print this; it names the protocol level of VERSION.
VERSION_NAME = "V4_9_8"
# Compat: there are no request pools here; tools need a capacity to divide by.
POOL_CAPACITY = {
    "sendThreadPoolQueueCapacity": 10_000,
    "pullThreadPoolQueueCapacity": 100_000,
    "queryThreadPoolQueueCapacity": 20_000,
    "EndTransactionThreadPoolQueueCapacity": 100_000,
}
NO_POOL = {
    "sendThreadPoolQueueSize",
    "pullThreadPoolQueueSize",
    "queryThreadPoolQueueSize",
    "EndTransactionQueueSize",
    "sendThreadPoolQueueHeadWaitTimeMills",
    "pullThreadPoolQueueHeadWaitTimeMills",
    "queryThreadPoolQueueHeadWaitTimeMills",
    "pageCacheLockTimeMills",
    "dispatchMaxBuffer",
}
NO_STORE_POOL = 2**31 - 1
UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
PUT_TIMES_SAMPLES = int(put_times.WINDOW_SECONDS / SAMPLE_SECONDS)


class Pulls(Protocol):
    """The totals of the pull service."""

    missed_total: int

    @property
    def messages_total(self) -> int: ...
    @property
    def found_total(self) -> int: ...


class TopicTable(Protocol):
    def get(self, name: str) -> TopicConfig | None: ...


class Progress(Protocol):
    """What the admin service asks the offset table."""

    def query(self, group: str, topic: str, queue_id: int) -> int: ...
    def topics_of(self, group: str) -> set[str]: ...
    def topics_by_group(self) -> dict[str, set[str]]: ...
    def groups_of(self, topic: str) -> set[str]: ...


class Subscriptions(Protocol):
    """What the admin service asks about connected consumers."""

    def subscribed(self, group: str) -> set[str]: ...
    def consumer_groups_of(self, topic: str) -> set[str]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    at: float
    put: int
    found: int
    missed: int
    transferred: int


class Admin:
    def __init__(
        self,
        options: BrokerOptions,
        log_path: str,
        env: Env,
        store: Store,
        topics: TopicTable,
        clients: Subscriptions,
        offsets: Progress,
        pulls: Pulls,
        figures: Callable[[], Mapping[str, str]] = dict,
        *,
        groups: Mapping[str, object] | None = None,
        stats: Stats | None = None,
        put_times: PutTimes | None = None,
        address: Callable[[], str] = str,
        each_second: Callable[[], None] = lambda: None,
    ) -> None:
        self._options = options
        self._log_path = log_path
        self._env = env
        self._store = store
        self._topics = topics
        self._clients = clients
        self._offsets = offsets
        self._pulls = pulls
        self._figures = figures  # what other services add to the runtime information
        self._groups = groups if groups is not None else {}
        self._stats = stats or Stats()
        self._put_times = put_times or PutTimes()
        self._address = address
        self._each_second = each_second  # what others want to do when samples are taken
        self._sample_count = 0
        self._samples: collections.deque[Sample] = collections.deque(maxlen=WINDOWS_SECONDS[-1] + 1)
        self._boot_ms = 0
        self._day = ""
        self._morning = {"Put": (0, 0), "Get": (0, 0)}  # yesterday's, today's totals at midnight
        self._sampler: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self._sampler is None:
            self._boot_ms = self._env.clock.now_ms()
            self.sample()
            self._sampler = asyncio.create_task(self._sample_regularly(), name="sample rates")

    async def stop(self) -> None:
        if self._sampler is not None:
            self._sampler.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sampler
            self._sampler = None

    # --- requests ---------------------------------------------------------------------------

    @GetBrokerRuntimeInfo.handler
    async def get_runtime_info(self, ask: GetBrokerRuntimeInfo, call: Call) -> Reply:
        usage = await self._env.offload(lambda: self._env.disk.usage(self._log_path))
        return Reply(body=bodies.encode(KVTable(table=self.runtime_info(usage))))

    @GetTopicStatsInfo.handler
    def get_topic_stats(self, ask: GetTopicStatsInfo, call: Call) -> Reply:
        check_topic(ask.topic)
        config = self._topics.get(ask.topic)
        if config is None:
            raise Refused(
                Code.TOPIC_NOT_EXIST,
                f"Topic {ask.topic} does not exist on this broker; check the name.",
            )
        table = {}
        for queue_id in range(config.write_queue_nums):
            first, end = self._store.bounds(ask.topic, queue_id)
            last_ms = self._store.store_time(ask.topic, queue_id, end - 1) if end > first else 0
            table[self._queue(ask.topic, queue_id)] = TopicOffset(
                min_offset=first, max_offset=end, last_update_timestamp=max(last_ms, 0)
            )
        return Reply(body=bodies.encode(TopicStatsTable(offset_table=table)))

    @GetConsumeStats.handler
    def get_consume_stats(self, ask: GetConsumeStats, call: Call) -> Reply:
        group = ask.consumer_group
        check_group(group)
        stats = ConsumeStats(consume_tps=0.0, offset_table={})
        subscribed = self._clients.subscribed(group)
        for topic in sorted({ask.topic} if ask.topic else self._offsets.topics_of(group)):
            config = self._topics.get(topic)
            # Compat: while the group is online only what it subscribes to counts.
            if config is None or (subscribed and topic not in subscribed):
                continue
            for queue_id in range(config.read_queue_nums):
                stats.offset_table[self._queue(topic, queue_id)] = self._progress(
                    group, topic, queue_id
                )
            stats.consume_tps += self._stats.get_rate(group, topic)
        return Reply(body=bodies.encode(stats))

    @GetBrokerConsumeStats.handler
    async def get_broker_consume_stats(self, ask: GetBrokerConsumeStats, call: Call) -> Reply:
        """Every group, also those without progress; `isOrder` leaves only order topics."""
        answer = ConsumeStatsList(broker_addr=self._address(), consume_stats_list=[])
        known = self._offsets.topics_by_group()
        for group in sorted(self._groups):
            await asyncio.sleep(0)  # there may be thousands; others want to be served between
            listed = []
            subscribed = self._clients.subscribed(group)
            for topic in sorted(known.get(group, ())):
                config = self._topics.get(topic)
                if config is None or (ask.is_order and not config.order):
                    continue
                if subscribed and topic not in subscribed:
                    continue
                table = {
                    self._queue(topic, queue_id): self._progress(group, topic, queue_id)
                    for queue_id in range(config.write_queue_nums)
                }
                answer.total_diff += sum(
                    row.broker_offset - row.consumer_offset for row in table.values()
                )
                rate = self._stats.get_rate(group, topic)
                listed.append(ConsumeStats(consume_tps=rate, offset_table=table))
            answer.consume_stats_list.append({group: listed})
        return Reply(body=bodies.encode(answer))

    @QueryTopicConsumeByWho.handler
    def query_who(self, ask: QueryTopicConsumeByWho, call: Call) -> Reply:
        check_topic(ask.topic)
        groups = self._clients.consumer_groups_of(ask.topic) | self._offsets.groups_of(ask.topic)
        return Reply(body=bodies.encode(GroupList(group_list=sorted(groups))))

    # --- figures ----------------------------------------------------------------------------

    def sample(self) -> None:
        self._sample_count += 1
        if self._sample_count % PUT_TIMES_SAMPLES == 0:
            self._put_times.turn()
        facts = self._store.facts()
        put, got = facts.put_count, self._pulls.messages_total
        self._samples.append(
            Sample(
                at=asyncio.get_running_loop().time(),
                put=put,
                found=self._pulls.found_total,
                missed=self._pulls.missed_total,
                transferred=got,
            )
        )
        day = time.strftime("%Y-%m-%d", time.localtime(self._env.clock.now_ms() / 1000))
        if day != self._day:
            if self._day:
                self._morning = {
                    "Put": (self._morning["Put"][1], put),
                    "Get": (self._morning["Get"][1], got),
                }
            self._day = day

    def runtime_info(self, usage: DiskUsage) -> dict[str, str]:
        """Upstream's names; figures this broker has no counterpart for are zero."""
        facts = self._store.facts()
        return {
            **dict.fromkeys(NO_POOL, "0"),
            **{name: str(size) for name, size in POOL_CAPACITY.items()},
            **self._put_figures(facts),
            **self._rates(),
            **self._days(facts),
            **self._disk_figures(facts, usage),
            **self._figures(),
            "bootTimestamp": str(self._boot_ms),
            "runtime": _runtime((self._env.clock.now_ms() - self._boot_ms) // 1000),
            "brokerVersion": str(VERSION),
            "brokerVersionDesc": VERSION_NAME,
            "startAcceptSendRequestTimeStamp": str(
                self._options.start_accept_send_request_time_stamp
            ),
        }

    def _put_figures(self, facts: StoreFacts) -> dict[str, str]:
        average = facts.put_bytes / facts.put_count if facts.put_count else 0.0
        return {
            "putMessageTimesTotal": str(facts.put_count),
            "putMessageSizeTotal": str(facts.put_bytes),
            "putMessageFailedTimes": str(facts.put_failed_count),
            "putMessageAverageSize": str(average),
            "putMessageDistributeTime": self._put_times.distribution(),
            "putMessageEntireTimeMax": str(self._put_times.longest_ms),
            "putLatency99": f"{self._put_times.percentile_ms(0.99):.2f}",
            "putLatency999": f"{self._put_times.percentile_ms(0.999):.2f}",
            "getMessageEntireTimeMax": str(int(self._stats.longest_get_ms)),
        }

    def _rates(self) -> dict[str, str]:
        return {
            "putTps": self._rate(lambda sample: sample.put),
            "getFoundTps": self._rate(lambda sample: sample.found),
            "getMissTps": self._rate(lambda sample: sample.missed),
            "getTotalTps": self._rate(lambda sample: sample.found + sample.missed),
            "getTransferedTps": self._rate(lambda sample: sample.transferred),
        }

    def _rate(self, value: Callable[[Sample], int]) -> str:
        """Per second over each window, or over what there is of it."""
        if not self._samples:
            return "0.0 0.0 0.0"
        last = self._samples[-1]
        rates = []
        for window in WINDOWS_SECONDS:
            first = self._samples[max(0, len(self._samples) - 1 - window)]
            seconds = last.at - first.at
            rates.append((value(last) - value(first)) / seconds if seconds > 0 else 0.0)
        return " ".join(map(str, rates))

    def _days(self, facts: StoreFacts) -> dict[str, str]:
        figures = {}
        for name, now in (("Put", facts.put_count), ("Get", self._pulls.messages_total)):
            yesterday, today = self._morning[name]
            figures[f"msg{name}TotalYesterdayMorning"] = str(yesterday)
            figures[f"msg{name}TotalTodayMorning"] = str(today)
            figures[f"msg{name}TotalTodayNow"] = str(now)
        return figures

    def _disk_figures(self, facts: StoreFacts, usage: DiskUsage) -> dict[str, str]:
        ratio = f"{usage.ratio:.2f}"
        total = _bytes_said(usage.used_bytes + usage.free_bytes)
        return {
            "commitLogDiskRatio": ratio,
            f"commitLogDiskRatio_{self._log_path}": ratio,
            "consumeQueueDiskRatio": ratio,
            "commitLogDirCapacity": f"Total : {total}, Free : {_bytes_said(usage.free_bytes)}.",
            "commitLogMinOffset": str(facts.min_offset),
            "commitLogMaxOffset": str(facts.max_offset),
            "dispatchBehindBytes": str(facts.dispatch_behind_bytes),
            "earliestMessageTimeStamp": str(facts.earliest_ms),
            "remainHowManyDataToFlush": _bytes_said(
                max(0, facts.written_offset - facts.flushed_offset)
            ),
            "remainTransientStoreBufferNumbs": str(NO_STORE_POOL),
        }

    # --- inside -----------------------------------------------------------------------------

    async def _sample_regularly(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            self.sample()
            self._each_second()

    def _queue(self, topic: str, queue_id: int) -> MessageQueue:
        return MessageQueue(topic=topic, broker_name=self._options.broker_name, queue_id=queue_id)

    def _progress(self, group: str, topic: str, queue_id: int) -> OffsetWrapper:
        first, end = self._store.bounds(topic, queue_id)
        offset = max(self._offsets.query(group, topic, queue_id), 0)
        last_ms = self._store.store_time(topic, queue_id, offset - 1) if offset > first else 0
        return OffsetWrapper(
            broker_offset=end, consumer_offset=offset, last_timestamp=max(last_ms, 0)
        )


def _runtime(seconds: int) -> str:
    minutes, seconds = divmod(max(seconds, 0), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"


def _bytes_said(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, len(UNITS))
    return f"{count / 1024**power:.1f} {UNITS[power - 1]}"
