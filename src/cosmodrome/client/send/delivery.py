"""One send request with all its attempts, as a value; `sending` moves it along."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from cosmodrome.client.send.failures import Attempt
from cosmodrome.client.send.hooks import SendContext, SendMode
from cosmodrome.client.send.packing import Packed
from cosmodrome.client.values import Message, MessageQueue, SendResult, SendStatus
from cosmodrome.errors import CosmodromeError
from cosmodrome.transport.connection import SocketConnection
from cosmodrome.wire.commands.produce import SendMessageV2
from cosmodrome.wire.frame import Frame

Selector = Callable[[Sequence[MessageQueue], Message], MessageQueue]


class Outcomes(Protocol):
    """Learns how an attempt ended."""

    def answered(self, delivery: Delivery, frame: Frame) -> None: ...

    def attempt_failed(self, delivery: Delivery, error: CosmodromeError) -> None: ...


class Delivery:
    """One request for one message. Waits for its own answer (see `wire.session.Waiter`)."""

    code = SendMessageV2.request_code
    batch = "false"

    __slots__ = (
        "address",
        "began",
        "bytes",
        "connection",
        "context",
        "deadline",
        "ended",
        "fixed",
        "future",
        "last_broker",
        "mode",
        "opaque",
        "packed",
        "queue",
        "retries_left",
        "selector",
        "sender",
        "stored",
        "tried",
    )

    def __init__(
        self,
        sender: Outcomes,
        packed: Packed,
        future: asyncio.Future[Any],
        deadline: float,
        *,
        mode: SendMode,
        retries: int = 0,
        fixed: MessageQueue | None = None,
        selector: Selector | None = None,
    ) -> None:
        self.sender = sender
        self.packed = packed
        self.future = future
        self.deadline = deadline
        self.mode = mode
        self.fixed = fixed
        self.selector = selector
        chosen = fixed is not None or selector is not None or packed.message.queue_key is not None
        self.retries_left = 0 if chosen else retries
        self.bytes = len(packed.body)
        self.queue: MessageQueue | None = None
        self.address = ""
        self.began = 0.0
        self.connection: SocketConnection | None = None
        self.opaque = 0
        self.context: SendContext | None = None
        self.tried: tuple[Attempt, ...] = ()
        self.last_broker: str | None = None
        self.stored: Sequence[SendResult] | None = None  # by an attempt that was not good enough
        self.ended = False

    # --- what kinds of deliveries differ in --------------------------------------------------

    @property
    def count(self) -> int:
        return 1

    @property
    def members(self) -> Sequence[Packed]:
        return (self.packed,)

    @property
    def abandoned(self) -> bool:
        """Nobody waits for it any more."""
        return self.future.cancelled()

    def request(self) -> tuple[int, str, str, bytes]:
        """System flag, flag, properties and body."""
        packed = self.packed
        return packed.sys_flag, str(packed.message.flag), packed.properties, packed.body

    def results(
        self, status: SendStatus, queue: MessageQueue, frame: Frame
    ) -> Sequence[SendResult]:
        ext = frame.ext
        return (
            SendResult(
                status,
                self.packed.msg_id,
                queue,
                int(ext["queueOffset"]),
                ext["msgId"],
                ext.get("transactionId"),
                ext.get("recallHandle"),
                ext.get("MSG_REGION"),
            ),
        )

    def succeed(self, results: Sequence[SendResult]) -> None:
        if not self.future.done():
            self.future.set_result(results[0])

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    # --- the waiter of the session -----------------------------------------------------------

    def done(self) -> bool:
        return self.ended

    def set_result(self, frame: Frame) -> None:
        self.sender.answered(self, frame)

    def set_exception(self, error: CosmodromeError) -> None:
        self.sender.attempt_failed(self, error)
