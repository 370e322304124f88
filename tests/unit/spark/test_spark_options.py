"""Options of the source: what is understood, and what is refused with which words."""

from __future__ import annotations

import pickle

import pytest

pytest.importorskip("pyarrow")

from cosmodrome.errors import ConfigError
from cosmodrome.spark.read.options import Connection, ReadOptions
from cosmodrome.spark.read.rows import COLUMNS
from cosmodrome.wire.bodies import MessageQueue


def parse(**options: str) -> ReadOptions:
    return ReadOptions.parse({"namesrv": "127.0.0.1:9876", **options})


def test_defaults() -> None:
    options = parse(subscribe="orders")
    assert options.topics == ("orders",)
    assert options.columns == COLUMNS
    assert not options.corrupt
    assert options.fail_on_data_loss
    assert options.starting is None and options.ending is None
    assert options.connection == Connection(namesrv="127.0.0.1:9876")


def test_names_are_case_insensitive_and_values_are_typed() -> None:
    options = ReadOptions.parse(
        {
            "NAMESRV": "a:1,b:2;a:1",
            "SubScribe": "x, y,,x",
            "MAXOFFSETSPERTRIGGER": "7",
            "maxbytespertrigger": "3 MiB",
            "failondataloss": "FALSE",
            "tags": "A || B",
            "columns": "body, topic",
            "startingtimestamp": "2025-03-01T12:00:00Z",
            "minpartitions": "5",
            "accesskey": "me",
            "secretkey": "hidden",
            "tlsCa": "/ca.pem",
        }
    )
    assert options.connection.namesrv == "a:1;b:2"
    assert options.topics == ("x", "y")
    assert options.rows_per_trigger == 7
    assert options.bytes_per_trigger == 3 << 20
    assert not options.fail_on_data_loss
    assert options.tags == ("A", "B")
    assert options.columns == ("body", "topic")
    assert options.starting_ms == 1_740_830_400_000
    assert options.connection.tls
    assert "hidden" not in repr(options)
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize(
    ("text", "moment_ms"),
    [
        ("1740830400123", 1_740_830_400_123),
        ("2025-03-01", 1_740_787_200_000),
        ("2025-03-01T13:00:00+01:00", 1_740_830_400_000),
        ("2025-03-01T12:00:00.000001Z", 1_740_830_400_001),
    ],
)
def test_moments(text: str, moment_ms: int) -> None:
    assert parse(subscribe="t", endingTimestamp=text).ending_ms == moment_ms


def test_path_is_a_topic_and_assign_names_queues() -> None:
    assert parse(path="orders").topics == ("orders",)
    options = parse(assign='{"t": {"b": [0, 2]}}')
    assert options.assign == (
        MessageQueue(topic="t", broker_name="b", queue_id=0),
        MessageQueue(topic="t", broker_name="b", queue_id=2),
    )


def test_a_store_needs_no_topic() -> None:
    options = ReadOptions.parse({"storePath": "/data", "mode": "FAILFAST", "splitBytes": "1m"})
    assert options.store_path == "/data"
    assert options.mode == "failFast"
    assert not options.corrupt
    permissive = ReadOptions.parse({"storePath": "/data"})
    assert permissive.corrupt and permissive.columns == COLUMNS
    chosen = ReadOptions.parse({"storePath": "/data", "columns": "body,_corrupt_record"})
    assert chosen.corrupt and chosen.columns == ("body",)
    assert not ReadOptions.parse({"storePath": "/data", "columns": "body"}).corrupt


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "which topic"),
        ({"subscribe": "a", "path": "b"}, "path and subscribe exclude"),
        ({"subscribe": "a", "subscribePattern": "b"}, "exclude each other"),
        ({"subscibe": "a"}, "did you mean subscribe?"),
        ({"subscribe": "a b"}, "characters that are not allowed"),
        ({"subscribePattern": "("}, "not a regular expression"),
        ({"assign": '{"t": {"b": []}}'}, "not a list of queue numbers"),
        ({"assign": "t"}, "is not JSON"),
        ({"subscribe": "a", "columns": "nope"}, "no column is called nope"),
        ({"subscribe": "a", "columns": "body,_corrupt_record"}, "only with storePath"),
        ({"subscribe": "a", "startingOffsets": "first"}, "earliest, latest or JSON"),
        ({"subscribe": "a", "startingOffsets": '{"a": 3}'}, "not a JSON object"),
        ({"subscribe": "a", "startingOffsets": '{"a": {"b": {"0": -3}}}'}, "-2 for earliest"),
        ({"subscribe": "a", "startingOffsets": '{"a": {"b": {"x": 3}}}'}, "not a queue number"),
        ({"subscribe": "a", "endingOffsets": "earliest"}, "would read nothing"),
        ({"subscribe": "a", "endingOffsets": '{"a": {"b": {"0": -2}}}'}, "would read nothing"),
        ({"subscribe": "a", "startingTimestamp": "noon"}, "ISO 8601"),
        ({"subscribe": "a", "startingTimestamp": "9", "endingTimestamp": "8"}, "lies after"),
        ({"subscribe": "a", "maxOffsetsPerTrigger": "0"}, "at least 1"),
        ({"subscribe": "a", "maxBytesPerTrigger": "many"}, "write bytes"),
        ({"subscribe": "a", "failOnDataLoss": "perhaps"}, "true or false"),
        ({"subscribe": "a", "retries": "x"}, "whole number"),
        ({"subscribe": "a", "tags": "A", "sql": "a = 1"}, "exclude each other"),
        ({"subscribe": "a", "tags": "A || *"}, "write them as"),
        ({"subscribe": "a", "includeRetry": "true"}, "is for subscribePattern"),
        ({"subscribe": "a", "consumerGroup": "a b"}, "consumerGroup: The group name"),
        ({"subscribe": "a", "accessKey": "k"}, "belong together"),
        ({"subscribe": "a", "securityToken": "k"}, "needs accessKey"),
        ({"subscribe": "a", "tlsKey": "k"}, "tlsKey needs tlsCert"),
        ({"subscribe": "a", "tls": "false", "tlsCa": "k"}, "no sense with tls=false"),
        ({"subscribe": "a", "namesrv": "nowhere"}, "is not an address"),
        ({"subscribe": "a", "mode": "failFast"}, "give storePath too"),
        ({"storePath": "/d", "namesrv": "a:1"}, "namesrv asks a broker"),
        ({"storePath": "/d", "startingOffsets": "earliest"}, "startingOffsets asks a broker"),
        ({"storePath": "/d", "mode": "strict"}, "permissive, dropMalformed, failFast"),
        ({"storePath": "/d", "columns": "_corrupt_record,body"}, "must be the last"),
        ({"storePath": "/d", "columns": "_corrupt_record"}, "another column beside"),
    ],
)
def test_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ReadOptions.parse(options)
    assert words in str(caught.value)


def test_what_batches_and_streams_cannot_have() -> None:
    for options in (
        parse(subscribe="a", maxOffsetsPerTrigger="5"),
        parse(subscribe="a", maxBytesPerTrigger="5"),
        parse(subscribe="a", startingOffsets="latest"),
        parse(subscribe="a", startingOffsets='{"a": {"b": {"0": -1}}}'),
    ):
        options.check_stream()
        with pytest.raises(ConfigError):
            options.check_batch()
    for options in (
        parse(subscribe="a", endingOffsets="latest"),
        parse(subscribe="a", endingTimestamp="5"),
        ReadOptions.parse({"storePath": "/d"}),
    ):
        options.check_batch()
        with pytest.raises(ConfigError):
            options.check_stream()
