"""Spans and metrics through OpenTelemetry, for producers and consumers that get it as a hook.

    telemetry = Telemetry()
    Producer(..., hooks=(telemetry,))
    Consumer(..., hooks=(telemetry,))

Each message carries the context of a span `create <topic>` in its properties (`traceparent`), so
the span `process <topic>` of whoever handles it belongs to the same trace, with the spans that the
handler makes below it. Each attempt to send is a span `send <topic>` with links to the messages;
attempts that found no connection have none. Names and attributes follow OpenTelemetry's conventions
for messaging. The package `opentelemetry-api` is needed only when this is used; without an SDK it
does nothing.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from cosmodrome.client.options import split_address
from cosmodrome.client.receive.consumer_options import Consumption
from cosmodrome.client.send.hooks import SendContext
from cosmodrome.client.values import Message
from cosmodrome.errors import ConfigError, Refused

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.propagators.textmap import TextMapPropagator
    from opentelemetry.trace import Link, Span, TracerProvider

NAME = "cosmodrome"
SYSTEM = "rocketmq"
# Attempts whose end was not seen; a producer has fewer under way.
OPEN_SPANS_MAX = 100_000
_SPAN, _TOKEN = "cosmodrome.span", "cosmodrome.token"


class Telemetry:
    """A hook for producers and consumers. Providers and propagator default to the global ones."""

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        propagator: TextMapPropagator | None = None,
    ) -> None:
        try:
            from opentelemetry import context, metrics, propagate, trace
        except ImportError:
            raise ConfigError(
                "telemetry needs OpenTelemetry; install it with: pip install opentelemetry-api"
            ) from None
        self._context = context
        self._trace = trace
        self._propagator = propagator or propagate.get_global_textmap()
        self._tracer = trace.get_tracer(NAME, tracer_provider=tracer_provider)
        meter = metrics.get_meter(NAME, meter_provider=meter_provider)
        self._sent = meter.create_counter(
            "messaging.client.sent.messages", unit="{message}", description="messages sent"
        )
        self._send_seconds = meter.create_histogram(
            "messaging.client.operation.duration", unit="s", description="time of one send"
        )
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", unit="{message}", description="messages handled"
        )
        self._process_seconds = meter.create_histogram(
            "messaging.process.duration", unit="s", description="time of one call of a handler"
        )
        self._open: collections.OrderedDict[int, Span] = collections.OrderedDict()

    # --- producers -----------------------------------------------------------------------------

    def prepare(self, message: Message) -> None:
        """Give the message a context of its own."""
        for name in self._propagator.fields:
            message.properties.pop(name, None)  # of an earlier send of the same object
        with self._tracer.start_as_current_span(
            f"create {message.topic}",
            kind=self._trace.SpanKind.PRODUCER,
            attributes=_attributes("create", message.topic),
        ):
            self._propagator.inject(message.properties)

    def before_send(self, context: SendContext) -> None:
        span = self._tracer.start_span(
            f"send {context.queue.topic}",
            kind=self._trace.SpanKind.CLIENT,
            links=self._links(message.properties for message in context.messages),
            attributes={**_send_attributes(context), **_message_attributes(context)},
        )
        self._open[id(context)] = span
        if len(self._open) > OPEN_SPANS_MAX:
            self._open.popitem(last=False)[1].end()

    def after_send(self, context: SendContext) -> None:
        attributes = _send_attributes(context)
        if context.error is not None:
            attributes["error.type"] = _error_type(context.error)
        self._sent.add(len(context.messages), attributes)
        self._send_seconds.record(context.cost_ms / 1000, attributes)
        span = self._open.pop(id(context), None)
        if span is None:
            return
        if context.error is not None:
            self._failed(span, context.error)
        elif len(context.results) == 1:
            span.set_attribute("messaging.rocketmq.queue_offset", context.results[0].queue_offset)
        span.end()

    # --- consumers -----------------------------------------------------------------------------

    def before_consume(self, consumption: Consumption) -> None:
        messages = consumption.messages
        topic = messages[0].topic
        attributes = _process_attributes(consumption)
        parent: Context | None = None
        links: list[Link] = []
        if len(messages) == 1:
            parent = self._propagator.extract(messages[0].properties)
            attributes["messaging.message.id"] = messages[0].msg_id
            attributes["messaging.message.body.size"] = len(messages[0].body)
        else:
            links = self._links(message.properties for message in messages)
            attributes["messaging.batch.message_count"] = len(messages)
        span = self._tracer.start_span(
            f"process {topic}",
            context=parent,
            kind=self._trace.SpanKind.CONSUMER,
            links=links,
            attributes=attributes,
        )
        consumption.notes[_SPAN] = span
        consumption.notes[_TOKEN] = self._context.attach(self._trace.set_span_in_context(span))

    def after_consume(self, consumption: Consumption) -> None:
        attributes = _process_attributes(consumption)
        if consumption.error is not None:
            attributes["error.type"] = _error_type(consumption.error)
        self._consumed.add(len(consumption.messages), attributes)
        self._process_seconds.record(consumption.took_ms / 1000, attributes)
        token: Any = consumption.notes.pop(_TOKEN, None)
        if token is not None:
            self._context.detach(token)
        span: Any = consumption.notes.pop(_SPAN, None)
        if span is not None:
            if consumption.error is not None:
                self._failed(span, consumption.error)
            span.end()

    # --- parts ---------------------------------------------------------------------------------

    def _links(self, carriers: Iterable[Mapping[str, str]]) -> list[Link]:
        links = []
        for carrier in carriers:
            found = self._trace.get_current_span(
                self._propagator.extract(carrier, context=self._context.Context())
            ).get_span_context()
            if found.is_valid:
                links.append(self._trace.Link(found))
        return links

    def _failed(self, span: Span, error: BaseException) -> None:
        span.record_exception(error)
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, str(error)))


def _attributes(operation: str, topic: str) -> dict[str, Any]:
    return {
        "messaging.system": SYSTEM,
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": topic,
    }


def _send_attributes(context: SendContext) -> dict[str, Any]:
    """The attributes of metrics: none that differs from message to message."""
    host, port = split_address(context.address)
    return {
        **_attributes("send", context.queue.topic),
        "messaging.destination.partition.id": f"{context.queue.broker_name}:"
        f"{context.queue.queue_id}",
        "messaging.rocketmq.client_group": context.group,
        "server.address": host,
        "server.port": port,
    }


def _message_attributes(context: SendContext) -> dict[str, Any]:
    if len(context.messages) != 1:
        return {"messaging.batch.message_count": len(context.messages)}
    attributes: dict[str, Any] = {
        "messaging.message.id": context.msg_ids[0],
        "messaging.message.body.size": len(context.messages[0].body),
        "messaging.rocketmq.message.type": context.kind.name.lower(),
    }
    if context.messages[0].tags is not None:
        attributes["messaging.rocketmq.message.tag"] = context.messages[0].tags
    if context.messages[0].keys:
        attributes["messaging.rocketmq.message.keys"] = context.messages[0].keys
    return attributes


def _process_attributes(consumption: Consumption) -> dict[str, Any]:
    return {
        **_attributes("process", consumption.messages[0].topic),
        "messaging.consumer.group.name": consumption.group,
        "messaging.destination.partition.id": f"{consumption.queue.broker_name}:"
        f"{consumption.queue.queue_id}",
    }


def _error_type(error: BaseException) -> str:
    return str(int(error.code)) if isinstance(error, Refused) else type(error).__qualname__
