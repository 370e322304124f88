"""Messages that are taken apart when they are asked say what their records say."""

from __future__ import annotations

import pytest

from cosmodrome.client.receive.engine.decoding import Decoder
from cosmodrome.client.receive.engine.subscriptions import Subscription
from cosmodrome.client.values import ReceivedMessage
from cosmodrome.errors import ProtocolError
from cosmodrome.layout import SYS_BORN_V6
from cosmodrome.wire.record import Record, decode_record, encode_record

HOST, HOST_V6 = bytes((10, 0, 0, 1, 0, 0, 0, 9)), bytes(15) + bytes((1, 0, 0, 0, 9))


def stored(offset: int, body: bytes = b"body", *, sys_flag: int = 0) -> bytes:
    born = HOST_V6 if sys_flag & SYS_BORN_V6 else HOST
    properties = f"TAGS\x01t{offset}\x02UNIQ_KEY\x01id{offset}"
    return encode_record(
        Record(
            size=0,
            magic=0,
            body_crc=0,
            queue_id=3,
            flag=7,
            queue_offset=offset,
            log_offset=99,
            sys_flag=sys_flag,
            born_ms=11,
            born_host=born,
            store_ms=12,
            store_host=HOST,
            reconsume_times=2,
            prepared_offset=0,
            body=body,
            topic="orders",
            properties=properties,
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
    assert found.size == sum(map(len, parts))
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
    assert found.size == len(stored(1)) + len(stored(3))


def test_what_a_filter_leaves_out_has_no_bytes() -> None:
    class Even:
        def keep(self, group: str, message: ReceivedMessage) -> bool:
            return message.queue_offset % 2 == 0

    decoder = Decoder("g", "", 1 << 20, (Even(),))
    found = decoder.decode(stored(1) + stored(2, b"long" * 9), "b", Subscription.of("orders", 1))
    assert [message.queue_offset for message in found.messages] == [2]
    assert found.size == found.messages[0].size == len(stored(2, b"long" * 9))


def test_a_damaged_body_of_an_answer_is_an_error() -> None:
    with pytest.raises(ProtocolError):
        DECODER.decode(stored(1) + stored(2)[:-1], "b", Subscription.of("orders", 1))
