"""The client without `await`, for threads and scripts: same names, same arguments.

    with Producer("127.0.0.1:9876", group="orders") as producer:
        producer.send(Message("orders", b"..."))

All objects share one event loop in a background thread and may be used from many threads. Handlers
are plain functions that may block; they run in threads of their own. Ctrl-C ends a call that waits,
and leaving the `with` block then closes in order. After `os.fork` make new objects in the child.
"""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from cosmodrome.client import values as plain
from cosmodrome.client.operate import admin
from cosmodrome.client.portal import Future, Portal, Slots, Workers, shared
from cosmodrome.client.receive import consumer, pull_consumer
from cosmodrome.client.receive.engine.pulling import Pulled
from cosmodrome.client.send import producer, transactions
from cosmodrome.client.send.delivery import Selector
from cosmodrome.client.send.failures import Busy
from cosmodrome.client.send.transactions import TransactionResult, TransactionState
from cosmodrome.client.values import Message, MessageQueue, SendResult
from cosmodrome.env.lifecycle import AsyncLifecycle, Lifecycle
from cosmodrome.errors import ConfigError

HANDLER_THREADS = 20

T = TypeVar("T")


L = TypeVar("L", bound=AsyncLifecycle)


class _Face(Lifecycle, Generic[L]):
    """An async object, its loop, and the life of both."""

    def __init__(self, inner: L) -> None:
        self._inner = inner
        self._portal: Portal | None = None

    def start(self) -> None:
        if self._portal is not None:
            return
        portal = shared.acquire()
        try:
            portal.call(self._inner.start())
        except BaseException:
            shared.release(portal)
            raise
        self._portal = portal

    def stop(self) -> None:
        self.stop_after(None)

    def stop_after(self, error: BaseException | None) -> None:
        portal, self._portal = self._portal, None
        if portal is None:
            return
        try:
            portal.call(self._inner.stop_after(error))
        finally:
            shared.release(portal)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return self._open(work).call(work)

    def _open(self, work: Coroutine[Any, Any, Any] | None = None) -> Portal:
        if self._portal is None:
            if work is not None:
                work.close()
            raise ConfigError(f"this {type(self).__name__} is not started, or closed; use `with`")
        return self._portal


# --- producers -------------------------------------------------------------------------------


class _Sends(_Face[Any]):
    """What both producers do."""

    _inner: producer.Producer

    def __init__(self, inner: producer.Producer, in_flight_max: int) -> None:
        super().__init__(inner)
        self._slots = Slots(in_flight_max)

    def send(
        self,
        message: Message,
        *,
        timeout_ms: int | None = None,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
    ) -> SendResult:
        """Send and wait for the acknowledgement."""
        return self._call(
            self._inner.send(message, timeout_ms=timeout_ms, queue=queue, selector=selector)
        )

    def submit(
        self,
        message: Message,
        *,
        timeout_ms: int | None = None,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
    ) -> Future[SendResult]:
        """Send without waiting for the acknowledgement; waits while `in_flight_max` messages are
        not acknowledged. In a callback of a future, which cannot wait, it raises Busy."""
        portal = self._open()

        async def submitted() -> SendResult:
            while True:
                try:
                    future = self._inner.submit(
                        message, timeout_ms=timeout_ms, queue=queue, selector=selector
                    )
                except Busy:
                    await self._inner.ready()
                    continue
                return await future

        if not portal.is_here:
            self._slots.take()
        elif not self._slots.take_now():
            # A callback of another future: room is made by the very thread that it runs in.
            raise Busy(
                "a callback cannot wait until fewer messages are on their way;"
                " submit from a thread of your own, or raise in_flight_max"
            )
        try:
            future = portal.spawn(submitted())
        except BaseException:
            self._slots.give_back()
            raise
        future.add_done_callback(self._slots.give_back)
        return future

    def send_oneway(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
    ) -> None:
        """Send without acknowledgement: the message may be lost without notice."""
        self._call(self._inner.send_oneway(message, queue=queue, selector=selector))

    def send_batch(
        self,
        messages: Sequence[Message],
        *,
        timeout_ms: int | None = None,
        queue: MessageQueue | None = None,
    ) -> list[SendResult]:
        """Send messages of one topic in as few requests as the size limit allows."""
        return self._call(self._inner.send_batch(messages, timeout_ms=timeout_ms, queue=queue))

    def request(self, message: Message, *, timeout_ms: int = 3_000) -> plain.ReceivedMessage:
        """Send a message and wait for the reply of whoever consumes it."""
        return self._call(self._inner.request(message, timeout_ms=timeout_ms))

    def reply(
        self,
        received: plain.ReceivedMessage,
        body: bytes | str,
        *,
        properties: Mapping[str, str] | None = None,
    ) -> SendResult:
        return self._call(self._inner.reply(received, body, properties=properties))

    def recall(self, topic: str, recall_handle: str) -> str:
        """Cancel a timed message."""
        return self._call(self._inner.recall(topic, recall_handle))

    @property
    def in_flight(self) -> int:
        """Messages that are not acknowledged yet."""
        return self._inner.in_flight


class Producer(_Sends):
    """`cosmodrome.Producer` for threads; arguments are the same."""

    def __init__(
        self, namesrv: str | None = None, *, group: str, in_flight_max: int = 1_024, **options: Any
    ) -> None:
        super().__init__(
            producer.Producer(namesrv, group=group, in_flight_max=in_flight_max, **options),
            in_flight_max,
        )


class TransactionProducer(_Sends):
    """`cosmodrome.TransactionProducer` for threads. `check` and `local` are plain functions; they
    run in threads and may block."""

    _inner: transactions.TransactionProducer

    def __init__(
        self,
        namesrv: str | None = None,
        *,
        group: str,
        check: Callable[[plain.ReceivedMessage], TransactionState],
        in_flight_max: int = 1_024,
        threads: int = HANDLER_THREADS,
        **options: Any,
    ) -> None:
        self._workers = Workers(threads)

        async def checked(message: plain.ReceivedMessage) -> TransactionState:
            return await self._workers.run(check, message)

        super().__init__(
            transactions.TransactionProducer(
                namesrv, group=group, check=checked, in_flight_max=in_flight_max, **options
            ),
            in_flight_max,
        )

    def send_in_transaction(
        self,
        message: Message,
        local: Callable[[Message], TransactionState],
        *,
        timeout_ms: int | None = None,
    ) -> TransactionResult:
        """Store the message where no consumer sees it, run `local`, and commit or roll back as it
        answers."""

        async def run_local(sent: Message) -> TransactionState:
            return await self._workers.run(local, sent)

        return self._call(
            self._inner.send_in_transaction(message, run_local, timeout_ms=timeout_ms)
        )

    def stop_after(self, error: BaseException | None) -> None:
        super().stop_after(error)
        self._workers.close()


# --- consumers -------------------------------------------------------------------------------


class ReceivedMessage(plain.ReceivedMessage):
    """A message whose `ack` and `retry` wait instead of being awaited."""

    __slots__ = ("_original", "_portal")

    def __init__(self, original: plain.ReceivedMessage, portal: Portal) -> None:
        super().__init__(
            original.record,
            original.broker_name,
            topic=original.topic,
            body=original.body,
            min_offset=original.min_offset,
            max_offset=original.max_offset,
        )
        self._original = original
        self._portal = portal

    def ack(self) -> None:  # type: ignore[override]
        """Done: progress moves past it as soon as all before it are done too."""
        self._portal.call(self._original.ack())

    def retry(self, delay_level: int = 0) -> None:  # type: ignore[override]
        """Not done: it comes again after the delay of a level (0: longer with every attempt)."""
        self._portal.call(self._original.retry(delay_level))


class Consumer(_Face[consumer.Consumer]):
    """`cosmodrome.Consumer` for threads: iterate over it, or `run(handler)`.

    Handlers are plain functions; up to `threads` of them run at once (one, per queue, when the
    consumer is orderly). They return, or raise `RetryLater`, `Reject` or anything else, as async
    handlers do.
    """

    def __init__(
        self,
        namesrv: str | None = None,
        *,
        group: str,
        threads: int = HANDLER_THREADS,
        **options: Any,
    ) -> None:
        options.setdefault("concurrency", threads)
        super().__init__(consumer.Consumer(namesrv, group=group, **options))
        self._workers = Workers(threads)

    def stop_after(self, error: BaseException | None) -> None:
        super().stop_after(error)
        self._workers.close()

    def subscribe(
        self,
        topic: str,
        *,
        tags: str | None = None,
        sql: str | None = None,
        handler: Callable[[Any], Any] | None = None,
    ) -> None:
        """Read a topic: all of it, messages with some tags, or those an expression selects."""
        called = None if handler is None else self._threaded(handler)
        self._call(self._inner.subscribe(topic, tags=tags, sql=sql, handler=called))

    def unsubscribe(self, topic: str) -> None:
        self._call(self._inner.unsubscribe(topic))

    def run(self, handler: Callable[[Any], Any] | None = None) -> None:
        """Call handlers until the consumer is stopped by another thread, or Ctrl-C."""
        called = None if handler is None else self._threaded(handler)
        self._call(self._inner.run(called))

    def __iter__(self) -> Iterator[ReceivedMessage]:
        portal = self._open()
        messages = aiter(self._inner)

        async def following() -> plain.ReceivedMessage:
            return await anext(messages)

        while self._portal is not None:
            try:
                message = portal.call(following())
            except StopAsyncIteration:
                return
            yield ReceivedMessage(message, portal)

    def _threaded(self, handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if inspect.iscoroutinefunction(handler):
            raise ConfigError("an async handler belongs to cosmodrome.Consumer; give a function")

        async def call(messages: Any) -> None:
            await self._workers.run(handler, messages)

        return call

    @property
    def assignment(self) -> list[MessageQueue]:
        return self._open().do(lambda: self._inner.assignment)

    def pause(self, *queues: MessageQueue) -> None:
        self._open().do(lambda: self._inner.pause(*queues))

    def resume(self, *queues: MessageQueue) -> None:
        self._open().do(lambda: self._inner.resume(*queues))

    def lag(self) -> dict[MessageQueue, int]:
        return self._open().do(self._inner.lag)

    def commit(self) -> None:
        self._call(self._inner.commit())

    def seek(self, queue: MessageQueue, offset: int) -> None:
        self._call(self._inner.seek(queue, offset))

    def replay(self, topic: str, *, since: datetime.datetime | int) -> None:
        self._call(self._inner.replay(topic, since=since))


class PullConsumer(_Face[pull_consumer.PullConsumer]):
    """`cosmodrome.PullConsumer` for threads."""

    def __init__(self, namesrv: str | None = None, *, group: str, **options: Any) -> None:
        super().__init__(pull_consumer.PullConsumer(namesrv, group=group, **options))

    def queues(self, topic: str) -> list[MessageQueue]:
        return self._call(self._inner.queues(topic))

    def subscribe(self, topic: str, *, tags: str | None = None, sql: str | None = None) -> None:
        self._call(self._inner.subscribe(topic, tags=tags, sql=sql))

    def unsubscribe(self, topic: str) -> None:
        self._call(self._inner.unsubscribe(topic))

    def assign(
        self,
        queues: Iterable[MessageQueue],
        *,
        tags: str | None = None,
        sql: str | None = None,
        offsets: Mapping[MessageQueue, int] | None = None,
    ) -> None:
        self._call(self._inner.assign(queues, tags=tags, sql=sql, offsets=offsets))

    @property
    def assignment(self) -> list[MessageQueue]:
        return self._open().do(lambda: self._inner.assignment)

    def poll(
        self, timeout_ms: int = 5_000, *, max_count: int | None = None
    ) -> list[plain.ReceivedMessage]:
        """The next messages; empty when none comes in time. A `DamagedMessage` among them is one
        whose body cannot be read: its `body` raises `DamagedBody`."""
        return self._call(self._inner.poll(timeout_ms, max_count=max_count))

    def pull(
        self,
        queue: MessageQueue,
        offset: int,
        *,
        max_count: int = 32,
        wait_ms: int = 0,
        tags: str | None = None,
        sql: str | None = None,
    ) -> Pulled:
        return self._call(
            self._inner.pull(
                queue, offset, max_count=max_count, wait_ms=wait_ms, tags=tags, sql=sql
            )
        )

    def position(self, queue: MessageQueue) -> int:
        return self._open().do(lambda: self._inner.position(queue))

    def seek(self, queue: MessageQueue, offset: int) -> None:
        self._call(self._inner.seek(queue, offset))

    def seek_to_begin(self, queue: MessageQueue) -> None:
        self._call(self._inner.seek_to_begin(queue))

    def seek_to_end(self, queue: MessageQueue) -> None:
        self._call(self._inner.seek_to_end(queue))

    def seek_to_time(self, queue: MessageQueue, when: datetime.datetime | int) -> None:
        self._call(self._inner.seek_to_time(queue, when))

    def pause(self, queues: Collection[MessageQueue]) -> None:
        self._open().do(lambda: self._inner.pause(queues))

    def resume(self, queues: Collection[MessageQueue]) -> None:
        self._open().do(lambda: self._inner.resume(queues))

    def begin_offset(self, queue: MessageQueue) -> int:
        return self._call(self._inner.begin_offset(queue))

    def end_offset(self, queue: MessageQueue) -> int:
        return self._call(self._inner.end_offset(queue))

    def offset_for_time(self, queue: MessageQueue, when: datetime.datetime | int) -> int:
        return self._call(self._inner.offset_for_time(queue, when))

    def committed(self, queue: MessageQueue) -> int | None:
        return self._call(self._inner.committed(queue))

    def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        self._call(self._inner.commit(offsets))


# --- operators -------------------------------------------------------------------------------


class _Part:
    """The calls of one part of `Admin`, under the same names, waiting for their answers."""

    def __init__(self, part: object, portal: Portal) -> None:
        self._part = part
        self._portal = portal

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._part, name)

        def call(*arguments: Any, **named: Any) -> Any:
            return self._portal.call(method(*arguments, **named))

        call.__name__, call.__doc__ = name, method.__doc__
        return call


class Admin(_Face[admin.Admin]):
    """`cosmodrome.Admin` for threads: `admin.topics.create("orders")`."""

    def __init__(self, namesrv: str | None = None, **options: Any) -> None:
        super().__init__(admin.Admin(namesrv, **options))

    @property
    def topics(self) -> _Part:
        return _Part(self._inner.topics, self._open())

    @property
    def groups(self) -> _Part:
        return _Part(self._inner.groups, self._open())

    @property
    def offsets(self) -> _Part:
        return _Part(self._inner.offsets, self._open())

    @property
    def messages(self) -> _Part:
        return _Part(self._inner.messages, self._open())

    @property
    def brokers(self) -> _Part:
        return _Part(self._inner.brokers, self._open())

    @property
    def name_servers(self) -> _Part:
        return _Part(self._inner.name_servers, self._open())
