"""Messages that are taken apart when they are asked say what their records say."""

from __future__ import annotations

import pytest

from cosmodrome.client.receive.arrivals import Decoder
from cosmodrome.client.receive.subscriptions import Subscription
from cosmodrome.errors import ProtocolError
from cosmodrome.layout import SYS_BORN_V6
from cosmodrome.wire.record import Record, decode_record, encode_record

HOST, HOST_V6 = bytes((10, 0, 0, 1, 0, 0, 0, 9)), bytes(15) + bytes((1, 0, 0, 0, 9))


def stored(offset: int, body: bytes = b"body", *, sys_flag: int = 0) -> bytes:
    born = HOST_V6 if sys_flag & SYS_BORN_V6 else HOST
    properties = f"TAGS\x01t{offset}\x02UNIQ_KEY\x01id{offset}"
    return encode_record(
        Record(
            *(0, 0, 0, 3, 7, offset, 99, sys_flag, 11, born, 12, HOST, 2, 0, body),
            *("orders", properties),
        )
    )


DECODER = Decoder("g", "", 1 << 20, ())


def test_ordinary_and_other_records_beside_each_other() -> None:
    parts = [stored(1), stored(2, b"", sys_flag=SYS_BORN_V6), stored(3, b"x" * 300), stored(4, b"")]
    found = DECODER.decode(
        b"".join(parts), "b", Subscription.of("orders", 1), min_offset=0, max_offset=9
    )
    assert not found.damaged
    assert len(found.messages) == len(parts)
    for message, part in zip(found.messages, parts, strict=True):
        record = decode_record(part)
        assert message.queue_offset == record.queue_offset
        assert message.size == len(part)
        assert message.body == record.body
        assert message.record == record
        assert message.msg_id == f"id{record.queue_offset}"
        assert (message.topic, message.broker_name) == ("orders", "b")
        assert (message.min_offset, message.max_offset) == (0, 9)


def test_a_changed_body_stays() -> None:
    (message,) = DECODER.decode(stored(1), "b", Subscription.of("orders", 1)).messages
    message.body = b"other"
    assert message.body == b"other"
    assert message.record.body == b"body"


def test_tags_choose() -> None:
    data = stored(1) + stored(2) + stored(3)
    found = DECODER.decode(data, "b", Subscription.of("orders", 1, tags="t1 || t3"))
    assert [message.queue_offset for message in found.messages] == [1, 3]


def test_a_damaged_body_of_an_answer_is_an_error() -> None:
    with pytest.raises(ProtocolError):
        DECODER.decode(stored(1) + stored(2)[:-1], "b", Subscription.of("orders", 1))
