"""Several messages in one request: batches that users make, and batches that make themselves.

A broker stores a batch whole or not at all, in one queue, in order. Messages that are delayed,
transactional, compressed or sent back cannot be part of one.

Theory of auto-batching (`Gatherer`). Messages of one topic and one choice of queue gather while a
batch of theirs is on its way, and leave together when it is answered, when they have waited
`linger_ms`, or when a batch is full. With nothing on its way they leave at the end of the loop's
turn: a lone message never waits, and the busier the producer, the fuller its batches.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from cosmodrome.client.send.delivery import Delivery
from cosmodrome.client.send.failures import BadMessage, SendFailed, another
from cosmodrome.client.send.hooks import SendMode
from cosmodrome.client.send.packing import Packed, batch_hindrance
from cosmodrome.client.send.sending import Sender
from cosmodrome.client.values import MessageQueue, SendResult, SendStatus
from cosmodrome.errors import Code
from cosmodrome.layout import BATCH_ITEM_HEAD, NAME_END
from cosmodrome.speed.client import batch_body
from cosmodrome.wire.commands.produce import SendBatchMessage
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.message import WAIT

ITEM_OVERHEAD_BYTES = BATCH_ITEM_HEAD.size + 2
GATHER_MESSAGES_MAX = 512
GATHER_BYTES_MAX = 1 << 20
# Refusals of a whole batch that may concern one of its messages only, or batches as such.
_APART = frozenset({Code.MESSAGE_ILLEGAL, Code.REQUEST_CODE_NOT_SUPPORTED})


def encode_batch(members: Sequence[Packed]) -> bytes:
    """The body of a batch request."""
    return batch_body(members)


def item_bytes(packed: Packed) -> int:
    """At most this many bytes of a batch body; exact when the properties are ASCII."""
    text = packed.properties
    size = len(text) if text.isascii() else len(text.encode())
    return ITEM_OVERHEAD_BYTES + len(packed.body) + size


def check_batch(members: Sequence[Packed]) -> None:
    """BadMessage unless these may travel together."""
    first = members[0]
    for number, packed in enumerate(members):
        why = batch_hindrance(packed)
        if why is None and packed.topic != first.topic:
            why = f"its topic is {packed.message.topic}, that of the first {first.message.topic}"
        if why is None and packed.message.wait_store != first.message.wait_store:
            why = "its wait_store is not that of the first"
        if why is None and packed.message.queue_key != first.message.queue_key:
            why = "its queue_key is not that of the first"
        if why is not None:
            raise BadMessage(
                f"message {number} cannot be in this batch: {why}; nothing was sent, send it alone"
            )


def split(members: Sequence[Packed], bytes_max: int) -> list[list[Packed]]:
    """Batches in the given order, none above the limit unless a single message is."""
    batches: list[list[Packed]] = []
    room = 0
    for packed in members:
        size = item_bytes(packed)
        if size > room or not batches:
            batches.append([])
            room = bytes_max
        batches[-1].append(packed)
        room -= size
    return batches


class BatchDelivery(Delivery):
    """Several messages in one request; the future gets a list of results."""

    code = SendBatchMessage.request_code
    batch = "true"

    __slots__ = ("_members",)

    def __init__(
        self, sender: Sender, members: Sequence[Packed], *rest: Any, **options: Any
    ) -> None:
        super().__init__(sender, members[0], *rest, **options)
        self._members = members
        self.bytes = sum(len(packed.body) for packed in members)

    @property
    def count(self) -> int:
        return len(self._members)

    @property
    def members(self) -> Sequence[Packed]:
        return self._members

    def request(self) -> tuple[int, str, str, bytes]:
        # The batch's own properties are added to each of its messages.
        shared = "" if self.packed.message.wait_store else f"{WAIT}{NAME_END}false"
        return 0, "0", shared, encode_batch(self._members)

    def results(
        self, status: SendStatus, queue: MessageQueue, frame: Frame
    ) -> Sequence[SendResult]:
        ext = frame.ext
        ids: Sequence[str] = ext["msgId"].split(",")
        if len(ids) != len(self._members):
            # Compat: 5.x stores a batch as one record on some topics and names it once.
            ids = [ext["msgId"]] * len(self._members)
        first = int(ext["queueOffset"])
        region = ext.get("MSG_REGION")
        return [
            SendResult(status, packed.msg_id, queue, offset, msg_id, None, None, region)
            for packed, offset, msg_id in zip(self._members, itertools.count(first), ids)
        ]

    def succeed(self, results: Sequence[SendResult]) -> None:
        if not self.future.done():
            self.future.set_result(list(results))


class _Gathered(BatchDelivery):
    """A batch that made itself: every message has a future of its own."""

    __slots__ = ("_futures", "_gatherer", "_group")

    def __init__(
        self,
        gatherer: Gatherer,
        group: _Group,
        sender: Sender,
        members: Sequence[Packed],
        futures: list[asyncio.Future[SendResult]],
        retries: int,
    ) -> None:
        super().__init__(
            sender,
            members,
            futures[0],
            group.deadline,
            mode=SendMode.ASYNC,
            retries=retries,
            fixed=group.fixed,
        )
        self._gatherer = gatherer
        self._group = group
        self._futures = futures

    @property
    def abandoned(self) -> bool:
        return all(future.cancelled() for future in self._futures)

    def succeed(self, results: Sequence[SendResult]) -> None:
        for future, result in zip(self._futures, results, strict=True):
            if not future.done():
                future.set_result(result)
        self._gatherer.returned(self._group)

    def fail(self, error: BaseException) -> None:
        if isinstance(error, SendFailed) and error.code in _APART and len(self._futures) > 1:
            # Nothing of it is stored; alone, each message gets the answer that is its own.
            for packed, future in zip(self._members, self._futures, strict=True):
                self._gatherer.send_alone(packed, future, self.deadline, self.fixed)
        else:
            for future in self._futures:
                if not future.done():
                    future.set_exception(another(error))
        self._gatherer.returned(self._group)


_Key = tuple[str, bool, MessageQueue | str | None]


class _Group:
    """Messages that wait to leave together."""

    __slots__ = ("bytes", "deadline", "fixed", "futures", "key", "members", "out", "timer")

    def __init__(self, key: _Key, fixed: MessageQueue | None) -> None:
        self.key = key
        self.fixed = fixed
        self.members: list[Packed] = []
        self.futures: list[asyncio.Future[SendResult]] = []
        self.bytes = 0
        self.deadline = 0.0
        self.out = 0  # batches on their way
        self.timer: asyncio.Handle | None = None


class Gatherer:
    """Makes batches out of single sends; room in the window was taken by the sends."""

    def __init__(
        self,
        sender: Sender,
        *,
        linger_ms: float,
        retries: int,
        bytes_max: int,
        send_alone: Callable[
            [Packed, asyncio.Future[SendResult], float, MessageQueue | None], None
        ],
    ) -> None:
        self._sender = sender
        self._linger_s = linger_ms / 1000
        self._retries = retries
        self._bytes_max = min(bytes_max, GATHER_BYTES_MAX)
        self._send_alone = send_alone
        self._loop = asyncio.get_running_loop()
        self._groups: dict[_Key, _Group] = {}

    def add(
        self,
        packed: Packed,
        future: asyncio.Future[SendResult],
        deadline: float,
        fixed: MessageQueue | None,
    ) -> None:
        message = packed.message
        key: _Key = (packed.topic, message.wait_store, fixed or message.queue_key)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(key, fixed)
        text = packed.properties
        size = ITEM_OVERHEAD_BYTES + len(packed.body)
        size += len(text) if text.isascii() else len(text.encode())
        if group.members and group.bytes + size > self._bytes_max:
            self._leave(group)
        if not group.members:
            group.deadline = deadline
            if group.out:
                group.timer = self._loop.call_later(self._linger_s, self._leave, group)
            else:
                group.timer = self._loop.call_soon(self._leave, group)
        elif deadline < group.deadline:
            group.deadline = deadline
        group.members.append(packed)
        group.futures.append(future)
        group.bytes += size
        if len(group.members) >= GATHER_MESSAGES_MAX:
            self._leave(group)

    def returned(self, group: _Group) -> None:
        """A batch of this group is answered."""
        group.out -= 1
        if group.out:
            return
        if group.members:
            self._leave(group)
        elif self._groups.get(group.key) is group:
            del self._groups[group.key]

    def send_alone(
        self,
        packed: Packed,
        future: asyncio.Future[SendResult],
        deadline: float,
        fixed: MessageQueue | None,
    ) -> None:
        # The batch that failed gave its room back.
        self._sender.window.take(1, len(packed.body))
        self._send_alone(packed, future, deadline, fixed)

    def flush(self) -> None:
        """Let everything leave now."""
        for group in list(self._groups.values()):
            self._leave(group)

    def _leave(self, group: _Group) -> None:
        if group.timer is not None:
            group.timer.cancel()
            group.timer = None
        if not group.members:
            return
        members, futures = group.members, group.futures
        group.members, group.futures, group.bytes = [], [], 0
        group.out += 1
        if len(members) == 1:
            futures[0].add_done_callback(lambda _: self.returned(group))
            self._send_alone(members[0], futures[0], group.deadline, group.fixed)
            return
        self._sender.post(
            _Gathered(
                gatherer=self,
                group=group,
                sender=self._sender,
                members=members,
                futures=futures,
                retries=self._retries,
            )
        )
