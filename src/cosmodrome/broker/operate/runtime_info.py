"""The figures of the broker as a whole, by upstream's names.

Rates come from samples taken every second; ten minutes of them are kept.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping

from cosmodrome import __version__
from cosmodrome.broker.counts import put_times
from cosmodrome.broker.counts.put_times import PutTimes
from cosmodrome.broker.foundation import Foundation
from cosmodrome.broker.receive.consume import Consume
from cosmodrome.env.background import Background
from cosmodrome.env.base import DiskUsage
from cosmodrome.env.reload import fields_of, shown
from cosmodrome.layout import HA_STREAM, HA_STREAM_KEY, PAIR_SETTINGS, SETTING_FIGURE
from cosmodrome.store.store import StoreFacts
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import KVTable
from cosmodrome.wire.commands.broker import GetBrokerRuntimeInfo
from cosmodrome.wire.frame import VERSION
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


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    at: float
    put: int
    found: int
    missed: int
    transferred: int


class RuntimeInfo:
    def __init__(
        self,
        base: Foundation,
        consume: Consume,
        put_times: PutTimes,
        *,
        figures: Callable[[], Mapping[str, str]] = dict,
        each_second: Callable[[], None] = lambda: None,
    ) -> None:
        self._options = base.options
        self._store_options = base.store_options
        self._log_path = base.log_dir
        self._env = base.env
        self._store = base.store
        self._consume = consume
        self._figures = figures  # what other services add to the runtime information
        self._stats = base.stats
        self._put_times = put_times
        self._each_second = each_second  # what others want to do when samples are taken
        self._sample_count = 0
        self._samples: collections.deque[Sample] = collections.deque(maxlen=WINDOWS_SECONDS[-1] + 1)
        self._boot_ms = 0
        self._day = ""
        self._morning = {"Put": (0, 0), "Get": (0, 0)}  # yesterday's, today's totals at midnight
        self._sampler = Background("sample rates")

    async def start(self) -> None:
        if not self._sampler.running:
            self._boot_ms = self._env.clock.now_ms()
            self.sample()
            self._sampler.repeat(SAMPLE_SECONDS, self._every_second)

    async def stop(self) -> None:
        await self._sampler.stop()

    # --- requests ---------------------------------------------------------------------------

    @GetBrokerRuntimeInfo.handler
    async def get_runtime_info(self, ask: GetBrokerRuntimeInfo, call: Call) -> Reply:
        usage = await self._env.offload(lambda: self._env.disk.usage(self._log_path))
        return Reply(body=bodies.encode(KVTable(table=self.runtime_info(usage))))

    # --- figures ----------------------------------------------------------------------------

    def sample(self) -> None:
        self._sample_count += 1
        if self._sample_count % PUT_TIMES_SAMPLES == 0:
            self._put_times.turn()
        facts = self._store.facts()
        put, got = facts.put_count, self._consume.messages_total
        self._samples.append(
            Sample(
                at=asyncio.get_running_loop().time(),
                put=put,
                found=self._consume.found_total,
                missed=self._consume.missed_total,
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
            **self._pair_settings(),
            "bootTimestamp": str(self._boot_ms),
            "nowTimestamp": str(self._env.clock.now_ms()),
            "runtime": _runtime((self._env.clock.now_ms() - self._boot_ms) // 1000),
            "brokerVersion": str(VERSION),
            "brokerVersionDesc": VERSION_NAME,
            "cosmodromeVersion": __version__,
            HA_STREAM_KEY: HA_STREAM,
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
        for name, now in (("Put", facts.put_count), ("Get", self._consume.messages_total)):
            yesterday, today = self._morning[name]
            figures[f"msg{name}TotalYesterdayMorning"] = str(yesterday)
            figures[f"msg{name}TotalTodayMorning"] = str(today)
            figures[f"msg{name}TotalTodayNow"] = str(now)
        return figures

    def _disk_figures(self, facts: StoreFacts, usage: DiskUsage) -> dict[str, str]:
        ratio = f"{usage.ratio:.2f}"
        total = _bytes_text(usage.used_bytes + usage.free_bytes)
        return {
            "commitLogDiskRatio": ratio,
            f"commitLogDiskRatio_{self._log_path}": ratio,
            "consumeQueueDiskRatio": ratio,
            "commitLogDirCapacity": f"Total : {total}, Free : {_bytes_text(usage.free_bytes)}.",
            "commitLogMinOffset": str(facts.min_offset),
            "commitLogMaxOffset": str(facts.max_offset),
            "dispatchBehindBytes": str(facts.dispatch_behind_bytes),
            "earliestMessageTimeStamp": str(facts.earliest_ms),
            "remainHowManyDataToFlush": _bytes_text(
                max(0, facts.written_offset - facts.flushed_offset)
            ),
            "remainTransientStoreBufferNumbs": str(NO_STORE_POOL),
        }

    def _pair_settings(self) -> dict[str, str]:
        return {
            SETTING_FIGURE + field.encode_name: shown(field, getattr(group, field.name))
            for group in (self._options, self._store_options)
            for field in fields_of(type(group))
            if field.encode_name in PAIR_SETTINGS
        }

    # --- inside -----------------------------------------------------------------------------

    def _every_second(self) -> None:
        self.sample()
        self._each_second()


def _runtime(seconds: int) -> str:
    minutes, seconds = divmod(max(seconds, 0), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"


def _bytes_text(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, len(UNITS))
    return f"{count / 1024**power:.1f} {UNITS[power - 1]}"
