"""The texts are upstream's, member by member."""

from __future__ import annotations

from typing import Any

import pytest

from cosmodrome.wire import bodies
from cosmodrome.wire.report_bodies import (
    GetConsumerStatusBody,
    QueryConsumeQueueResponseBody,
    QueryConsumeTimeSpanBody,
    QueryCorrectionOffsetBody,
    ResetOffsetBody,
    ResetOffsetBodyForC,
)

QUEUE = b'{"brokerName":"broker-a","queueId":3,"topic":"GNormal"}'

TEXTS = [
    (ResetOffsetBody, b'{"offsetTable":{%s:7}}' % QUEUE),
    (
        ResetOffsetBodyForC,
        b'{"offsetTable":[{"brokerName":"b","offset":5,"queueId":3,"topic":"T"}]}',
    ),
    (GetConsumerStatusBody, b'{"consumerTable":{},"messageQueueTable":{%s:8}}' % QUEUE),
    (GetConsumerStatusBody, b'{"consumerTable":{"c":{%s:8}},"messageQueueTable":{}}' % QUEUE),
    (QueryCorrectionOffsetBody, b'{"correctionOffsets":{0:1,1:9223372036854775807}}'),
    (
        QueryConsumeTimeSpanBody,
        b'{"consumeTimeSpanSet":[{"consumeTimeStamp":1794771685700,'
        b'"consumeTimeStampStr":"2026-11-15#19:41:25:700","delayTime":0,'
        b'"maxTimeStamp":1794771685700,"maxTimeStampStr":"2026-11-15#19:41:25:700",'
        b'"messageQueue":%s,"minTimeStamp":1794771685264,'
        b'"minTimeStampStr":"2026-11-15#19:41:25:264"}]}' % QUEUE,
    ),
    (
        QueryConsumeQueueResponseBody,
        b'{"filterData":"null","maxQueueIndex":9,"minQueueIndex":0,"queueData":['
        b'{"eval":false,"physicOffset":0,"physicSize":206,"tagsCode":2598919}],'
        b'"subscriptionData":{"classFilterMode":false,"codeSet":[],"expressionType":"TAG",'
        b'"subString":"*","subVersion":1794771772246,"tagsSet":[],"topic":"GNormal"}}',
    ),
]


@pytest.mark.parametrize(("kind", "text"), TEXTS)
def test_texts_survive(kind: Any, text: bytes) -> None:
    assert bodies.encode(bodies.decode(kind, text)) == text


def test_references_of_upstream_are_followed() -> None:
    text = (
        b'{"consumerTable":{"c":{%s:8}},"messageQueueTable":{"$ref":"$.consumerTable.c"}}' % QUEUE
    )
    status = bodies.decode(GetConsumerStatusBody, text)
    assert list(status.message_queue_table.values()) == [8]
