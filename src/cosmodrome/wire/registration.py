"""The body of REGISTER_BROKER: what a broker tells name servers about its topics.

It is JSON, or a compressed form:

    zlib of: length i32, DataVersion | count i32, lines | length i32, list of filter servers

A line is a length i32 and "name read write perm filterType" with single blanks (5.x adds
attributes). A broker may have 100,000 topics: a registration is read in steps of a few.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Generator, Iterator

import msgspec

from cosmodrome.errors import ProtocolError
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import (
    TOPICS_MAX,
    Body,
    DataVersion,
    RegisterBrokerBody,
    TopicConfig,
    TopicConfigSerializeWrapper,
)
from cosmodrome.wire.frame import VERSION

INFLATED_BYTES_MAX = 16 * 1024 * 1024  # as much as fits into a frame without compression
TOPICS_PER_STEP = 100
PIECE_BYTES = 4096  # compressed, that are inflated at once
INFLATED_PIECE_BYTES = 256 * 1024
_LENGTH = struct.Struct(">i")
_BARE_WRAPPER_BEFORE = 37  # Compat: brokers before 3.0.11 send the topics alone


class _UnreadTopics(Body, kw_only=True):
    """A TopicConfigSerializeWrapper whose topics are still text."""

    data_version: DataVersion = msgspec.field(default_factory=DataVersion)
    topic_config_table: dict[str, msgspec.Raw] = msgspec.field(default_factory=dict)


class _UnreadBody(Body, kw_only=True):
    filter_server_list: list[str] = msgspec.field(default_factory=list)
    topic_config_serialize_wrapper: _UnreadTopics = msgspec.field(default_factory=_UnreadTopics)


def encode(body: RegisterBrokerBody, *, compressed: bool) -> bytes:
    """The body of REGISTER_BROKER. The compressed form loses `order` and `topicSysFlag`."""
    if not compressed:
        return bodies.encode(body)
    wrapper = body.topic_config_serialize_wrapper
    lines = [
        f"{topic.topic_name} {topic.read_queue_nums} {topic.write_queue_nums} {topic.perm}"
        f" {topic.topic_filter_type}".encode()
        for topic in wrapper.topic_config_table.values()
    ]
    version = bodies.encode(wrapper.data_version)
    servers = msgspec.json.encode(body.filter_server_list)
    parts = [_LENGTH.pack(len(version)), version, _LENGTH.pack(len(lines))]
    for line in (*lines, servers):
        parts += (_LENGTH.pack(len(line)), line)
    return zlib.compress(b"".join(parts), 9)


def reading(
    data: bytes, *, compressed: bool, version: int = VERSION
) -> Generator[None, None, RegisterBrokerBody]:
    """Read a body in steps; `version` is the one in the request's frame.

    JSON is looked at as a whole in the first step. The others read a few topics each.
    """
    if not data:
        return RegisterBrokerBody()
    if version < _BARE_WRAPPER_BEFORE:
        wrapper = bodies.decode(TopicConfigSerializeWrapper, data)
        return RegisterBrokerBody(topic_config_serialize_wrapper=wrapper)
    if compressed:
        return (yield from _reading_lines(_Cursor(data)))
    try:
        unread = msgspec.json.decode(data, type=_UnreadBody, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return bodies.decode(RegisterBrokerBody, data)  # more slowly and more leniently
    if b'"$ref"' in data:
        return bodies.decode(RegisterBrokerBody, data)
    return (yield from _reading_topics(unread))


def _reading_lines(cursor: _Cursor) -> Generator[None, None, RegisterBrokerBody]:
    data_version = bodies.decode(DataVersion, cursor.take(cursor.length()))
    topics: dict[str, TopicConfig] = {}
    count = cursor.length()
    _check_count(count)
    for number in range(count):
        yield from _step(number)
        topic = _topic_line(cursor.take(cursor.length()))
        topics[topic.topic_name] = topic
    try:
        servers = msgspec.json.decode(cursor.take(cursor.length()), type=list[str])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"registration: bad list of filter servers: {error}") from error
    return _body(data_version, topics, servers)


def _reading_topics(unread: _UnreadBody) -> Generator[None, None, RegisterBrokerBody]:
    wrapper = unread.topic_config_serialize_wrapper
    topics: dict[str, TopicConfig] = {}
    _check_count(len(wrapper.topic_config_table))
    for number, (name, text) in enumerate(wrapper.topic_config_table.items()):
        yield from _step(number)
        if (row := bytes(text)) != b"null":
            topics[name] = bodies.decode(TopicConfig, row)
    return _body(wrapper.data_version, topics, unread.filter_server_list)


def _step(number: int) -> Iterator[None]:
    if number % TOPICS_PER_STEP == 0:
        yield


def _body(
    version: DataVersion, topics: dict[str, TopicConfig], servers: list[str]
) -> RegisterBrokerBody:
    wrapper = TopicConfigSerializeWrapper(data_version=version, topic_config_table=topics)
    return RegisterBrokerBody(filter_server_list=servers, topic_config_serialize_wrapper=wrapper)


def _check_count(count: int) -> None:
    if count > TOPICS_MAX:
        raise ProtocolError(
            f"registration: {count} topics; a broker has at most {TOPICS_MAX}, delete unused ones"
        )


class _Cursor:
    """Takes lengths and bytes from compressed data, of which it inflates no more than it has to."""

    def __init__(self, data: bytes) -> None:
        self._left = memoryview(data)
        self._inflater = zlib.decompressobj()
        self._text = b""  # inflated and not taken, from `at` on
        self._at = 0
        self._inflated_bytes = 0

    def length(self) -> int:
        (length,) = _LENGTH.unpack(self.take(_LENGTH.size))
        if not 0 <= length <= INFLATED_BYTES_MAX:
            raise ProtocolError(f"registration: a length of {length} bytes is impossible")
        return int(length)

    def take(self, size: int) -> bytes:
        while len(self._text) - self._at < size:
            self._text = self._text[self._at :] + self._inflate()
            self._at = 0
        end = self._at + size
        taken = self._text[self._at : end]
        self._at = end
        return taken

    def _inflate(self) -> bytes:
        inflater = self._inflater
        if inflater.eof:
            raise ProtocolError(f"registration ends early, at byte {self._inflated_bytes}")
        piece = inflater.unconsumed_tail or bytes(self._left[:PIECE_BYTES])
        if not inflater.unconsumed_tail:
            self._left = self._left[PIECE_BYTES:]
        try:
            text = inflater.decompress(piece, INFLATED_PIECE_BYTES)
        except zlib.error as error:
            raise ProtocolError(f"registration does not inflate: {error}") from error
        if not text and not piece and not inflater.eof:
            raise ProtocolError("registration ends in the middle of its compressed data")
        self._inflated_bytes += len(text)
        if self._inflated_bytes > INFLATED_BYTES_MAX:
            raise ProtocolError(f"registration inflates to more than {INFLATED_BYTES_MAX} bytes")
        return text


def _topic_line(line: bytes) -> TopicConfig:
    try:
        name, read, write, perm, filter_type, *_ = line.decode().split(" ", 5)
        return TopicConfig(
            topic_name=name,
            read_queue_nums=int(read),
            write_queue_nums=int(write),
            perm=int(perm),
            topic_filter_type=filter_type,
        )
    except ValueError as error:
        raise ProtocolError(f"registration: bad topic line {line[:80]!r}: {error}") from None
