from __future__ import annotations

from typing import Any

import pytest

from cosmodrome import speed
from cosmodrome.errors import ProtocolError
from cosmodrome.wire.message import pack_host
from cosmodrome.wire.record import (
    decode_record,
    encode_record,
    iter_records,
    record_properties,
)

V4 = pack_host("127.0.0.1", 10911)
V6 = pack_host("2001:db8::1", 10911)


def write(out: bytearray, born: bytes = V4, store: bytes = V4, **changes: Any) -> int:
    fields: dict[str, Any] = {"body": b"hello", "properties": b"TAGS\x01A", "topic": b"T"}
    fields |= changes
    return speed.encode_record(
        out, 500 + len(out), 9, 2000, fields["topic"], 1, 42, 0x8, 1000, born, store, 3, 77,
        fields["body"], fields["properties"],
    )  # fmt: skip


@pytest.mark.parametrize("born", [V4, V6])
@pytest.mark.parametrize("store", [V4, V6])
def test_every_field_comes_back(born: bytes, store: bytes) -> None:
    out = bytearray(b"--")
    size = write(out, born, store)
    record = decode_record(out, 2)
    assert (record.size, record.queue_id, record.flag, record.queue_offset) == (size, 1, 42, 9)
    assert (record.log_offset, record.born_ms, record.store_ms) == (502, 1000, 2000)
    assert (record.born_host, record.store_host) == (born, store)
    assert record.sys_flag == 0x8 | (0x10 if born == V6 else 0) | (0x20 if store == V6 else 0)
    assert (record.reconsume_times, record.prepared_offset) == (3, 77)
    assert (record.body, record.topic, record.properties) == (b"hello", "T", "TAGS\x01A")
    assert record.body_crc == 907060870
    assert record.body_is_intact()
    assert record.pairs() == {"TAGS": "A"}
    assert len(record.message_id) == 2 * len(store) + 16


@pytest.mark.parametrize("born", [V4, V6])
@pytest.mark.parametrize("store", [V4, V6])
@pytest.mark.parametrize("body", [b"", b"x" * 300])
def test_properties_are_found_without_the_rest(born: bytes, store: bytes, body: bytes) -> None:
    out = bytearray()
    text = "TAGS\x01A\x02größe\x015\x02empty\x01"
    write(out, born, store, body=body, properties=text.encode(), topic=b"Topic")
    wanted = {"TAGS": "A", "größe": "5"}
    assert record_properties(memoryview(out)) == decode_record(out).pairs() == wanted


def test_properties_behind_a_two_byte_topic_length() -> None:
    out = bytearray()
    size = write(out)
    out[93:93] = b"\0"
    out[:8] = (size + 1).to_bytes(4, "big") + bytes.fromhex("daa320ab")
    assert record_properties(bytes(out)) == {"TAGS": "A"}


def test_a_record_that_does_not_add_up_has_no_properties() -> None:
    out = bytearray()
    write(out)
    assert record_properties(bytes(out)) == {"TAGS": "A"}
    assert record_properties(b"") == record_properties(bytes(out[:90])) == {}
    for at, data in ((84, b"\x7f"), (84, b"\xff"), (93, b"\x7f"), (93, b"\xff")):
        damaged = bytearray(out)
        damaged[at : at + 1] = data
        assert record_properties(bytes(damaged)) == {}


@pytest.mark.parametrize("hosts", [(V4, V4), (V6, V4), (V4, V6)])
def test_a_record_can_be_written_again(hosts: tuple[bytes, bytes]) -> None:
    out = bytearray()
    write(out, *hosts)
    record = decode_record(out)
    assert encode_record(record) == out
    record.topic, record.queue_id = "another topic", 77
    again = decode_record(encode_record(record))
    assert (again.topic, again.queue_id, again.body) == ("another topic", 77, record.body)
    assert again.body_is_intact()


def test_a_changed_body_is_noticed() -> None:
    out = bytearray()
    write(out)
    out[88] ^= 1
    assert not decode_record(out).body_is_intact()


def test_two_byte_topic_length() -> None:
    out = bytearray()
    size = write(out)
    out[93:93] = b"\0"
    out[:8] = (size + 1).to_bytes(4, "big") + bytes.fromhex("daa320ab")
    assert decode_record(out).topic == "T"


def test_records_follow_each_other() -> None:
    out = bytearray()
    for body in (b"a", b"", b"ccc"):
        write(out, body=body)
    assert [record.body for record in iter_records(memoryview(out))] == [b"a", b"", b"ccc"]
    assert list(iter_records(b"")) == []
    with pytest.raises(ProtocolError, match="bytes are left"):
        list(iter_records(out + b"tail"))


@pytest.mark.parametrize(
    ("at", "data", "said"),
    [
        (4, "00000000", "unknown magic"),
        (0, "0000005a", "size 90"),
        (0, "00001000", "size 4096"),
        (36, "00000030", "too short for its hosts|does not fit|add up"),
        (84, "ffffffff", "body of -1"),
        (84, "00001000", "body of 4096"),
        (93, "80", "topic of -128"),
        (93, "7f", "topic of 127"),
        (95, "0005", "add up"),
        (95, "ffff", "add up"),
    ],
)
def test_damaged_records(at: int, data: str, said: str) -> None:
    out = bytearray()
    write(out)
    patch = bytes.fromhex(data)
    out[at : at + len(patch)] = patch
    with pytest.raises(ProtocolError, match=said):
        decode_record(out)


def test_positions_outside_the_data() -> None:
    out = bytearray()
    size = write(out)
    for at in (-1, 1, size, size + 5):
        with pytest.raises(ProtocolError, match=f"record at {at}"):
            decode_record(out, at)


def test_a_record_too_short_for_its_hosts() -> None:
    out = bytearray()
    write(out, body=b"", properties=b"", topic=b"")
    out[36:40] = (0x30).to_bytes(4, "big")
    with pytest.raises(ProtocolError, match="too short for its hosts"):
        decode_record(out)
