"""Spans and metrics of sends and handlers, with the SDK's exporters in memory."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")

from opentelemetry.sdk.metrics import MeterProvider  # noqa: E402
from opentelemetry.sdk.metrics.export import InMemoryMetricReader  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (  # noqa: E402
    InMemorySpanExporter,
)
from opentelemetry.trace import SpanKind, StatusCode  # noqa: E402

from cosmodrome.client.receive.consumer import Consumer  # noqa: E402
from cosmodrome.client.send.producer import Producer  # noqa: E402
from cosmodrome.client.telemetry import Telemetry  # noqa: E402
from cosmodrome.client.values import Message, MessageQueue, ReceivedMessage  # noqa: E402
from cosmodrome.errors import ConfigError, CosmodromeError  # noqa: E402

SENT = "messaging.client.sent.messages"


class Observed:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracers = sdk.TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.hook = Telemetry(
            tracer_provider=self.tracers, meter_provider=MeterProvider([self.reader])
        )

    def spans(self, prefix: str) -> list[Any]:
        return [s for s in self.exporter.get_finished_spans() if s.name.startswith(prefix)]

    def points(self, name: str) -> list[Any]:
        data = self.reader.get_metrics_data()
        if data is None:
            return []
        return [
            point
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]


async def consume(node: Any, observed: Observed, count: int, handler: Any, **options: Any) -> None:
    async with Consumer(
        node.namesrv, group="g", consume_from="first", hooks=(observed.hook,), **options
    ) as consumer:
        await consumer.subscribe("T", handler=handler)
        async with asyncio.timeout(60):
            while len(observed.spans("process")) < count:
                await asyncio.sleep(0.02)


async def test_one_trace_from_the_sender_to_the_spans_of_the_handler(node: Any) -> None:
    observed = Observed()
    tracer = observed.tracers.get_tracer("test")
    async with Producer(node.namesrv, group="p", hooks=(observed.hook,)) as producer:
        with tracer.start_as_current_span("outer"):
            message = Message("T", b"hello", tags="A", keys="k")
            result = await producer.send(message)

    async def handler(received: ReceivedMessage) -> None:
        assert received.properties["traceparent"] == message.properties["traceparent"]
        with tracer.start_as_current_span("inner"):
            await asyncio.sleep(0)

    await consume(node, observed, 1, handler)
    (outer,), (create,), (send,), (process,), (inner,) = (
        observed.spans(name) for name in ("outer", "create T", "send T", "process T", "inner")
    )
    assert create.parent.span_id == outer.context.span_id
    assert create.kind is SpanKind.PRODUCER
    assert [link.context.span_id for link in send.links] == [create.context.span_id]
    assert send.kind is SpanKind.CLIENT
    assert process.parent.span_id == create.context.span_id
    assert process.kind is SpanKind.CONSUMER
    assert inner.parent.span_id == process.context.span_id
    assert {span.context.trace_id for span in (outer, create, process, inner)} == {
        outer.context.trace_id
    }
    assert send.attributes["messaging.system"] == "rocketmq"
    assert send.attributes["messaging.message.id"] == result.msg_id
    assert send.attributes["messaging.rocketmq.message.tag"] == "A"
    assert send.attributes["messaging.rocketmq.queue_offset"] == 0
    assert process.attributes["messaging.consumer.group.name"] == "g"
    assert process.attributes["messaging.message.id"] == result.msg_id


async def test_sends_and_handlers_are_counted_and_timed(node: Any) -> None:
    observed = Observed()
    async with Producer(node.namesrv, group="p", hooks=(observed.hook,)) as producer:
        await producer.send(Message("T", b"one"))
        await producer.send_batch([Message("T", b"two"), Message("T", b"three")])
    (batch,) = [
        span
        for span in observed.spans("send")
        if span.attributes.get("messaging.batch.message_count") == 2
    ]
    assert len(batch.links) == 2

    async def handler(received: ReceivedMessage) -> None: ...

    await consume(node, observed, 3, handler)
    sent = observed.points(SENT)
    assert sum(point.value for point in sent) == 3
    assert all("messaging.message.id" not in point.attributes for point in sent)
    consumed = observed.points("messaging.client.consumed.messages")
    assert sum(point.value for point in consumed) == 3
    assert sum(p.count for p in observed.points("messaging.client.operation.duration")) == 2
    assert sum(p.count for p in observed.points("messaging.process.duration")) == 3


async def test_a_batch_handler_has_one_span_with_links(node: Any) -> None:
    observed = Observed()
    async with Producer(node.namesrv, group="p", hooks=(observed.hook,)) as producer:
        first = await producer.send(Message("T", b"one"))
        await producer.send(Message("T", b"two"), queue=first.queue)

    async def handler(received: list[ReceivedMessage]) -> None: ...

    await consume(node, observed, 1, handler, batch=10)
    spans = observed.spans("process")
    assert sum(max(1, len(span.links)) for span in spans) >= 2
    created = {span.context.span_id for span in observed.spans("create")}
    assert all(link.context.span_id in created for span in spans for link in span.links)


async def test_failures_are_marked(node: Any) -> None:
    observed = Observed()
    async with Producer(node.namesrv, group="p", hooks=(observed.hook,), retries=0) as producer:
        first = await producer.send(Message("T", b"one"))
        wrong = MessageQueue(topic="T", broker_name=first.queue.broker_name, queue_id=99)
        with pytest.raises(CosmodromeError):
            await producer.send(Message("T", b"two"), queue=wrong)
    failed = [
        span for span in observed.spans("send") if span.status.status_code is StatusCode.ERROR
    ]
    assert len(failed) == 1
    assert observed.hook._open == {}
    errors = [p.attributes.get("error.type") for p in observed.points(SENT)]
    assert sorted(errors, key=str) == ["1", None]
    calls = 0

    async def handler(received: ReceivedMessage) -> None:
        nonlocal calls
        calls += 1
        raise ValueError("not today")

    await consume(node, observed, 1, handler)
    assert calls
    process = observed.spans("process")[0]
    assert process.status.status_code is StatusCode.ERROR
    (point,) = observed.points("messaging.client.consumed.messages")
    assert point.attributes["error.type"] == "ValueError"


async def test_a_message_sent_twice_gets_a_new_context(node: Any) -> None:
    observed = Observed()
    async with Producer(node.namesrv, group="p", hooks=(observed.hook,)) as producer:
        message = Message("T", b"x")
        await producer.send(message)
        before = message.properties["traceparent"]
        await producer.send(message)
        assert message.properties["traceparent"] != before


def test_without_opentelemetry_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match="pip install opentelemetry-api"):
        Telemetry()
