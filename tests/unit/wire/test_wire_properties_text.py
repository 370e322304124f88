"""Settings bodies, read as Java reads them."""

from __future__ import annotations

import base64

import pytest
from tests.goldens import Golden, each_golden, frames

from cosmodrome.errors import ProtocolError
from cosmodrome.wire.properties_text import dumps, loads


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("a=1\nb=2\n", {"a": "1", "b": "2"}),
        ("# one\n  ! two\n\n \t\na=1", {"a": "1"}),
        ("a:1\nb 2\n c\t=\t3 \nd\n", {"a": "1", "b": "2", "c": "3 ", "d": ""}),
        ("a = b = c\nd==e", {"a": "b = c", "d": "=e"}),
        ("a=1\r\nb=2\rc=3", {"a": "1", "b": "2", "c": "3"}),
        ("a=x,\\\n    y,\\\r\n\tz\nb=1", {"a": "x,y,z", "b": "1"}),
        ("a=x\\\\\nb=1", {"a": "x\\", "b": "1"}),
        ("a=x\\", {"a": "x"}),
        ("a=1\\\n#2", {"a": "1#2"}),
        ("a\\=b\\:c\\ d=1", {"a=b:c d": "1"}),
        ("a=\\t\\n\\r\\f\\q\\u4e2d\\ud83d\\ude00", {"a": "\t\n\r\fq中😀"}),
        ("a=1\na=2", {"a": "2"}),
        ("a=\u2028\u0085", {"a": "\u2028\u0085"}),
        ("", {}),
    ],
)
def test_reads(text: str, settings: dict[str, str]) -> None:
    assert loads(text) == settings
    assert loads(text.encode()) == settings


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"a=1\nb=\\u12", "line 2: .*four hexadecimal"),
        (b"a=\\ud800", "line 1: .*half a character"),
        (b"a=\xff", "not UTF-8 at byte 2"),
    ],
)
def test_refuses(data: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        loads(data)


def test_writes_plain_lines_where_nothing_needs_an_escape() -> None:
    assert (
        dumps({"namesrvAddr": "a:1;b:2", "x": "值 = #"})
        == "namesrvAddr=a:1;b:2\nx=值 = #\n".encode()
    )


@each_golden
def test_reads_the_settings_upstream_sends(golden: Golden) -> None:
    found = 0
    for path in golden.captures("json"):
        for frame in frames(path):
            if frame["kind"] == "response" and frame.get("request_code") in (26, 319):
                body = _body(frame["frame_b64"])
                settings = loads(body)
                assert "rocketmqHome" in settings
                assert loads(dumps(settings)) == settings
                found += 1
    assert found


def _body(frame_b64: str) -> bytes:
    frame = base64.b64decode(frame_b64)
    header_length = int.from_bytes(frame[5:8], "big")
    return frame[8 + header_length :]
