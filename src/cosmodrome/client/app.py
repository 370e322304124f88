"""A program of consumers, declared by decorators:

    app = App("127.0.0.1:9876")

    @app.consumer("orders", group="billing", publish="invoices")
    async def bill(order: Order) -> Invoice: ...

    app.main()

A handler says by its annotations what it wants: `ReceivedMessage` the message, `Producer` the
program's producer, `bytes` the body, any other type the body decoded into it. A body that cannot
be decoded goes to the dead letters at once: it would not be better the next time. SIGTERM and
SIGINT stop in order: handlers finish, progress is stored, the producer empties.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import logging
import signal
import typing
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar

from cosmodrome.client.options import ClientOptions
from cosmodrome.client.receive.consumer import Consumer
from cosmodrome.client.receive.handlers import Reject
from cosmodrome.client.send.producer import Producer
from cosmodrome.client.serializers import JSON, Serializer, Undecodable, message_of, value_of
from cosmodrome.client.values import ReceivedMessage
from cosmodrome.env.base import Env
from cosmodrome.env.real import real_env
from cosmodrome.errors import ConfigError

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
Lifespan = Callable[["App"], contextlib.AbstractAsyncContextManager[Any]]


@dataclasses.dataclass(slots=True)
class _Route:
    """One decorated handler."""

    topic: str
    tags: str | None
    sql: str | None
    handler: Callable[..., Any]
    wants: dict[str, Any]  # by parameter: a type to decode into, or one of the types below
    serializer: Serializer
    publish: str | None


@dataclasses.dataclass(slots=True)
class _Group:
    options: dict[str, Any]
    routes: list[_Route] = dataclasses.field(default_factory=list)


class App:
    """Consumers and one producer with one life. See the module."""

    def __init__(
        self,
        namesrv: str | None = None,
        *,
        client: ClientOptions | None = None,
        serializer: Serializer = JSON,
        producer_group: str = "app",
        producer_options: Mapping[str, Any] | None = None,
        lifespan: Lifespan | None = None,
        env: Env | None = None,
    ) -> None:
        self._namesrv = namesrv
        self._client = client or ClientOptions()
        self._serializer = serializer
        self._producer_group = producer_group
        self._producer_options = dict(producer_options or {})
        self._lifespan = lifespan
        self._env = env or real_env()
        self._groups: dict[str, _Group] = {}
        self._producer: Producer | None = None
        self._consumers: list[Consumer] = []
        self._stop: asyncio.Event | None = None

    def consumer(
        self,
        topic: str,
        *,
        group: str,
        tags: str | None = None,
        sql: str | None = None,
        publish: str | None = None,
        serializer: Serializer | None = None,
        **options: Any,
    ) -> Callable[[F], F]:
        """The decorated function handles a topic's messages. What it returns is sent to the topic
        `publish`, if one is given, before the message counts as done. `options` are those of
        `Consumer`; handlers of one group share them."""

        def register(handler: F) -> F:
            known = self._groups.get(group)
            if known is None:
                known = self._groups[group] = _Group(options)
            elif options and options != known.options:
                raise ConfigError(
                    f"group {group} has other options already; give them once, or use another group"
                )
            if any(route.topic == topic for route in known.routes):
                raise ConfigError(f"group {group} has a handler of topic {topic} already")
            if options.get("batch", 1) != 1:
                raise ConfigError("handlers of an App take one message; leave `batch` out")
            wants = _wants(handler)
            known.routes.append(
                _Route(topic, tags, sql, handler, wants, serializer or self._serializer, publish)
            )
            return handler

        return register

    @property
    def producer(self) -> Producer:
        """The producer that runs with the app."""
        if self._producer is None:
            raise ConfigError("the app does not run; its producer runs as long as the app does")
        return self._producer

    async def send(self, topic: str, value: Any, **options: Any) -> None:
        """Send a value with the app's serializer."""
        await self.producer.send(message_of(topic, value, serializer=self._serializer, **options))

    # --- life --------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[App]:
        """The app, running, for as long as the block lasts; for tests and other frameworks."""
        if self._producer is not None:
            raise ConfigError("this app runs already")
        async with contextlib.AsyncExitStack() as stack:
            producer = Producer(
                self._namesrv,
                group=self._producer_group,
                client=self._client,
                env=self._env,
                **self._producer_options,
            )
            await stack.enter_async_context(producer)
            self._producer = producer
            stack.callback(self._forget)
            if self._lifespan is not None:
                await stack.enter_async_context(self._lifespan(self))
            for name, group in self._groups.items():
                consumer = Consumer(
                    self._namesrv, group=name, client=self._client, env=self._env, **group.options
                )
                await stack.enter_async_context(consumer)
                self._consumers.append(consumer)
                for route in group.routes:
                    await consumer.subscribe(
                        route.topic, tags=route.tags, sql=route.sql, handler=self._bound(route)
                    )
            yield self

    async def run(self, *, signals: bool = True) -> None:
        """Run until `stop` is called or, with `signals`, SIGTERM or SIGINT arrives."""
        stop = self._stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT) if signals else ()
        for number in numbers:
            loop.add_signal_handler(number, stop.set)
        try:
            async with self.running():
                log.info("running: groups=%s", ",".join(self._groups))
                await self._until(stop)
                log.info("stopping")
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
            self._stop = None

    async def _until(self, stop: asyncio.Event) -> None:
        """Until it is set, or a consumer fails: half an app is worse than one that says why."""
        waiting: list[asyncio.Future[Any]] = [asyncio.ensure_future(stop.wait())]
        waiting += [asyncio.ensure_future(consumer.run()) for consumer in self._consumers]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)

    def stop(self) -> None:
        """Let `run` end."""
        if self._stop is not None:
            self._stop.set()

    def main(self) -> None:
        """Run in an event loop of its own, as a program does."""
        asyncio.run(self.run())

    def _forget(self) -> None:
        self._producer = None
        self._consumers.clear()

    def _bound(self, route: _Route) -> Callable[[ReceivedMessage], Any]:
        async def call(message: ReceivedMessage) -> None:
            try:
                arguments = {
                    name: self._argument(kind, message, route.serializer)
                    for name, kind in route.wants.items()
                }
            except Undecodable as error:
                log.error("put aside: %s", error)
                raise Reject(str(error)) from error
            result = route.handler(**arguments)
            if inspect.isawaitable(result):
                result = await result
            if route.publish is not None and result is not None:
                await self.producer.send(
                    message_of(route.publish, result, serializer=route.serializer)
                )

        return call

    def _argument(self, kind: Any, message: ReceivedMessage, serializer: Serializer) -> Any:
        if kind is ReceivedMessage:
            return message
        if kind is Producer:
            return self.producer
        if kind is bytes:
            return message.body
        return value_of(message, kind, serializer=serializer)


def _wants(handler: Callable[..., Any]) -> dict[str, Any]:
    """The type of each parameter; ConfigError when a parameter has none."""
    name = getattr(handler, "__qualname__", repr(handler))
    try:
        hints = typing.get_type_hints(handler)
    except NameError as error:
        raise ConfigError(
            f"{name}: {error}; types that handlers name must be importable from their module"
        ) from None
    wants: dict[str, Any] = {}
    for parameter in inspect.signature(handler).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"{name}: *{parameter.name} cannot be filled; name the parameters")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(f"{name}: {parameter.name} is positional only; it is given by name")
        if parameter.name not in hints:
            raise ConfigError(
                f"{name}: parameter {parameter.name} has no type; ReceivedMessage, Producer, bytes"
                " or the type of the body"
            )
        wants[parameter.name] = hints[parameter.name]
    if not wants:
        raise ConfigError(f"{name} takes no parameter; let it take the message or its body")
    return wants
