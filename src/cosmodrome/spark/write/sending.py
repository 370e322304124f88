"""Gets a task's messages to brokers: which queue, in what order, and again when a send fails.

Theory of operation. Every queue of a topic is a line. A row joins the line of its `queue_key`; rows
without one join in runs of `batch_rows`, line after line, beginning at the partition's number. So a
repeated task puts the same rows into the same queues. A line whose batch is full leaves: one
request is on its way per line, so a retry never overtakes; different lines are the pipeline. `add`
returns only when there is room again, and nobody reads further rows before that.

A failed batch is sent again to the same queue, later each time. One without keyed rows turns to
another broker once its own cannot be reached. From the second request on its messages carry the
mark, because the first may have been stored. The very first batch of a task goes alone, and before
it goes its first row is looked for in the topic (`repeats` says why).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterable

import msgspec

from cosmodrome import speed
from cosmodrome.client.instance import Instance
from cosmodrome.client.namespace import wrap
from cosmodrome.client.send.batching import encode_batch, item_bytes
from cosmodrome.client.send.failures import Attempt, SendFailed, SendTimedOut
from cosmodrome.client.send.hooks import MessageKind
from cosmodrome.client.send.packing import Packed, batch_hindrance
from cosmodrome.client.values import MessageQueue, NoRoute
from cosmodrome.env.backoff import Backoff
from cosmodrome.errors import Code, CosmodromeError, Refused, TimedOut, Unreachable
from cosmodrome.layout import NAME_END, PAIR_END
from cosmodrome.spark import links
from cosmodrome.spark.write.options import WriteOptions
from cosmodrome.spark.write.repeats import MARK, WritePart
from cosmodrome.wire.commands.consume import QueryMessage
from cosmodrome.wire.commands.produce import SendBatchMessage, SendMessageV2
from cosmodrome.wire.message import UNIQ_KEY, parse_properties
from cosmodrome.wire.names import AUTO_CREATE_TOPIC
from cosmodrome.wire.record import decode_records

log = logging.getLogger(__name__)

# Refusals that may pass: overload, a broker that starts or stops, a topic not known everywhere yet.
RETRY_CODES = frozenset(
    {
        Code.SYSTEM_ERROR,
        Code.SYSTEM_BUSY,
        Code.FLOW_CONTROL,
        Code.SERVICE_NOT_AVAILABLE,
        Code.NO_PERMISSION,
        Code.TOPIC_NOT_EXIST,
    }
)
BACKOFF_FIRST_S = 0.2
BACKOFF_MAX_S = 5.0
MOVE_AFTER = 2  # attempts that did not reach the broker
DOWN_S = 30.0  # that a broker is avoided afterwards
DEFAULT_TOPIC_QUEUES = 4
EVER_MS = 2**63 - 1
HAND_OVER_TURNS = 3  # of the loop: a task begins, writes, and the connection's output leaves


class Line:
    """What waits for, or is on its way to, one queue."""

    __slots__ = ("bytes", "keyed", "members", "queue", "task", "turn")

    def __init__(self, queue: MessageQueue) -> None:
        self.queue = queue
        self.turn = asyncio.Lock()  # held while a request to this queue is out
        self.task: asyncio.Task[None] | None = None
        self.clear()

    def clear(self) -> None:
        self.members: list[Packed] = []
        self.bytes = 0
        self.keyed = False


@dataclasses.dataclass(slots=True)
class _Topic:
    lines: list[Line]
    keyless: int = 0  # rows without key so far


class Outbox:
    """The sends of one task."""

    def __init__(self, instance: Instance, options: WriteOptions, part: WritePart) -> None:
        self.sent = 0  # messages acknowledged
        self.resent = 0  # of these, sent more than once
        self._instance = instance
        self._options = options
        self._group = wrap(options.connection.namespace, options.producer_group)
        self._part = part
        self._marked = part.may_repeat
        self._topics: dict[str, _Topic] = {}
        self._first: Line | None = None  # with the first row, until it has left
        self._opened = False  # the first batch is acknowledged
        self._out: set[asyncio.Task[None]] = set()
        self._down: dict[str, float] = {}  # brokers, and until when they are avoided
        self._failure: CosmodromeError | None = None
        self._loop = asyncio.get_running_loop()

    async def add(self, messages: Iterable[Packed]) -> None:
        """Take these rows; returns when there is room for more."""
        batch_rows, batch_bytes = self._options.batch_rows, self._options.batch_bytes
        for packed in messages:
            topic = self._topics.get(packed.topic) or await self._open(packed.topic)
            key = packed.message.queue_key
            if key is None:
                turn = self._part.partition + topic.keyless // batch_rows
                topic.keyless += 1
            else:
                # Compat: the same queue as the Java client's selector by hash.
                turn = abs(speed.java_hash(key))
            line = topic.lines[turn % len(topic.lines)]
            if self._first is None and not self._opened:
                self._first = line
            size = item_bytes(packed)
            alone = batch_hindrance(packed) is not None
            if line.members and (alone or line.bytes + size > batch_bytes):
                await self._leave(line)
            line.members.append(packed)
            line.bytes += size
            line.keyed = line.keyed or key is not None
            if (
                alone
                or len(line.members) >= batch_rows
                or (key is None and topic.keyless % batch_rows == 0)
            ):
                await self._leave(line)

    async def hand_over(self) -> None:
        """Let requests reach the sockets and answers be handled, for a caller that blocks the
        loop."""
        for _ in range(HAND_OVER_TURNS):
            await asyncio.sleep(0)

    async def finish(self) -> None:
        """Send what waits; everything is acknowledged when this returns."""
        for topic in self._topics.values():
            for line in topic.lines:
                if line.members:
                    await self._leave(line)
        while self._out:
            await asyncio.wait(self._out)
        self._check()

    async def give_up(self) -> None:
        """Begin no further attempt and wait for the requests that are out, so that they do not
        overlap with the task that follows a failed one."""
        if self._failure is None:
            self._failure = CosmodromeError("the task failed")
        if self._out:
            await asyncio.wait(self._out)

    # --- leaving -----------------------------------------------------------------------------

    async def _open(self, name: str) -> _Topic:
        try:
            route = await self._instance.routes.for_sending(name)
        except CosmodromeError as error:
            raise links.explained(error, self._options.connection) from error.__cause__
        if not route.write_queues:
            raise NoRoute(
                f"topic {name} has no queue that takes messages;"
                " check its permission and that the master of its broker runs"
            )
        topic = self._topics[name] = _Topic([Line(queue) for queue in route.write_queues])
        return topic

    async def _leave(self, line: Line) -> None:
        if not self._opened:
            first = line if self._first is None else self._first
            self._opened = True
            if not self._marked:
                await self._look_for(first.members[0])
            self._start(first)
            assert first.task is not None
            await asyncio.wait((first.task,))
            self._check()
            if first is line:
                return
        while line.task is not None or len(self._out) >= self._options.in_flight:
            awaited = self._out if line.task is None else {line.task}
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        self._check()
        self._start(line)
        await asyncio.sleep(0)  # let it, and those before it, reach their sockets

    def _start(self, line: Line) -> None:
        delivery = self._deliver(line, line.members, movable=not line.keyed)
        task = line.task = self._loop.create_task(delivery)
        self._out.add(task)
        task.add_done_callback(self._out.discard)
        line.clear()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _look_for(self, first: Packed) -> None:
        """Whether an earlier attempt, of which Spark did not tell us, stored the first row."""
        route = self._instance.routes.known(first.topic)
        if route is None or route.borrowed:
            return  # the topic does not exist: nothing is there
        if first.kind is MessageKind.DELAY:
            self._marked = True  # it may wait where it is not found yet
            return
        asked = [self._has(broker, first) for broker in route.addresses]
        self._marked = any(await asyncio.gather(*asked))

    async def _has(self, broker: str, first: Packed) -> bool:
        """Whether a broker has the first row; one that cannot be asked counts as having it."""
        address = self._instance.routes.address(broker)
        if address is None:
            return True
        query = QueryMessage(
            topic=first.topic,
            key=first.msg_id,
            max_num=32,
            begin_timestamp=0,
            end_timestamp=EVER_MS,
            unique_key_query=True,
        )
        try:
            reply = await self._instance.links.call(address, query)
        except Refused as refusal:
            return refusal.code != Code.QUERY_NOT_FOUND
        except CosmodromeError:
            return True
        return any(
            parse_properties(record.properties).get(UNIQ_KEY) == first.msg_id
            for record in decode_records(reply.body)
        )

    # --- one batch -----------------------------------------------------------------------------

    async def _deliver(self, line: Line, members: list[Packed], *, movable: bool) -> None:
        try:
            await self._try(line, members, movable)
        except CosmodromeError as error:
            self._failure = self._failure or error
        except Exception as error:  # a bug of ours; the next `add` must raise it
            log.exception("send failed: queue=%s", line.queue)
            self._failure = self._failure or CosmodromeError(f"a send failed: {error!r}")
        finally:
            line.task = None

    async def _try(self, line: Line, members: list[Packed], movable: bool) -> None:
        tried: list[Attempt] = []
        requests = 0
        backoff = Backoff(BACKOFF_FIRST_S, BACKOFF_MAX_S, self._instance.env.random)
        for attempt in range(self._options.connection.retries + 1):
            if attempt:
                await asyncio.sleep(backoff.next_s())
                if self._failure is not None:
                    return
            target = self._target(line, tried) if movable else line
            broker = target.queue.broker_name
            address = self._instance.routes.address(broker)
            began = self._loop.time()
            try:
                if address is None:
                    raise Unreachable(f"no name server knows a master of broker {broker}")
                async with target.turn:
                    began = self._loop.time()
                    await self._instance.links.channel(address).connect()
                    requests += 1
                    await self._request(address, target.queue, members, requests - 1)
            except (Refused, Unreachable, TimedOut) as error:
                cost_ms = round((self._loop.time() - began) * 1000)
                explained = links.explained(error, self._options.connection)
                tried.append(Attempt(broker, address or "?", explained, cost_ms))
                if isinstance(error, Refused) and (
                    error.code not in RETRY_CODES or links.is_denial(error)
                ):
                    break
                await self._refresh(members[0].topic)
                continue
            self.sent += len(members)
            self.resent += len(members) if requests > 1 else 0
            self._down.pop(broker, None)
            return
        topic = members[0].message.topic
        late = isinstance(tried[-1].error, TimedOut)
        kind = SendTimedOut if late else SendFailed
        raise kind(topic, tried, f" ({_describe(members)} for queue {line.queue.queue_id})")

    async def _request(
        self, address: str, queue: MessageQueue, members: list[Packed], tries: int
    ) -> None:
        if tries or self._marked:
            mark = self._part.stamp(tries)
            members = [_marked(packed, mark) for packed in members]
        first = members[0]
        single = len(members) == 1
        command = SendMessageV2 if single else SendBatchMessage
        await self._instance.links.call(
            address,
            command(
                producer_group=self._group,
                topic=first.topic,
                default_topic=AUTO_CREATE_TOPIC,
                default_topic_queue_nums=DEFAULT_TOPIC_QUEUES,
                queue_id=queue.queue_id,
                sys_flag=first.sys_flag if single else 0,
                born_timestamp=self._instance.env.clock.now_ms(),
                flag=first.flag if single else 0,
                properties=first.properties if single else "",
                reconsume_times=0,
                unit_mode=False,
                batch=not single,
                broker_name=queue.broker_name,
                body=first.body if single else encode_batch(members),
            ),
        )

    def _target(self, line: Line, tried: list[Attempt]) -> Line:
        """The line itself, or one of another broker while its own is down."""
        own, now = line.queue.broker_name, self._loop.time()
        missed = [try_ for try_ in tried if try_.broker_name == own]
        if len(missed) >= MOVE_AFTER and all(
            isinstance(try_.error, Unreachable | TimedOut) for try_ in missed[-MOVE_AFTER:]
        ):
            self._down[own] = now + DOWN_S
        if self._down.get(own, now) <= now:
            return line
        lines = self._topics[line.queue.topic].lines
        up = [other for other in lines if self._down.get(other.queue.broker_name, now) <= now]
        return up[lines.index(line) % len(up)] if up else line

    async def _refresh(self, topic: str) -> None:
        """A broker that fails may have moved."""
        try:
            await self._instance.routes.get(topic, fresh=True)
        except CosmodromeError as error:
            log.debug("route not refreshed: topic=%s reason=%s", topic, error)


def _marked(packed: Packed, mark: str) -> Packed:
    text = f"{packed.properties}{PAIR_END}{MARK}{NAME_END}{mark}"
    return msgspec.structs.replace(packed, properties=text)


def _describe(members: list[Packed]) -> str:
    keys = f"{members[0].msg_id} … {members[-1].msg_id}" if len(members) > 1 else members[0].msg_id
    return f"{len(members)} row{'s' * (len(members) > 1)}, {keys},"
