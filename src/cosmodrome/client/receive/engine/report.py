"""What a consumer reports about itself: counts of the last minute and the state of its queues.

The JSON is what `mqadmin consumerStatus` reads.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from msgspec import UNSET, UnsetType, field

from cosmodrome.client.receive.engine.options import MIB, ReadOptions
from cosmodrome.client.receive.engine.window import Window
from cosmodrome.client.values import MessageQueue
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import Body, SubscriptionData
from cosmodrome.wire.frame import VERSION

BUCKET_S = 10.0
BUCKETS = 6  # a minute
STACKS_MAX = 200
FRAMES_MAX = 30


class ProcessQueueInfo(Body, kw_only=True):
    cached_msg_count: int = 0
    cached_msg_max_offset: int = 0
    cached_msg_min_offset: int = 0
    cached_msg_size_in_mib: int = field(default=0, name="cachedMsgSizeInMiB")
    commit_offset: int = 0
    droped: bool = False  # Compat: upstream's spelling
    last_consume_timestamp: int = 0
    last_lock_timestamp: int = 0
    last_pull_timestamp: int = 0
    locked: bool = False
    transaction_msg_count: int = 0
    transaction_msg_max_offset: int = 0
    transaction_msg_min_offset: int = 0
    try_unlock_times: int = 0


class ConsumeStatus(Body, kw_only=True):
    consume_failed_msgs: int = 0
    consume_failed_tps: float = field(default=0.0, name="consumeFailedTPS")
    consume_ok_tps: float = field(default=0.0, name="consumeOKTPS")
    consume_rt: float = field(default=0.0, name="consumeRT")
    pull_rt: float = field(default=0.0, name="pullRT")
    pull_tps: float = field(default=0.0, name="pullTPS")


class ConsumerRunningInfo(Body, kw_only=True):
    object_keys = True

    jstack: str | UnsetType = UNSET
    mq_table: dict[MessageQueue, ProcessQueueInfo] = field(default_factory=dict)
    properties: dict[str, str] = field(default_factory=dict)
    status_table: dict[str, ConsumeStatus] = field(default_factory=dict)
    subscription_set: list[SubscriptionData] = field(default_factory=list)


class ConsumeMessageDirectlyResult(Body, kw_only=True):
    auto_commit: bool = True
    consume_result: str = "CR_SUCCESS"
    order: bool = False
    remark: str | UnsetType = UNSET
    spent_time_mills: int = 0


@dataclasses.dataclass(slots=True)
class _Bucket:
    number: int
    pulls: int = 0
    pulled: int = 0
    pull_ms: float = 0.0
    calls: int = 0
    consumed: int = 0
    failed: int = 0
    consume_ms: float = 0.0


class Rates:
    """Counts per topic over the last minute, and failures since the start."""

    def __init__(self, time: Callable[[], float]) -> None:
        self._time = time  # that of the loop
        self._buckets: dict[str, deque[_Bucket]] = {}
        self._failed: dict[str, int] = {}

    def pulled(self, topic: str, count: int, began: float) -> None:
        """One pull, which ends now."""
        now = self._time()
        bucket = self._bucket(topic, now)
        bucket.pulls += 1
        bucket.pulled += count
        bucket.pull_ms += (now - began) * 1000

    def consumed(self, topic: str, done: int, failed: int, began: float, now: float) -> None:
        """One call of a handler, or several in a row. Whoever made them knows what time it is:
        to ask again would cost 1 % of a call."""
        bucket = self._bucket(topic, now)
        bucket.consumed += done
        bucket.failed += failed
        bucket.calls += done + failed
        bucket.consume_ms += (now - began) * 1000
        if failed:
            self._failed[topic] = self._failed.get(topic, 0) + failed

    def of(self, topic: str) -> ConsumeStatus:
        newest = int(self._time() / BUCKET_S)
        recent = [
            bucket for bucket in self._buckets.get(topic, ()) if bucket.number > newest - BUCKETS
        ]
        span_s = BUCKET_S * max(1, len({bucket.number for bucket in recent}))
        pulls = sum(bucket.pulls for bucket in recent)
        calls = sum(bucket.calls for bucket in recent)
        return ConsumeStatus(
            consume_failed_msgs=self._failed.get(topic, 0),
            consume_failed_tps=sum(bucket.failed for bucket in recent) / span_s,
            consume_ok_tps=sum(bucket.consumed for bucket in recent) / span_s,
            consume_rt=sum(bucket.consume_ms for bucket in recent) / calls if calls else 0.0,
            pull_rt=sum(bucket.pull_ms for bucket in recent) / pulls if pulls else 0.0,
            pull_tps=sum(bucket.pulled for bucket in recent) / span_s,
        )

    def _bucket(self, topic: str, now: float) -> _Bucket:
        number = int(now / BUCKET_S)
        buckets = self._buckets.get(topic)
        if buckets is None:
            buckets = self._buckets[topic] = deque(maxlen=BUCKETS)
        if not buckets or buckets[-1].number != number:
            buckets.append(_Bucket(number))
        return buckets[-1]


def report(
    windows: Iterable[Window],
    subscriptions: Collection[SubscriptionData],
    rates: Rates,
    *,
    now_ms: int,
    properties: dict[str, str],
    stacks: bool,
) -> bytes:
    """The JSON of a ConsumerRunningInfo."""
    now = asyncio.get_running_loop().time()

    def wall(at: float | None) -> int:
        return 0 if at is None else now_ms - int((now - at) * 1000)

    table = {}
    for window in windows:
        table[window.queue] = ProcessQueueInfo(
            cached_msg_count=len(window.unfinished),
            cached_msg_min_offset=next(iter(window.unfinished), 0),
            cached_msg_max_offset=next(reversed(window.unfinished), 0),
            cached_msg_size_in_mib=window.bytes // MIB,
            commit_offset=window.done_to,
            droped=window.dropped,
            last_consume_timestamp=wall(window.consumed_at),
            last_lock_timestamp=wall(window.locked_at),
            last_pull_timestamp=wall(window.pulled_at),
            locked=window.is_locked(now),
        )
    info = ConsumerRunningInfo(
        mq_table=table,
        properties=properties,
        status_table={data.topic: rates.of(data.topic) for data in subscriptions},
        subscription_set=list(subscriptions),
    )
    if stacks:
        info.jstack = _stacks()
    return bodies.encode(info)


def running_properties(options: ReadOptions, *, namesrv: str, started_ms: int) -> dict[str, str]:
    return {
        "PROP_NAMESERVER_ADDR": f"{namesrv};",
        # Names of the Java consumer: what a queue may hold before pulling stops.
        "pullThresholdForQueue": str(options.prefetch_messages),
        "pullThresholdSizeForQueue": str(max(1, options.prefetch_bytes // MIB)),
        "consumeConcurrentlyMaxSpan": str(options.prefetch_span),
        "PROP_CONSUME_TYPE": options.consume_type,
        # Compat: tools turn this name into a version number.
        "PROP_CLIENT_VERSION": CLIENT_VERSIONS.get(VERSION, "V4_9_8"),
        "PROP_CONSUMER_START_TIMESTAMP": str(started_ms),
    } | options.running_properties()


CLIENT_VERSIONS = {409: "V4_9_8"}


def _stacks() -> str:
    """Where the tasks of this loop are, as threads appear in a thread dump."""
    out = io.StringIO()
    for task in sorted(asyncio.all_tasks(), key=lambda task: task.get_name())[:STACKS_MAX]:
        out.write(f'"{task.get_name()}"\n')
        for line in _frames(task.get_coro()):
            out.write(f"  {line}\n")
        out.write("\n")
    return out.getvalue()


def _frames(waiting: Any) -> Iterator[str]:
    """From the task's own coroutine to the innermost one: what it waits in. The stack that asyncio
    itself gives ends with the first, which is never the user's."""
    for _ in range(FRAMES_MAX):
        for frame_name, next_name in (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom")):
            frame = getattr(waiting, frame_name, None)
            if frame is not None:
                code = frame.f_code
                yield f'File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}'
                waiting = getattr(waiting, next_name)
                break
        else:
            return
