"""Sends messages: one by one, pipelined, in batches, one-way, as requests that expect a reply.

    async with Producer("127.0.0.1:9876", group="orders") as producer:
        result = await producer.send(Message("orders", b"..."))

A send is acknowledged when `await` returns; how safe the message is then is the broker's
`flushDiskType`. A failed send may still be stored (see `SendFailed`), so consumers must cope with
duplicates. The window bounds what is on its way: `send` waits for room, `submit` raises Busy.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import Mapping, Sequence
from typing import Unpack

from cosmodrome.client.instance import Instance, acquire, release
from cosmodrome.client.namespace import wrap
from cosmodrome.client.options import ClientOptions
from cosmodrome.client.send.batching import BatchDelivery, Gatherer, check_batch, split
from cosmodrome.client.send.delivery import Delivery, Selector
from cosmodrome.client.send.failures import BadMessage, BatchFailed, Busy, NotRunning, SendTimedOut
from cosmodrome.client.send.hooks import Hooks, SendMode
from cosmodrome.client.send.packing import Packed, Packer, batch_hindrance
from cosmodrome.client.send.producer_options import ProducerOptions, ProducerSettings
from cosmodrome.client.send.requests import Requests
from cosmodrome.client.send.sending import Sender
from cosmodrome.client.send.window import Window
from cosmodrome.client.trace import TraceRecorder
from cosmodrome.client.values import Message, MessageQueue, ReceivedMessage, SendResult
from cosmodrome.env.base import Env
from cosmodrome.env.lifecycle import AsyncLifecycle
from cosmodrome.env.real import real_env
from cosmodrome.errors import ConfigError, CosmodromeError, Refused
from cosmodrome.wire.commands.produce import RecallMessage
from cosmodrome.wire.commands.transaction import CheckTransactionState
from cosmodrome.wire.names import TRACE_TOPIC, check_group

log = logging.getLogger(__name__)

OFFLOAD_ABOVE_BYTES = 128 * 1024  # bodies from here on are compressed off the loop
GROUPS_FORBIDDEN = frozenset({"DEFAULT_PRODUCER", "DEFAULT_CONSUMER"})


class Producer(AsyncLifecycle):
    """One producer of a group; use it as an async context manager, from one event loop. Fields of
    `ProducerOptions` are given by name."""

    def __init__(
        self,
        namesrv: str | None = None,
        *,
        group: str,
        client: ClientOptions | None = None,
        trace: bool = False,
        trace_topic: str = TRACE_TOPIC,
        env: Env | None = None,
        **settings: Unpack[ProducerSettings],
    ) -> None:
        """`trace` stores what happens to every message in the trace topic, for operators."""
        self.options = client or ClientOptions()
        self.group = wrap(self.options.namespace, group)  # the full name
        try:
            check_group(self.group)
        except Refused as refusal:
            raise ConfigError(refusal.remark) from None
        if group in GROUPS_FORBIDDEN:
            raise ConfigError(f"group {group} is upstream's default; choose a name of your own")
        self._settings = chosen = ProducerOptions(**settings)
        self.send_timeout_ms = chosen.send_timeout_ms
        self._retries = chosen.retries
        self._retries_async = chosen.retries_async
        self._namesrv = namesrv
        self._env = env or real_env()
        self._hooks = Hooks(chosen.hooks)
        self._window = Window(chosen.in_flight_max)
        self._packer = Packer(
            self.options.namespace,
            max_message_bytes=chosen.max_message_bytes,
            compress_above_bytes=chosen.compress_above_bytes,
            compression=chosen.compression,
        )
        if self._hooks.prepares:
            self._packer.prepare = self._hooks.prepare
        self._trace: TraceRecorder | None = None
        if trace:
            self._trace = TraceRecorder(
                namesrv, group, "PRODUCE", self.options, self._env, trace_topic
            )
            self._hooks.add(self._trace)
        self._instance: Instance | None = None
        self._running = False

    # --- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._instance is not None:
            return
        instance = self._instance = await acquire(self._namesrv, self.options, self._env)
        self._loop = asyncio.get_running_loop()
        self._packer.number_with(instance.message_ids)
        if self._trace is not None:
            await self._trace.start()
        self._sender = Sender(
            instance,
            self.group,
            self._window,
            hooks=self._hooks,
            retry_when_not_ok=self._settings.retry_another_broker_when_not_store_ok,
            avoid_slow_brokers=self._settings.latency_fault_avoidance,
            default_topic_queues=self._settings.default_topic_queues,
        )
        self._gatherer = (
            Gatherer(
                self._sender,
                linger_ms=self._settings.linger_ms,
                retries=self._retries_async,
                bytes_max=self._packer.max_message_bytes,
                send_alone=self._post_alone,
            )
            if self._settings.linger_ms
            else None
        )
        self._requests = Requests(instance, self._packed, self._send)
        instance.add_producer(self)
        self._running = True

    async def stop(self) -> None:
        """Wait for what is on its way, but not longer than `close_timeout_ms`."""
        instance = self._instance
        if instance is None or not self._running:
            return
        self._running = False
        try:
            if self._gatherer is not None:
                self._gatherer.flush()
            if not await self._sender.quiet(self._settings.close_timeout_ms / 1000):
                log.warning(
                    "closing without answers: group=%s requests=%d",
                    self.group,
                    self._sender.in_flight,
                )
        finally:
            await self._sender.stop("the producer was closed")
            if self._trace is not None:
                await self._trace.stop()
            await instance.remove_producer(self)
            await release(instance)
            self._instance = None

    @property
    def in_flight(self) -> int:
        """Messages that are not acknowledged yet."""
        return self._window.messages

    def _live(self) -> Instance:
        if not self._running or self._instance is None:
            raise NotRunning(
                "the producer is not running; use it inside `async with Producer(...)`"
            )
        return self._instance

    # --- sending -----------------------------------------------------------------------------

    async def send(
        self,
        message: Message,
        *,
        timeout_ms: int | None = None,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
    ) -> SendResult:
        """Send and wait for the acknowledgement. A message whose queue is chosen (`queue`,
        `selector` or its `queue_key`) is tried once; others may be tried at other brokers."""
        self._live()
        deadline = self._deadline(timeout_ms)
        packed = await self._packed(message)
        return await self._send(packed, deadline, queue=queue, selector=selector)

    async def send_with(self, message: Message, reserved: Mapping[str, str]) -> SendResult:
        """Send with properties whose names are reserved: for the consumer of this package, which
        sends messages back that it could not process."""
        self._live()
        deadline = self._deadline(None)
        return await self._send(await self._packed(message, reserved=reserved), deadline)

    def submit(
        self,
        message: Message,
        *,
        timeout_ms: int | None = None,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
    ) -> asyncio.Future[SendResult]:
        """Send without waiting: the future gets the result. Busy when the window is full."""
        if not self._running:
            self._live()
        window = self._window
        if window.full:
            raise Busy(
                f"{window.messages} messages ({window.bytes} bytes) are not acknowledged yet;"
                " await producer.ready() before the next one"
            )
        packed = self._packer.pack(message, plain=self._gathers(message))
        fixed = None if queue is None else self._full_queue(packed, queue)
        window.take(1, len(packed.body))
        loop = self._loop
        future: asyncio.Future[SendResult] = loop.create_future()
        chosen_ms = self.send_timeout_ms if timeout_ms is None else timeout_ms
        deadline = loop.time() + chosen_ms / 1000
        self._post(packed, future, deadline, fixed, selector, SendMode.ASYNC)
        return future

    async def ready(self) -> None:
        """Return when the window has room."""
        if not self._running:
            self._live()
        if self._window.full:
            await self._window.wait()

    async def send_oneway(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
    ) -> None:
        """Send without acknowledgement: the message may be lost without notice."""
        self._live()
        deadline = self._deadline(None)
        packed = await self._packed(message)
        fixed = None if queue is None else self._full_queue(packed, queue)
        delivery = Delivery(
            self._sender,
            packed,
            self._loop.create_future(),
            deadline,
            mode=SendMode.ONEWAY,
            fixed=fixed,
            selector=selector,
        )
        try:
            async with asyncio.timeout_at(deadline):
                await self._sender.post_oneway(delivery)
        except TimeoutError:
            raise SendTimedOut(message.topic, (), " in time: no room to write") from None

    async def send_batch(
        self,
        messages: Sequence[Message],
        *,
        timeout_ms: int | None = None,
        queue: MessageQueue | None = None,
    ) -> list[SendResult]:
        """Send messages of one topic in as few requests as the size limit allows. Each request is
        stored whole or not at all. BatchFailed has the results of all when some failed."""
        self._live()
        if not messages:
            return []
        deadline = self._deadline(timeout_ms)
        members = [self._packer.pack(message, plain=True) for message in messages]
        check_batch(members)
        fixed = None if queue is None else self._full_queue(members[0], queue)
        sent: list[tuple[int, asyncio.Future[list[SendResult]]]] = []
        for batch in split(members, self._packer.max_message_bytes):
            future: asyncio.Future[list[SendResult]] = self._loop.create_future()
            sent.append((len(batch), future))
            size = sum(len(packed.body) for packed in batch)
            try:
                await self._room(batch[0].message.topic, deadline, len(batch), size)
            except CosmodromeError as error:
                # What left before may well be stored, so its results are waited for below.
                future.set_exception(error)
                continue
            self._sender.post(
                BatchDelivery(
                    self._sender,
                    batch,
                    future,
                    deadline,
                    mode=SendMode.SYNC,
                    retries=self._retries,
                    fixed=fixed,
                )
            )
        await asyncio.gather(*(future for _, future in sent), return_exceptions=True)
        outcomes: list[SendResult | CosmodromeError] = []
        for count, future in sent:
            failure = future.exception()
            if failure is None:
                outcomes.extend(future.result())
            elif isinstance(failure, CosmodromeError):
                outcomes.extend([failure] * count)
            else:
                raise failure
        results = [outcome for outcome in outcomes if isinstance(outcome, SendResult)]
        if len(results) < len(outcomes):
            raise BatchFailed(outcomes)
        return results

    # --- requests and replies, recall --------------------------------------------------------

    async def request(self, message: Message, *, timeout_ms: int = 3_000) -> ReceivedMessage:
        """Send a message and wait for the reply of whoever consumes it."""
        self._live()
        return await self._requests.request(message, timeout_ms)

    async def reply(
        self,
        received: ReceivedMessage,
        body: bytes | str,
        *,
        properties: Mapping[str, str] | None = None,
    ) -> SendResult:
        """Answer a message that was sent with `request`."""
        self._live()
        return await self._requests.reply(received, body, properties)

    async def recall(self, topic: str, recall_handle: str) -> str:
        """Cancel a timed message that is not delivered yet; returns its id."""
        instance = self._live()
        full = wrap(self.options.namespace, topic)
        route = await instance.routes.get(full)
        broker_name = broker_of_handle(recall_handle)
        address = instance.routes.address(broker_name)
        if address is None:
            known = ", ".join(sorted(route.addresses)) or "none"
            raise BadMessage(
                f"the recall handle names broker {broker_name}, which {topic} does not have;"
                f" known brokers: {known}"
            )
        answer = await instance.links.call(
            address,
            RecallMessage(producer_group=self.group, topic=full, recall_handle=recall_handle),
        )
        return answer.msg_id

    # --- what the instance asks --------------------------------------------------------------

    def check_transaction(self, ask: CheckTransactionState, address: str) -> None:
        log.warning(
            "a broker asks about a transaction, but this producer has none: group=%s broker=%s;"
            " use a TransactionProducer in this group",
            self.group,
            address,
        )

    # --- inside ------------------------------------------------------------------------------

    def _deadline(self, timeout_ms: int | None) -> float:
        chosen = self.send_timeout_ms if timeout_ms is None else timeout_ms
        return self._loop.time() + chosen / 1000

    def _gathers(self, message: Message) -> bool:
        """Whether a message may become part of a batch that makes itself."""
        return self._gatherer is not None and len(message.body) < self._packer.compress_above_bytes

    async def _packed(
        self, message: Message, *, reserved: Mapping[str, str] | None = None
    ) -> Packed:
        body, packer = message.body, self._packer
        compressed = None
        at_least = max(OFFLOAD_ABOVE_BYTES, packer.compress_above_bytes)
        if at_least <= len(body) <= packer.max_message_bytes:
            compressed = await self._env.offload(lambda: packer.compress(body))
        return packer.pack(message, compressed=compressed, reserved=reserved)

    async def _send(
        self,
        packed: Packed,
        deadline: float,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        kind: type[Delivery] = Delivery,
    ) -> SendResult:
        fixed = None if queue is None else self._full_queue(packed, queue)
        size = len(packed.body)
        if self._window.full:
            await self._room(packed.message.topic, deadline, 1, size)
        else:
            self._window.take(1, size)
        future: asyncio.Future[SendResult] = self._loop.create_future()
        self._post(packed, future, deadline, fixed, selector, SendMode.SYNC, kind)
        return await future

    async def _room(self, topic: str, deadline: float, count: int, size: int) -> None:
        """Take room in the window before the deadline."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._window.wait(count, size)
        except TimeoutError:
            raise SendTimedOut(
                topic, (), f" in time: {self._window.messages} other messages are on their way"
            ) from None
        if not self._running:
            self._window.give(count, size)
            self._live()

    def _post(
        self,
        packed: Packed,
        future: asyncio.Future[SendResult],
        deadline: float,
        fixed: MessageQueue | None,
        selector: Selector | None,
        mode: SendMode,
        kind: type[Delivery] = Delivery,
    ) -> None:
        if (
            self._gatherer is not None
            and selector is None
            and kind is Delivery
            and batch_hindrance(packed) is None
        ):
            self._gatherer.add(packed, future, deadline, fixed)
            return
        self._sender.post(
            kind(
                self._sender,
                packed,
                future,
                deadline,
                mode=mode,
                retries=self._settings.retries
                if mode is SendMode.SYNC
                else self._settings.retries_async,
                fixed=fixed,
                selector=selector,
            )
        )

    def _post_alone(
        self,
        packed: Packed,
        future: asyncio.Future[SendResult],
        deadline: float,
        fixed: MessageQueue | None,
    ) -> None:
        self._sender.post(
            Delivery(
                self._sender,
                packed,
                future,
                deadline,
                mode=SendMode.ASYNC,
                retries=self._retries_async,
                fixed=fixed,
            )
        )

    def _full_queue(self, packed: Packed, queue: MessageQueue) -> MessageQueue:
        # Topics of the brokers themselves, such as those of replies, are in no namespace.
        if packed.topic not in (queue.topic, wrap(self.options.namespace, queue.topic)):
            raise BadMessage(
                f"the queue is of {queue.topic}, the message of {packed.message.topic}"
            )
        return MessageQueue(
            topic=packed.topic, broker_name=queue.broker_name, queue_id=queue.queue_id
        )


def broker_of_handle(recall_handle: str) -> str:
    """The name of the broker that keeps the timed message of a handle."""
    try:
        parts = base64.urlsafe_b64decode(recall_handle + "==").decode().split(" ")
        if parts[0] == "v1" and len(parts) == 5:
            return parts[2]
    except (binascii.Error, ValueError):
        pass
    raise BadMessage(
        f"{recall_handle[:64]!r} is not a recall handle; use the one of the send's result"
    )
