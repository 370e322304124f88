"""Pulls: at one offset, or for a window again and again until it is dropped.

A broker without new messages holds the request (long polling), so an idle queue costs one request
per hold and a new message arrives at once. The loop of a window waits while the window is full.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import logging
from typing import Protocol

from cosmodrome.client.instance import Instance
from cosmodrome.client.receive.engine.decoding import Arrivals, Decoder
from cosmodrome.client.receive.engine.options import ReadOptions
from cosmodrome.client.receive.engine.queue_calls import queue_address
from cosmodrome.client.receive.engine.replicas import Replicas
from cosmodrome.client.receive.engine.report import Rates
from cosmodrome.client.receive.engine.subscriptions import Subscription
from cosmodrome.client.receive.engine.window import Window
from cosmodrome.client.values import MessageQueue, ReceivedMessage
from cosmodrome.errors import (
    Code,
    CosmodromeError,
    ProtocolError,
    Refused,
    TimedOut,
    Unreachable,
)
from cosmodrome.layout import PULL_COMMIT, PULL_SUBSCRIPTION, PULL_SUSPEND
from cosmodrome.transport.router import LogLimit
from cosmodrome.wire.bodies import MASTER_ID
from cosmodrome.wire.commands.consume import PullMessage, PullReply

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0  # while a queue is full or paused; changes wake earlier
UNLOCKED_S = 3.0
AFTER_ERROR_S = 1.0
AFTER_FLOW_CONTROL_S = 0.02
AFTER_DAMAGE_S = 3.0
LOG_INTERVAL_S = 10.0  # between lines while a broker is away
# The broker does not know this client, or an older subscription of it.
UNKNOWN_TO_BROKER = frozenset(
    {
        Code.SUBSCRIPTION_NOT_EXIST,
        Code.SUBSCRIPTION_NOT_LATEST,
        Code.SUBSCRIPTION_GROUP_NOT_EXIST,
        Code.FILTER_DATA_NOT_EXIST,
        Code.FILTER_DATA_NOT_LATEST,
    }
)


class PullStatus(enum.Enum):
    FOUND = Code.SUCCESS
    NO_NEW = Code.PULL_NOT_FOUND
    NO_MATCH = Code.PULL_RETRY_IMMEDIATELY
    OFFSET_MOVED = Code.PULL_OFFSET_MOVED


@dataclasses.dataclass(slots=True)
class Pulled:
    """What one pull brought, and where the next one begins. A message whose body cannot be read
    is in its place among the others, as a `DamagedMessage`."""

    status: PullStatus
    messages: list[ReceivedMessage]
    next_offset: int
    min_offset: int
    max_offset: int


class Host(Protocol):
    """Who wants the messages."""

    def subscription(self, queue: MessageQueue) -> Subscription | None: ...

    def arrived(self, window: Window, found: Arrivals) -> None:
        """They are in the window already."""

    async def moved(self, window: Window, offset: int) -> None:
        """The queue has nothing at the window's offset any more; go on at `offset`."""

    def unreadable(self, window: Window, error: ProtocolError) -> None:
        """What a broker answered cannot be taken apart into messages; it is asked again."""


class Puller:
    def __init__(
        self,
        instance: Instance,
        group: str,
        options: ReadOptions,
        decoder: Decoder,
        rates: Rates,
        host: Host,
    ) -> None:
        self._instance = instance
        self._group = group
        self._options = options
        self._decoder = decoder
        self._rates = rates
        self._host = host
        self._replicas = Replicas(instance.routes, asyncio.get_running_loop().time)
        self._log_limit = LogLimit(LOG_INTERVAL_S)

    # --- at one offset ---------------------------------------------------------------------------

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        subscription: Subscription,
        *,
        max_count: int,
        hold_ms: int,
        timeout_ms: int,
    ) -> Pulled:
        """With `hold_ms` the broker waits that long for a message to arrive."""
        reply = await self._ask(
            queue,
            offset,
            subscription,
            max_count=max_count,
            hold_ms=hold_ms,
            timeout_ms=timeout_ms,
        )
        messages: list[ReceivedMessage] = []
        next_offset = reply.next_begin_offset
        if reply.code == Code.SUCCESS:
            # The messages are the caller's at once, so they count in no budget but the pull's.
            found = self._decoded(queue, subscription, reply, self._options.body_bytes_max)
            messages, next_offset = found.messages, _next_offset(found, offset, reply)
        return Pulled(
            status=PullStatus(reply.code),
            messages=messages,
            next_offset=next_offset,
            min_offset=reply.min_offset,
            max_offset=reply.max_offset,
        )

    # --- for a window ----------------------------------------------------------------------------

    async def run(self, window: Window) -> None:
        """Until the window is dropped."""
        time, locks_queues = asyncio.get_running_loop().time, self._options.locks_queues
        while not window.dropped:
            window.pulled_at = time()
            if window.paused or window.full():
                await window.wait(LOOK_AGAIN_S)
                continue
            if locks_queues and not window.is_locked(window.pulled_at):
                await window.wait(UNLOCKED_S)
                continue
            subscription = self._host.subscription(window.queue)
            if subscription is None:
                await window.wait(LOOK_AGAIN_S)
                continue
            pause_s = await self._pull_once(window, subscription)
            if pause_s:
                await window.wait(pause_s)

    async def _pull_once(self, window: Window, subscription: Subscription) -> float:
        """Pull and hand over; how long to wait before the next pull."""
        began = window.pulled_at
        try:
            reply = await self._ask(
                window.queue,
                window.next_offset,
                subscription,
                max_count=self._options.pull_batch,
                hold_ms=self._options.suspend_ms,
                timeout_ms=self._options.pull_timeout_ms,
                done_to=window.done_to,
            )
        except Refused as refusal:
            if refusal.code == Code.FLOW_CONTROL:
                return AFTER_FLOW_CONTROL_S
            self._log_failure(window, refusal)
            if refusal.code in UNKNOWN_TO_BROKER:
                self._instance.heartbeat_soon()
            return AFTER_ERROR_S
        except CosmodromeError as error:
            self._log_failure(window, error)
            # The broker may have moved.
            with contextlib.suppress(CosmodromeError):
                await self._instance.routes.get(window.queue.topic, fresh=True)
            return AFTER_ERROR_S
        if window.dropped:
            return 0.0
        window.min_offset, window.max_offset = reply.min_offset, reply.max_offset
        if reply.code == Code.PULL_OFFSET_MOVED:
            log.warning(
                "offset moved: group=%s queue=%s from=%d to=%d min=%d max=%d",
                self._group,
                window.queue,
                window.next_offset,
                reply.next_begin_offset,
                reply.min_offset,
                reply.max_offset,
            )
            await self._host.moved(window, reply.next_begin_offset)
            return AFTER_FLOW_CONTROL_S
        if reply.code != Code.SUCCESS:
            # Only OFFSET_MOVED leads back.
            window.next_offset = max(window.next_offset, reply.next_begin_offset)
            return self._options.pull_interval_ms / 1000
        try:
            if not self._take(window, subscription, reply, began):
                window.wait_for_room()
                return LOOK_AGAIN_S
        except ProtocolError as error:
            log.error(
                "pulled records cannot be read: group=%s queue=%s offset=%d reason=%s",
                self._group,
                window.queue,
                window.next_offset,
                error,
            )
            self._host.unreadable(window, error)
            return AFTER_DAMAGE_S
        return self._options.pull_interval_ms / 1000

    def _take(
        self, window: Window, subscription: Subscription, reply: PullReply, began: float
    ) -> bool:
        """False when there was no room, not even for the first message."""
        room = window.room(self._options.body_bytes_max)
        found = self._decoded(window.queue, subscription, reply, room)
        next_offset = _next_offset(found, window.next_offset, reply)
        if next_offset == window.next_offset and found.cut_at is not None:
            return False
        self._rates.pulled(window.queue.topic, len(found.messages), began)
        window.add(found.messages, found.size, found.inflated)
        # Only now: while nobody has them yet, the window ends before them.
        window.next_offset = next_offset
        if found.messages:
            self._host.arrived(window, found)
        return True

    # --- both ------------------------------------------------------------------------------------

    async def _ask(
        self,
        queue: MessageQueue,
        offset: int,
        subscription: Subscription,
        *,
        max_count: int,
        hold_ms: int,
        timeout_ms: int,
        done_to: int = 0,
    ) -> PullReply:
        instance, name = self._instance, queue.broker_name
        address = self._replicas.address(queue)
        if address is None:
            address = await queue_address(instance, queue)
        flags = self._options.pull_flags
        if hold_ms:
            flags |= PULL_SUSPEND
        commits = not flags & PULL_SUBSCRIPTION and self._options.clustering and done_to > 0
        # A slave must not take commits: only the master's offsets are the group's.
        if commits and address == instance.routes.address(name, MASTER_ID):
            flags |= PULL_COMMIT
        command = PullMessage(
            consumer_group=self._group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            queue_offset=offset,
            max_msg_nums=max_count,
            sys_flag=flags,
            commit_offset=done_to if flags & PULL_COMMIT else 0,
            suspend_timeout_millis=hold_ms,
            subscription=subscription.expression if flags & PULL_SUBSCRIPTION else None,
            sub_version=subscription.version,
            expression_type=subscription.kind,
        )
        try:
            reply = await instance.links.call(address, command, timeout_ms)
        except (Unreachable, TimedOut) as error:
            self._replicas.failed(queue, address, error)
            raise
        self._replicas.answered(address)
        self._replicas.suggest(queue, reply.suggest_which_broker_id)
        return reply

    def _decoded(
        self, queue: MessageQueue, subscription: Subscription, reply: PullReply, room: int
    ) -> Arrivals:
        return self._decoder.decode(
            reply.body,
            queue.broker_name,
            subscription,
            min_offset=reply.min_offset,
            max_offset=reply.max_offset,
            room=room,
        )

    def _log_failure(self, window: Window, error: CosmodromeError) -> None:
        held = None if window.dropped else self._log_limit.admit("pull failed")
        if held is not None:
            log.warning(
                "pull failed: group=%s queue=%s offset=%d reason=%s held_back=%d",
                self._group,
                window.queue,
                window.next_offset,
                error,
                held,
            )


def _next_offset(found: Arrivals, asked: int, reply: PullReply) -> int:
    """Where the next pull begins; ProtocolError when that would bring the same messages again, or
    leave some out."""
    if reply.next_begin_offset <= asked:
        raise ProtocolError(
            f"an answer with messages of offset {asked} says to go on at {reply.next_begin_offset}"
        )
    if found.cut_at is None:
        return reply.next_begin_offset
    if not asked <= found.cut_at < reply.next_begin_offset:
        raise ProtocolError(
            f"a message of offset {found.cut_at} is in an answer about offsets {asked} to"
            f" {reply.next_begin_offset - 1}"
        )
    return found.cut_at
