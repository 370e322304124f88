"""Message trace: records about sends and consumption, themselves sent as messages.

Records gather and leave in batches through a sender of their own, whose messages are not traced.
Tracing never disturbs what it watches: when the buffer is full, records are dropped and counted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterable, Sequence
from typing import Literal

from cosmodrome.client.instance import Instance, acquire, release
from cosmodrome.client.options import ClientOptions
from cosmodrome.client.send.delivery import Delivery
from cosmodrome.client.send.hooks import Hooks, SendContext, SendMode
from cosmodrome.client.send.packing import Packer
from cosmodrome.client.send.sending import Sender
from cosmodrome.client.send.window import Window
from cosmodrome.client.values import Message, ReceivedMessage, SendResult
from cosmodrome.env.base import Env
from cosmodrome.errors import CosmodromeError
from cosmodrome.layout import NAME_END, PAIR_END
from cosmodrome.wire.message import MSG_REGION, TRACE_ON
from cosmodrome.wire.names import TRACE_TOPIC

log = logging.getLogger(__name__)

REGION_DEFAULT = "DefaultRegion"
BODY_BYTES_MAX = 128_000
BATCH_RECORDS = 100
WAITING_MAX = 4_096
FLUSH_S = 0.5
SEND_TIMEOUT_S = 5.0
SEND_RETRIES = 2
STOP_S = 2.0
REQUEST_ID_BITS = 128


@dataclasses.dataclass(frozen=True, slots=True)
class TraceRecord:
    text: str
    keys: tuple[str, ...]  # what the record is found by


class Consumption:
    """One call of a consumer's handler, between its begin and its end."""

    __slots__ = ("began", "group", "messages", "request_id")

    def __init__(
        self, request_id: str, group: str, messages: Sequence[ReceivedMessage], began: float
    ) -> None:
        self.request_id = request_id
        self.group = group
        self.messages = messages
        self.began = began


class TraceRecorder:
    """A `SendHook` for producers, `sub_before` and `sub_after` for consumers."""

    def __init__(
        self,
        namesrv: str | None,
        group: str,
        kind: Literal["PRODUCE", "CONSUME"],
        options: ClientOptions,
        env: Env,
        topic: str = TRACE_TOPIC,
    ) -> None:
        self.dropped = 0
        self._namesrv = namesrv
        self._group = group
        self._inner_group = f"_INNER_TRACE_PRODUCER-{group}-{kind}"
        # Trace topics have no namespace; records hold the names that users know.
        self._options = options
        self._env = env
        self._topic = topic
        self._packer = Packer(
            "", max_message_bytes=1 << 20, compress_above_bytes=4_096, compression="zlib"
        )
        self._waiting: list[TraceRecord] = []
        self._instance: Instance | None = None
        self._sender: Sender | None = None
        self._task: asyncio.Task[None] | None = None
        self._enough = asyncio.Event()

    async def start(self) -> None:
        if self._task is not None:
            return
        self._instance = await acquire(self._namesrv, self._options, self._env)
        self._packer.number_with(self._instance.message_ids)
        self._sender = Sender(
            self._instance, self._inner_group, Window(WAITING_MAX), hooks=Hooks(())
        )
        self._task = asyncio.get_running_loop().create_task(self._flush_forever())

    async def stop(self) -> None:
        """Send what is gathered, for a while at most."""
        task, self._task = self._task, None
        if task is None or self._sender is None or self._instance is None:
            return
        task.cancel()
        await asyncio.wait((task,))
        self._flush()
        await self._sender.quiet(STOP_S)
        await self._sender.stop("the trace was closed")
        await release(self._instance)
        self._instance = self._sender = None

    # --- producers ---------------------------------------------------------------------------

    def before_send(self, context: SendContext) -> None:
        """Nothing is known yet."""

    def after_send(self, context: SendContext) -> None:
        if not context.trace_on or context.queue.topic == self._topic:
            return
        results: Sequence[SendResult | None] = context.results or [None] * len(context.messages)
        ok = bool(context.results)
        for number, message in enumerate(context.messages):
            result = results[number]
            region = (result.region if result else None) or REGION_DEFAULT
            self._add(
                (
                    "Pub",
                    context.began_ms,
                    region,
                    context.group,
                    message.topic,
                    context.msg_ids[number],
                    message.tags,
                    " ".join(message.keys) or None,
                    context.address,
                    context.body_bytes[number],
                    context.cost_ms,
                    int(context.kind),
                    result.offset_msg_id if result else None,
                    _bool_text(ok),
                ),
                (context.msg_ids[number], *message.keys),
            )

    def transaction_ended(
        self,
        *,
        topic: str,
        msg_id: str,
        tags: str | None,
        keys: Iterable[str],
        store_host: str,
        transaction_id: str | None,
        state: str,
        from_check: bool,
    ) -> None:
        keys = tuple(keys)
        self._add(
            (
                "EndTransaction",
                self._env.clock.now_ms(),
                REGION_DEFAULT,
                self._group,
                topic,
                msg_id,
                tags,
                " ".join(keys) or None,
                store_host,
                2,
                transaction_id,
                state,
                _bool_text(from_check),
            ),
            (msg_id, *keys),
        )

    # --- consumers ---------------------------------------------------------------------------

    def sub_before(self, group: str, messages: Sequence[ReceivedMessage]) -> Consumption:
        """A handler begins with these messages; hand what this returns to `sub_after`."""
        traced = [m for m in messages if m.properties.get(TRACE_ON) != "false"]
        request_id = f"{self._env.random.getrandbits(REQUEST_ID_BITS):032X}"
        now_ms = self._env.clock.now_ms()
        for message in traced:
            region = message.properties.get(MSG_REGION) or REGION_DEFAULT
            keys = message.keys
            self._add(
                (
                    "SubBefore",
                    now_ms,
                    region,
                    group,
                    request_id,
                    message.msg_id,
                    message.reconsume_times,
                    " ".join(keys) or None,
                ),
                (message.msg_id, *keys),
            )
        return Consumption(request_id, group, traced, asyncio.get_running_loop().time())

    def sub_after(self, consumption: Consumption, *, success: bool, context_code: int = 0) -> None:
        """The handler ended. Codes: 0 done, 1 too late, 2 raised, 3 answered nothing, 4 failed."""
        if not consumption.messages:
            return
        spent_ms = (asyncio.get_running_loop().time() - consumption.began) * 1000
        cost_ms = round(spent_ms / len(consumption.messages))
        now_ms = self._env.clock.now_ms()
        for message in consumption.messages:
            keys = message.keys
            self._add(
                (
                    "SubAfter",
                    consumption.request_id,
                    message.msg_id,
                    cost_ms,
                    _bool_text(success),
                    " ".join(keys) or None,
                    context_code,
                    now_ms,
                    consumption.group,
                ),
                (message.msg_id, *keys),
            )

    # --- sending -----------------------------------------------------------------------------

    def _add(self, fields: Iterable[object], keys: tuple[str, ...]) -> None:
        if len(self._waiting) >= WAITING_MAX:
            self.dropped += 1
            if self.dropped == 1:
                log.warning("trace records are dropped: more than %d wait", WAITING_MAX)
            return
        text = NAME_END.join(["null" if field is None else str(field) for field in fields])
        self._waiting.append(TraceRecord(text + PAIR_END, keys))
        if len(self._waiting) >= BATCH_RECORDS:
            self._enough.set()

    async def _flush_forever(self) -> None:
        while True:
            try:
                async with asyncio.timeout(FLUSH_S):
                    await self._enough.wait()
            except TimeoutError:
                pass
            self._enough.clear()
            self._flush()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        texts: list[str] = []
        keys: dict[str, None] = {}
        size = 0
        for record in waiting:
            record_bytes = len(record.text.encode())
            if texts and (size + record_bytes > BODY_BYTES_MAX or len(texts) >= BATCH_RECORDS):
                self._send(texts, keys)
                texts, keys, size = [], {}, 0
            texts.append(record.text)
            keys.update(dict.fromkeys(record.keys))
            size += record_bytes
        if texts:
            self._send(texts, keys)

    def _send(self, texts: list[str], keys: Iterable[str]) -> None:
        sender = self._sender
        if sender is None or sender.window.full:
            self.dropped += len(texts)
            return
        try:
            packed = self._packer.pack(Message(self._topic, "".join(texts), keys=keys))
        except CosmodromeError as error:
            self.dropped += len(texts)
            log.warning("trace records are dropped: %s", error)
            return
        loop = asyncio.get_running_loop()
        future: asyncio.Future[SendResult] = loop.create_future()
        future.add_done_callback(self._sent)
        sender.window.take(1, len(packed.body))
        sender.post(
            Delivery(
                sender,
                packed,
                future,
                loop.time() + SEND_TIMEOUT_S,
                mode=SendMode.ASYNC,
                retries=SEND_RETRIES,
            )
        )

    def _sent(self, future: asyncio.Future[SendResult]) -> None:
        if not future.cancelled() and future.exception() is not None:
            log.warning("trace records are lost: %s", future.exception())


def _bool_text(value: bool) -> str:
    return "true" if value else "false"
