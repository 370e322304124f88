"""The body of REGISTER_BROKER."""

from __future__ import annotations

import struct
import zlib

import pytest

from cosmodrome.env.background import at_once
from cosmodrome.errors import ProtocolError
from cosmodrome.wire import bodies, registration
from cosmodrome.wire.bodies import (
    DataVersion,
    RegisterBrokerBody,
    TopicConfig,
    TopicConfigSerializeWrapper,
)
from cosmodrome.wire.frame import VERSION


def decode(data: bytes, *, compressed: bool, version: int = VERSION) -> RegisterBrokerBody:
    return at_once(registration.reading(data, compressed=compressed, version=version))


BODY = RegisterBrokerBody(
    filter_server_list=["f:1"],
    topic_config_serialize_wrapper=TopicConfigSerializeWrapper(
        data_version=DataVersion(counter=2, timestamp=9),
        topic_config_table={
            "T": TopicConfig(topic_name="T", read_queue_nums=4, write_queue_nums=8),
            "U": TopicConfig(topic_name="U", perm=2),
        },
    ),
)


@pytest.mark.parametrize("compressed", [False, True])
def test_round_trip(compressed: bool) -> None:
    data = registration.encode(BODY, compressed=compressed)
    assert decode(data, compressed=compressed) == BODY


def test_compressed_bytes_are_upstreams() -> None:
    body = RegisterBrokerBody(
        topic_config_serialize_wrapper=TopicConfigSerializeWrapper(
            data_version=DataVersion(counter=0, timestamp=1),
            topic_config_table={
                "T": TopicConfig(topic_name="T", read_queue_nums=4, write_queue_nums=4)
            },
        )
    )
    data = registration.encode(body, compressed=True)
    plain = b'\0\0\0\x1b{"counter":0,"timestamp":1}\0\0\0\1\0\0\0\x12T 4 4 6 SINGLE_TAG\0\0\0\2[]'
    assert zlib.decompress(data) == plain


def test_nothing_is_a_sign_of_life() -> None:
    assert decode(b"", compressed=True) == RegisterBrokerBody()


def test_old_brokers_send_the_topics_alone() -> None:
    wrapper = BODY.topic_config_serialize_wrapper
    body = decode(bodies.encode(wrapper), compressed=False, version=36)
    assert body.topic_config_serialize_wrapper == wrapper


def test_more_columns_and_more_parts_are_taken() -> None:
    line = b'T 4 5 6 MULTI_TAG {"a": "b"}'
    body = decode(_pack(b"{}", [line], b"[]", b"more"), compressed=True)
    topic = body.topic_config_serialize_wrapper.topic_config_table["T"]
    assert (topic.read_queue_nums, topic.write_queue_nums, topic.perm) == (4, 5, 6)
    assert topic.topic_filter_type == "MULTI_TAG"


@pytest.mark.parametrize(
    ("plain", "why"),
    [
        (b"", "ends early"),
        (b"\0\0\0\x09{}", "ends early"),
        (b"\xff\xff\xff\xff{}", "a length of -1 bytes"),
        (b"\0\0\0\2{}\x7f\xff\xff\xff", "a length of 2147483647 bytes"),
        (b"\0\0\0\2{}\0\0\0\4\0\0\0\0", "bad topic line"),
        (b"\0\0\0\2{}\0\0\0\1\0\0\0\x08T 4 4 6 \0\0", "ends early"),
        (b"\0\0\0\2{}\0\0\0\1\0\0\0\x09T x 4 6 A\0\0\0\0", "bad topic line"),
        (b"\0\0\0\2{}\0\0\0\0\0\0\0\2{}", "filter servers"),
        (b"\0\0\0\2[]\0\0\0\0\0\0\0\2[]", "DataVersion"),
    ],
)
def test_lengths_and_parts_are_checked(plain: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        decode(zlib.compress(plain), compressed=True)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"no zlib", "does not inflate"),
        (zlib.compress(bytes([0, 0, 0, 99]) + bytes(range(99)))[:-20], "in the middle"),
        (zlib.compress(b"\1\0\0\0" + bytes(1 << 24)), "inflates to more than"),
    ],
    ids=["rubbish", "cut", "bomb"],
)
def test_inflating_is_bounded(data: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        decode(data, compressed=True)


@pytest.mark.parametrize("compressed", [False, True])
def test_many_topics_are_read_in_steps(compressed: bool) -> None:
    count = 3 * registration.TOPICS_PER_STEP
    topics = {f"T{n}": TopicConfig(topic_name=f"T{n}", perm=n % 7) for n in range(count)}
    wrapper = TopicConfigSerializeWrapper(topic_config_table=topics)
    body = RegisterBrokerBody(topic_config_serialize_wrapper=wrapper)
    data = registration.encode(body, compressed=compressed)
    steps = registration.reading(data, compressed=compressed)
    assert sum(1 for _ in steps) >= 3
    assert decode(data, compressed=compressed) == body


def test_too_many_topics_are_refused() -> None:
    rows = ",".join(f'"{n}":1' for n in range(bodies.TOPICS_MAX + 1))
    data = f'{{"topicConfigSerializeWrapper":{{"topicConfigTable":{{{rows}}}}}}}'
    with pytest.raises(ProtocolError, match="100001 topics; a broker has at most 100000"):
        decode(data.encode(), compressed=False)


@pytest.mark.parametrize(
    "row",
    ['{"topicName":"T","perm":"4"}', '{"topicName":"T","perm":4,"attributes":null,"x":[]}'],
)
def test_topics_are_read_as_leniently_as_every_body(row: str) -> None:
    table = f'{{"T":{row},"U":null}}'
    data = f'{{"topicConfigSerializeWrapper":{{"topicConfigTable":{table}}}}}'
    body = decode(data.encode(), compressed=False)
    assert body == bodies.decode(RegisterBrokerBody, data.encode())
    assert list(body.topic_config_serialize_wrapper.topic_config_table) == ["T"]


def test_a_bad_topic_is_named() -> None:
    data = b'{"topicConfigSerializeWrapper":{"topicConfigTable":{"T":{"perm":"x"}}}}'
    with pytest.raises(ProtocolError, match="TopicConfig"):
        decode(data, compressed=False)


def _pack(version: bytes, lines: list[bytes], servers: bytes, rest: bytes) -> bytes:
    parts = [struct.pack(">i", len(version)), version, struct.pack(">i", len(lines))]
    for part in (*lines, servers):
        parts += (struct.pack(">i", len(part)), part)
    return zlib.compress(b"".join(parts) + rest)
