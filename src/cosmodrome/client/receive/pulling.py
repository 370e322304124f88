"""The pull loop of one queue: ask, hand over, ask again; wait when there is enough already.

A broker without new messages holds the request (long polling), so an idle queue costs one request
per hold and a new message arrives at once.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from cosmodrome.client.instance import Instance
from cosmodrome.client.receive.arrivals import Decoder
from cosmodrome.client.receive.consumer_options import ConsumerOptions
from cosmodrome.client.receive.prefetch import Window
from cosmodrome.client.receive.running import Rates
from cosmodrome.client.receive.subscriptions import Subscription
from cosmodrome.client.routes import MASTER
from cosmodrome.client.values import ReceivedMessage
from cosmodrome.errors import Code, CosmodromeError, ProtocolError, Refused, Unreachable
from cosmodrome.transport.router import LogLimit
from cosmodrome.wire.commands.consume import PullMessage, PullReply

log = logging.getLogger(__name__)

PULL_COMMIT, PULL_SUSPEND = 0x1, 0x2
LOOK_AGAIN_S = 1.0  # while a queue is full or paused; changes wake earlier
UNLOCKED_S = 3.0
AFTER_ERROR_S = 1.0
AFTER_FLOW_CONTROL_S = 0.02
AFTER_DAMAGE_S = 3.0
LOG_INTERVAL_S = 10.0  # between lines while a broker is away
# The broker does not know this client, or an older subscription of it.
UNKNOWN_TO_BROKER = frozenset(
    {
        *(Code.SUBSCRIPTION_NOT_EXIST, Code.SUBSCRIPTION_NOT_LATEST),
        *(Code.SUBSCRIPTION_GROUP_NOT_EXIST, Code.FILTER_DATA_NOT_EXIST),
        Code.FILTER_DATA_NOT_LATEST,
    }
)


class Host(Protocol):
    """Who wants the messages."""

    def subscription(self, topic: str) -> Subscription | None: ...

    def arrived(self, window: Window, messages: list[ReceivedMessage]) -> None:
        """They are in the window already."""

    def damaged(self, window: Window, messages: list[ReceivedMessage]) -> None:
        """The same for messages whose bodies cannot be read."""

    async def moved(self, window: Window, offset: int) -> None:
        """The queue has nothing at the window's offset any more; go on at `offset`."""


class Puller:
    def __init__(
        self,
        instance: Instance,
        group: str,
        options: ConsumerOptions,
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
        self._log_limit = LogLimit(LOG_INTERVAL_S)

    async def run(self, window: Window) -> None:
        """Until the window is dropped."""
        options, time = self._options, asyncio.get_running_loop().time
        needs_lock = options.orderly and options.clustering
        while not window.dropped:
            window.pulled_at = time()
            if window.paused or window.full():
                await window.wait(LOOK_AGAIN_S)
                continue
            if needs_lock and not window.is_locked(window.pulled_at):
                await window.wait(UNLOCKED_S)
                continue
            subscription = self._host.subscription(window.queue.topic)
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
            reply = await self._ask(window, subscription)
        except Refused as refusal:
            if refusal.code == Code.FLOW_CONTROL:
                return AFTER_FLOW_CONTROL_S
            self._failed(window, refusal)
            if refusal.code in UNKNOWN_TO_BROKER:
                self._instance.heartbeat_soon()
            return AFTER_ERROR_S
        except CosmodromeError as error:
            self._failed(window, error)
            return AFTER_ERROR_S
        if window.dropped:
            return 0.0
        window.broker_id = reply.suggest_which_broker_id
        window.min_offset, window.max_offset = reply.min_offset, reply.max_offset
        if reply.code == Code.PULL_OFFSET_MOVED:
            log.warning(
                "offset moved: group=%s queue=%s from=%d to=%d min=%d max=%d",
                *(self._group, window.queue, window.next_offset, reply.next_begin_offset),
                *(reply.min_offset, reply.max_offset),
            )
            await self._host.moved(window, reply.next_begin_offset)
            return AFTER_FLOW_CONTROL_S
        if reply.code == Code.SUCCESS:
            try:
                self._take(window, subscription, reply, began)
            except ProtocolError as error:
                log.error(
                    "pulled records cannot be read: group=%s queue=%s offset=%d reason=%s",
                    *(self._group, window.queue, window.next_offset, error),
                )
                return AFTER_DAMAGE_S
        else:
            window.next_offset = reply.next_begin_offset
        return self._options.pull_interval_ms / 1000

    def _take(
        self, window: Window, subscription: Subscription, reply: PullReply, began: float
    ) -> None:
        found = self._decoder.decode(
            reply.body,
            window.queue.broker_name,
            subscription,
            min_offset=reply.min_offset,
            max_offset=reply.max_offset,
        )
        took_ms = (asyncio.get_running_loop().time() - began) * 1000
        self._rates.pulled(window.queue.topic, len(found.messages), took_ms)
        if found.damaged:
            window.add(found.damaged)
        if found.messages:
            window.add(found.messages)
        # Only now: while nobody has them yet, the window ends before them.
        window.next_offset = reply.next_begin_offset
        if found.damaged:
            self._host.damaged(window, found.damaged)
        if found.messages:
            self._host.arrived(window, found.messages)

    async def _ask(self, window: Window, subscription: Subscription) -> PullReply:
        queue, options, routes = window.queue, self._options, self._instance.routes
        address = routes.address(queue.broker_name, window.broker_id)
        master = routes.address(queue.broker_name, MASTER)
        address = address or master or routes.address(queue.broker_name, 1)
        if address is None:
            raise Unreachable(f"no route has an address of broker {queue.broker_name}")
        done_to = window.done_to
        flags = PULL_SUSPEND
        # A slave must not take commits: only the master's offsets are the group's.
        if options.clustering and done_to > 0 and address == master:
            flags |= PULL_COMMIT
        return await self._instance.links.call(
            address,
            PullMessage(
                consumer_group=self._group,
                topic=queue.topic,
                queue_id=queue.queue_id,
                queue_offset=window.next_offset,
                max_msg_nums=options.pull_batch,
                sys_flag=flags,
                commit_offset=done_to if flags & PULL_COMMIT else 0,
                suspend_timeout_millis=options.suspend_ms,
                sub_version=subscription.version,
                expression_type=subscription.kind,
            ),
            options.pull_timeout_ms,
        )

    def _failed(self, window: Window, error: CosmodromeError) -> None:
        held = None if window.dropped else self._log_limit.admit("pull failed")
        if held is not None:
            log.warning(
                "pull failed: group=%s queue=%s offset=%d reason=%s held_back=%d",
                *(self._group, window.queue, window.next_offset, error, held),
            )
