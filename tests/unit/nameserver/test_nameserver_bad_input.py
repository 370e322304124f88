"""Wrong requests to the name server: a code, a remark that helps, and the connection stays."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.nameserver.nameserver_peer import RawPeer
from tests.unit.wire.wrong_requests import GARBAGE, NO_NUMBERS, header_of, numbers_of

from cosmodrome.env.options import NameServerOptions, SocketOptions
from cosmodrome.env.real import real_env
from cosmodrome.errors import Code
from cosmodrome.nameserver.app import build_nameserver
from cosmodrome.wire import table
from cosmodrome.wire.table import NAMESERVER, Command

ROWS = [
    row
    for code, row in sorted(table.rows().items())
    if NAMESERVER in row.served_by and not row.planned
]
NOT_FOUND, SYSTEM = Code.QUERY_NOT_FOUND, Code.SYSTEM_ERROR

# What is wrong: request code, header, body, the code of the answer, what its remark says.
WRONG: dict[str, tuple[int, dict[str, str], bytes, int, str]] = {
    "route: unknown topic": (105, {"topic": "Nowhere"}, b"", Code.TOPIC_NOT_EXIST, "Nowhere"),
    "route: no topic": (105, {}, b"", SYSTEM, "topic"),
    "kv: unknown key": (101, {"namespace": "n", "key": "k"}, b"", NOT_FOUND, "n"),
    "kv: unknown namespace": (219, {"namespace": "n"}, b"", NOT_FOUND, "n"),
    "settings: a path": (318, {}, b"kvConfigPath=/tmp/x", Code.NO_PERMISSION, "kvConfigPath"),
    "settings: unknown": (318, {}, b"noSuchKey=1", SYSTEM, "noSuchKey"),
    "settings: bad value": (318, {}, b"brokerExpiredTime=soon", SYSTEM, "brokerExpiredTime"),
    "a broker's request": (310, {}, b"", Code.REQUEST_CODE_NOT_SUPPORTED, "broker"),
    "unknown code": (9999, {}, b"", Code.REQUEST_CODE_NOT_SUPPORTED, "9999"),
}


@pytest.fixture
async def peer(tmp_path: Path) -> AsyncIterator[RawPeer]:
    server = build_nameserver(
        NameServerOptions(listen_port=0, kv_config_path=str(tmp_path / "kvConfig.json")),
        SocketOptions(),
        real_env(seed=1),
    )
    await server.start()
    peer = await RawPeer.connect(server.port)
    yield peer
    await peer.close()
    await server.stop()


@pytest.mark.parametrize("wrong", WRONG)
async def test_wrong_requests(peer: RawPeer, wrong: str) -> None:
    code, ext, body, expected, said = WRONG[wrong]
    answer = await peer.ask(code, ext, body)
    assert answer.code == expected, answer
    assert answer.remark and said in answer.remark
    assert (await peer.ask(206)).code == 0


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
async def test_every_row_survives_wrong_headers_and_bodies(
    peer: RawPeer, row: type[Command[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    good, code = header_of(row), row.request_code
    for body in GARBAGE:
        answer = await peer.ask(code, good, body)
        assert answer.code in row.success_codes or answer.remark, (body, answer)
    for field in table.header_fields(row):
        ext = {name: value for name, value in good.items() if name != field.encode_name}
        answer = await peer.ask(code, ext)
        assert answer.code in row.success_codes or answer.remark, field.encode_name
        if field.required:
            assert answer.code == SYSTEM and field.encode_name in (answer.remark or "")
    for name in numbers_of(row):
        for value in NO_NUMBERS:
            answer = await peer.ask(code, {**good, name: value})
            assert answer.code == SYSTEM and name in (answer.remark or ""), (name, value)
        for value in ("-1", "-2147483648", "2147483647"):
            answer = await peer.ask(code, {**good, name: value})
            assert answer.code in row.success_codes or answer.remark, (name, value)
    assert (await peer.ask(206)).code == 0
    assert "failed unexpectedly" not in caplog.text
