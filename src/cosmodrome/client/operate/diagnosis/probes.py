"""Small experiments on behalf of a group: would its filter let something pass, does a broker serve
its pulls, is a queue locked by somebody who is no member, how much is given back.

None of them moves an offset. A lock is only asked for in a queue that no member claims,
and is given back at once when it was free.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cosmodrome.client.operate.fleet import Fleet, attempt
from cosmodrome.client.operate.reading import pull_request
from cosmodrome.client.operate.standing import QueueStanding
from cosmodrome.client.received import received_all
from cosmodrome.client.values import MessageQueue
from cosmodrome.errors import Code, CosmodromeError, Refused
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import (
    EVERYTHING,
    SQL92,
    TAG,
    BrokerStatsData,
    LockBatchRequestBody,
    LockBatchResponseBody,
    SubscriptionData,
    TopicStatsTable,
)
from cosmodrome.wire.commands.broker import QueryConsumeQueue, ViewBrokerStatsData
from cosmodrome.wire.commands.client import LockBatchMq, UnlockBatchMq
from cosmodrome.wire.commands.consume import PullReply
from cosmodrome.wire.commands.topic import GetTopicStatsInfo
from cosmodrome.wire.names import RETRY_PREFIX, TOOLS_GROUP, dlq_topic, retry_topic
from cosmodrome.wire.report_bodies import QueryConsumeQueueResponseBody

if TYPE_CHECKING:
    from cosmodrome.client.operate.diagnosis.facts import GroupFacts

PROBE_ID = "cosmo-explain"  # in the place of a client id, when a lock is asked for
PULL_COUNT = 32
PULLS_MAX = 64
ROUNDING_MS = 5  # a client that keeps another clock says the same moment a little differently


@dataclasses.dataclass(slots=True)
class FilterFacts:
    """What a group's filter does with the newest messages of a topic."""

    topic: str
    kind: str
    expression: str
    looked_at: int = 0
    passed: int = 0
    tags: dict[str, int] = dataclasses.field(default_factory=dict)  # of some of those messages


@dataclasses.dataclass(frozen=True, slots=True)
class PullRefusal:
    queue: MessageQueue
    code: int
    remark: str


@dataclasses.dataclass(slots=True)
class RetryFacts:
    """Messages that members gave back, and what became of them."""

    returned_minute: int = 0
    returned_hour: int = 0
    returned_day: int = 0
    retry_end: int | None = None  # messages ever in the retry topic
    dead: int | None = None  # dead letters that are kept


async def run(fleet: Fleet, facts: GroupFacts) -> None:
    rows = _rows(facts)
    await asyncio.gather(
        _filters(fleet, facts, rows),
        _pulls(fleet, facts, rows),
        _locks(fleet, facts, rows),
        _retries(fleet, facts),
        _held(fleet, facts),
    )


def _rows(facts: GroupFacts) -> list[QueueStanding]:
    """Queues whose brokers answer."""
    look = facts.after or facts.before
    return [] if look is None else [row for row in look.queues if row.end is not None]


# --- filters -----------------------------------------------------------------------------------


async def _filters(fleet: Fleet, facts: GroupFacts, rows: list[QueueStanding]) -> None:
    for topic, subscription in sorted(facts.subscriptions.items()):
        if (
            topic.startswith(RETRY_PREFIX)
            or subscription.class_filter_mode
            or topic not in facts.topics
            or subscription.sub_string.strip() in ("", EVERYTHING)
        ):
            continue
        found = FilterFacts(topic, subscription.expression_type, subscription.sub_string)
        filled = [
            row for row in rows if row.queue.topic == topic and (row.end or 0) > (row.first or 0)
        ]
        for row in filled[: facts.limits.queues_probed_max]:
            address = facts.brokers[row.queue.broker_name].address
            end, first = row.end or 0, row.first or 0
            start = max(first, end - facts.limits.filtered_messages)
            if subscription.expression_type == TAG:
                await _by_tag(fleet, address, row.queue, start, end, subscription, found)
            elif subscription.expression_type == SQL92:
                await _by_expression(fleet, address, row.queue, start, end, subscription, found)
            if sum(found.tags.values()) < PULL_COUNT:
                await _tags(fleet, address, row.queue, max(first, end - PULL_COUNT), found)
        if found.looked_at:
            facts.filters.append(found)


async def _by_tag(
    fleet: Fleet,
    address: str,
    queue: MessageQueue,
    start: int,
    end: int,
    subscription: SubscriptionData,
    found: FilterFacts,
) -> None:
    """The queue has the hash of every message's tag."""
    ask = QueryConsumeQueue(
        topic=queue.topic, queue_id=queue.queue_id, index=start, count=end - start
    )
    reply = await attempt(fleet.call(address, ask))
    if isinstance(reply, CosmodromeError):
        return
    entries = bodies.decode(QueryConsumeQueueResponseBody, reply.body).queue_data
    codes = set(subscription.code_set)
    found.looked_at += len(entries)
    found.passed += sum(entry.tags_code in codes for entry in entries)


async def _by_expression(
    fleet: Fleet,
    address: str,
    queue: MessageQueue,
    start: int,
    end: int,
    subscription: SubscriptionData,
    found: FilterFacts,
) -> None:
    """The broker judges: pull with the same expression, as nobody."""
    at = start
    for _ in range(PULLS_MAX):
        reply = await _pull(fleet, address, queue, at, TOOLS_GROUP, subscription)
        if isinstance(reply, CosmodromeError) or reply.next_begin_offset <= at:
            return
        if reply.code == Code.SUCCESS:
            found.passed += len(received_all(reply.body, queue.broker_name, namespace=""))
        elif reply.code != Code.PULL_RETRY_IMMEDIATELY:
            return
        found.looked_at += min(reply.next_begin_offset, end) - at
        at = reply.next_begin_offset
        if at >= end:
            return


async def _tags(
    fleet: Fleet, address: str, queue: MessageQueue, start: int, found: FilterFacts
) -> None:
    reply = await _pull(fleet, address, queue, start, TOOLS_GROUP, None)
    if isinstance(reply, CosmodromeError) or reply.code != Code.SUCCESS:
        return
    messages = received_all(reply.body, queue.broker_name, namespace="")
    counts = collections.Counter(message.tags or "(none)" for message in messages)
    for tag, count in counts.most_common(10):
        found.tags[tag] = found.tags.get(tag, 0) + count


async def _pull(
    fleet: Fleet,
    address: str,
    queue: MessageQueue,
    offset: int,
    group: str,
    subscription: SubscriptionData | None,
) -> PullReply | CosmodromeError:
    request = pull_request(queue, offset, PULL_COUNT, group, subscription)
    return await attempt(fleet.call(address, request))


# --- pulls, locks, retries ---------------------------------------------------------------------


async def _pulls(fleet: Fleet, facts: GroupFacts, rows: list[QueueStanding]) -> None:
    """As the group, at the end of one queue per topic and broker: nothing is read there."""
    tried: set[tuple[str, str]] = set()
    for row in rows:
        queue = row.queue
        pair = (queue.topic, queue.broker_name)
        if pair in tried or queue.broker_name not in facts.configs:
            continue  # a pull would create the group where it does not exist
        tried.add(pair)
        address = facts.brokers[queue.broker_name].address
        reply = await _pull(fleet, address, queue, row.end or 0, facts.group, None)
        if isinstance(reply, Refused):
            facts.refusals.append(PullRefusal(queue, reply.code, reply.remark))


async def _locks(fleet: Fleet, facts: GroupFacts, rows: list[QueueStanding]) -> None:
    if not facts.ordered or not facts.all_reported:
        return  # a member that was not heard may be the one that has the lock
    claimed = facts.claimed_queues
    free = [row.queue for row in rows if row.queue not in claimed and row.lag != 0]
    for queue in free[: facts.limits.queues_probed_max]:
        if not await _lockable(fleet, facts, queue):
            facts.foreign_locks.add(queue)


async def _lockable(fleet: Fleet, facts: GroupFacts, queue: MessageQueue) -> bool:
    address = facts.brokers[queue.broker_name].address
    lock = LockBatchRequestBody(client_id=PROBE_ID, consumer_group=facts.group, mq_set=[queue])
    body = bodies.encode(lock)
    reply = await attempt(fleet.call(address, LockBatchMq(body=body)))
    if isinstance(reply, CosmodromeError):
        return True  # not known, and nothing is claimed that is not known
    taken = queue in bodies.decode(LockBatchResponseBody, reply.body).lock_ok_mq_set
    if taken:
        # The same members say what is given back.
        await attempt(fleet.call(address, UnlockBatchMq(body=body)))
    return taken


async def _held(fleet: Fleet, facts: GroupFacts) -> None:
    """How old is what members hold where nothing moves? A queue may have been idle for hours before
    the message came that a handler works on now."""
    still: dict[MessageQueue, int] = {}
    for member in facts.members.values():
        if len(member.looks) > 1:
            before, after = member.looks[0].mq_table, member.looks[-1].mq_table
            for queue, info in after.items():
                if queue in before and stands_still(before[queue], info):
                    still[queue] = number(info, "cachedMsgMinOffset")
    for queue, offset in list(still.items())[: facts.limits.queues_probed_max]:
        broker = facts.brokers.get(queue.broker_name)
        if broker is None or not broker.reachable:
            continue
        reply = await _pull(fleet, broker.address, queue, offset, TOOLS_GROUP, None)
        if isinstance(reply, CosmodromeError) or reply.code != Code.SUCCESS:
            continue
        for message in received_all(reply.body, queue.broker_name, namespace=""):
            if message.queue_offset == offset:
                facts.held_since_ms[queue] = message.store_ms


def stands_still(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether a member has messages of a queue in hand and finished none between two looks."""
    apart_ms = number(after, "lastConsumeTimestamp") - number(before, "lastConsumeTimestamp")
    return (
        number(after, "cachedMsgCount") > 0
        and abs(apart_ms) <= ROUNDING_MS
        and all(
            number(before, name) == number(after, name)
            for name in ("cachedMsgMinOffset", "commitOffset")
        )
    )


def number(says: Mapping[str, Any], name: str, default: int = 0) -> int:
    """A figure of a report; clients write them as numbers or as text."""
    try:
        return int(says.get(name, default))
    except (TypeError, ValueError):
        return default


async def _retries(fleet: Fleet, facts: GroupFacts) -> None:
    retries = facts.retries
    for broker in facts.brokers.values():
        if not broker.reachable:
            continue
        for topic in facts.looked_at:
            ask = ViewBrokerStatsData(
                stats_name="SNDBCK_PUT_NUMS", stats_key=f"{topic}@{facts.group}"
            )
            reply = await attempt(fleet.call(broker.address, ask))
            if not isinstance(reply, CosmodromeError):
                data = bodies.decode(BrokerStatsData, reply.body)
                retries.returned_minute += data.stats_minute.sum
                retries.returned_hour += data.stats_hour.sum
                retries.returned_day += data.stats_day.sum
        end, _ = await _ends(fleet, broker.address, retry_topic(facts.group))
        if end is not None:
            retries.retry_end = (retries.retry_end or 0) + end
        end, first = await _ends(fleet, broker.address, dlq_topic(facts.group))
        if end is not None and first is not None:
            retries.dead = (retries.dead or 0) + end - first


async def _ends(fleet: Fleet, address: str, topic: str) -> tuple[int | None, int | None]:
    reply = await attempt(fleet.call(address, GetTopicStatsInfo(topic=topic)))
    if isinstance(reply, CosmodromeError):
        return None, None
    rows = bodies.decode(TopicStatsTable, reply.body).offset_table.values()
    return sum(row.max_offset for row in rows), sum(row.min_offset for row in rows)
