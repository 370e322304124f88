"""The codec between rows and header fields."""

from __future__ import annotations

import pytest

from cosmodrome.errors import ProtocolError
from cosmodrome.wire import table
from cosmodrome.wire.commands import (
    GetMaxOffset,
    OffsetReply,
    PullMessage,
    QueryMessage,
    SendMessageV2,
    SendReply,
    UnregisterClient,
)
from cosmodrome.wire.frame import Frame


def test_numbers_arrive_as_strings() -> None:
    ask = table.decode(GetMaxOffset, {"topic": "T", "queueId": "3"}, b"x")
    assert ask == GetMaxOffset(topic="T", queue_id=3, body=b"x")


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("false", False), ("0", False), ("1", True)]
)
def test_booleans_of_every_client(text: str, value: bool) -> None:
    ext = {"a": "P", "b": "T", "c": "D", "d": "4", "e": "0", "f": "0", "g": "1", "h": "0"}
    assert table.decode(SendMessageV2, {**ext, "k": text}, b"").unit_mode is value


def test_unknown_fields_and_fields_named_like_the_frame_are_ignored() -> None:
    ext = {"topic": "T", "queueId": "3", "bname": "b", "code": "x", "remark": "y", "body": "z"}
    assert table.decode(GetMaxOffset, ext, b"") == GetMaxOffset(topic="T", queue_id=3)


def test_text_that_says_null_stays_text() -> None:
    assert table.decode(GetMaxOffset, {"topic": "null", "queueId": "0"}, b"").topic == "null"


@pytest.mark.parametrize(
    ("ext", "named"),
    [
        ({"topic": "T"}, "queueId"),
        ({"topic": "T", "queueId": "three"}, "queueId"),
        ({"topic": "T", "queueId": "2147483648"}, "queueId"),
        ({"topic": "T", "queueId": ""}, "queueId"),
    ],
)
def test_a_bad_header_names_row_and_field(ext: dict[str, str], named: str) -> None:
    with pytest.raises(ProtocolError, match=rf"GET_MAX_OFFSET \(30\).*{named}"):
        table.decode(GetMaxOffset, ext, b"")


def test_encode_writes_strings_and_leaves_none_out() -> None:
    ask = QueryMessage("T", "k", 32, 0, 2**63 - 1, unique_key_query=True)
    assert table.encode(ask) == {
        "topic": "T",
        "key": "k",
        "maxNum": "32",
        "beginTimestamp": "0",
        "endTimestamp": "9223372036854775807",
        "_UNIQUE_KEY_QUERY": "true",
    }
    assert table.encode(UnregisterClient("c")) == {"clientID": "c"}


def test_reply_keeps_code_remark_and_body_out_of_the_header() -> None:
    reply = SendReply("id", 1, 2, region="R", trace_on=False, remark="r", body=b"b")
    fields = {"msgId": "id", "queueId": "1", "queueOffset": "2"}
    assert table.encode(reply) == {**fields, "MSG_REGION": "R", "TRACE_ON": "false"}


def test_decode_reply_takes_code_remark_and_body_from_the_frame() -> None:
    frame = Frame(code=0, opaque=7, flag=1, ext={"offset": "5"}, body=b"b", remark="r")
    reply = table.decode_reply(GetMaxOffset, frame)
    assert reply == OffsetReply(offset=5, body=b"b", remark="r")


def test_decode_reply_says_whose_answer_is_wrong() -> None:
    with pytest.raises(ProtocolError, match="answer to GET_MAX_OFFSET"):
        table.decode_reply(GetMaxOffset, Frame(code=0, opaque=1))


def test_one_code_has_one_row() -> None:
    with pytest.raises(AssertionError, match="11 has two rows"):
        table.command(11, "TWICE", served_by=table.BROKER)(PullMessage)


def test_handler_marks_accumulate() -> None:
    class Service:
        @GetMaxOffset.handler
        def max_offset(self, ask: GetMaxOffset, call: table.Call) -> OffsetReply:
            return OffsetReply(offset=1)

    assert Service.max_offset.serves == (GetMaxOffset,)  # type: ignore[attr-defined]


def test_whole_numbers_are_read_as_java_reads_them() -> None:
    from cosmodrome.wire.commands import GetMaxOffset

    for text, number in (("007", 7), ("+7", 7), ("0", 0), ("-0012", -12), ("000", 0)):
        ask = table.decode(GetMaxOffset, {"topic": "007", "queueId": text}, b"")
        assert (ask.topic, ask.queue_id) == ("007", number), text
    for text in ("", "+", "-", "--1", "1.5", "0x10", "1 ", "+-1"):
        with pytest.raises(ProtocolError, match="queueId"):
            table.decode(GetMaxOffset, {"topic": "t", "queueId": text}, b"")
