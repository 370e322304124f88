"""Hooks that users add to sending: they see every attempt, or forbid it."""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from cosmodrome.client.values import Message, MessageQueue, SendResult
from cosmodrome.errors import CosmodromeError

log = logging.getLogger(__name__)


class SendMode(enum.Enum):
    SYNC = "sync"
    ASYNC = "async"
    ONEWAY = "oneway"


class MessageKind(enum.IntEnum):
    """The numbers are those of trace records."""

    NORMAL = 0
    HALF = 1
    COMMIT = 2
    DELAY = 3


@dataclasses.dataclass(slots=True)
class SendContext:
    """One attempt; a batch has several messages. Names are as the user knows them."""

    group: str
    messages: Sequence[Message]
    msg_ids: Sequence[str]
    queue: MessageQueue
    address: str
    mode: SendMode
    kind: MessageKind
    began_ms: int
    body_bytes: Sequence[int]  # as sent, perhaps compressed
    cost_ms: int = 0
    results: Sequence[SendResult] = ()  # after a success
    error: CosmodromeError | None = None  # after a failure
    trace_on: bool = True  # whether the broker wants this message traced


@runtime_checkable
class SendHook(Protocol):
    """Sees every attempt. What it raises is logged and changes nothing."""

    def before_send(self, context: SendContext) -> None: ...

    def after_send(self, context: SendContext) -> None: ...


@runtime_checkable
class ForbidHook(Protocol):
    """Raises to forbid an attempt; the sender gets that exception."""

    def check_forbidden(self, context: SendContext) -> None: ...


@runtime_checkable
class PrepareHook(Protocol):
    """Sees every message once, before it is packed, and may set `message.properties`."""

    def prepare(self, message: Message) -> None: ...


Hook = SendHook | ForbidHook | PrepareHook


class Hooks:
    """The hooks of one producer; false when there are none."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._watching: list[SendHook] = []
        self._forbidding: list[ForbidHook] = []
        self._preparing: list[PrepareHook] = []
        for hook in hooks:
            self.add(hook)

    def add(self, hook: Hook) -> None:
        forbids = isinstance(hook, ForbidHook)
        watches = isinstance(hook, SendHook)
        if isinstance(hook, ForbidHook):
            self._forbidding.append(hook)
        if isinstance(hook, SendHook):
            self._watching.append(hook)
        if isinstance(hook, PrepareHook):
            self._preparing.append(hook)
        elif not forbids and not watches:
            raise TypeError(
                f"{hook!r} is no hook; it needs before_send and after_send, check_forbidden, or"
                " prepare"
            )

    def __bool__(self) -> bool:
        return bool(self._watching or self._forbidding)

    @property
    def prepares(self) -> bool:
        """Whether `prepare` does anything."""
        return bool(self._preparing)

    def prepare(self, message: Message) -> None:
        for hook in self._preparing:
            try:
                hook.prepare(message)
            except Exception:
                log.exception("prepare failed: hook=%r", hook)

    def before(self, context: SendContext) -> None:
        for forbidding in self._forbidding:
            forbidding.check_forbidden(context)
        for hook in self._watching:
            try:
                hook.before_send(context)
            except Exception:
                log.exception("before_send failed: hook=%r", hook)

    def after(self, context: SendContext) -> None:
        for hook in self._watching:
            try:
                hook.after_send(context)
            except Exception:
                log.exception("after_send failed: hook=%r", hook)
