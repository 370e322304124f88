"""What the real name server answered, this one answers too."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import pytest
from tests.goldens import Golden, each_golden, frames
from tests.unit.nameserver.nameserver_peer import RawPeer

from cosmodrome.env.options import NameServerOptions, SocketOptions
from cosmodrome.env.real import real_env
from cosmodrome.nameserver.app import NameServer, build_nameserver
from cosmodrome.wire import fastjson, properties_text
from cosmodrome.wire.frame import Frame

REGISTER, ROUTE, CLUSTER, TOPICS, VALUES, SETTINGS = 103, 105, 106, 206, 219, 319
# Bodies compared byte by byte once our additional member is taken out.
ADDED = b'"topicSynFlag":0,'
# Of the real server's settings only these exist here with the same meaning and default.
COMPARABLE_SETTINGS = (
    "bindAddress",
    "orderMessageEnable",
    "productEnvName",
    "serverChannelMaxIdleTimeSeconds",
    "serverSocketBacklog",
)
# The real server works on a one-way registration in another thread; so soon behind one it may
# answer a question from before.
LAG_S = 0.1


def captured(golden: Golden, *folders: str) -> list[dict[str, Any]]:
    """Frames of the name server's link in the order they were seen."""
    rows = [row for path in golden.captures(*folders) for row in frames(path)]
    return sorted((row for row in rows if row["link"] == "ns"), key=lambda row: row["seq"])


def frame_bytes(row: dict[str, Any]) -> bytes:
    return base64.b64decode(row["frame_b64"])


def body_of(row: dict[str, Any]) -> bytes:
    data = frame_bytes(row)
    return data[len(data) - row["body_len"] :]


async def started() -> NameServer:
    server = build_nameserver(NameServerOptions(listen_port=0), SocketOptions(), real_env())
    await server.start()
    return server


def compare(
    request: dict[str, Any], golden: dict[str, Any], code: int, ext: Any, body: bytes
) -> None:
    said = f"seq {request['seq']} {request['name']}"
    assert code == golden["code"], said
    if code != 0:
        return
    expected = body_of(golden)
    kind = request["code"]
    if kind == ROUTE:
        assert body.replace(ADDED, b"") == expected, said
    elif kind == CLUSTER:
        assert body == expected, said
    elif kind == SETTINGS:
        ours, theirs = properties_text.loads(body), properties_text.loads(expected)
        assert len(theirs.keys() & set(COMPARABLE_SETTINGS)) > 3
        for key in theirs.keys() & set(COMPARABLE_SETTINGS):
            assert ours[key] == theirs[key], f"{said} {key}"
    elif expected:
        assert normal(fastjson.loads(body)) == normal(fastjson.loads(expected)), said
    else:
        assert body == b"", said
    assert ext == (golden["header"].get("extFields") or {}), said


def normal(value: Any) -> Any:
    """Lists whose order means nothing, in one order."""
    if isinstance(value, dict):
        return {key: normal(item) for key, item in value.items()}
    if isinstance(value, list):
        return sorted((normal(item) for item in value), key=repr)
    return value


Exchange = tuple[dict[str, Any], dict[str, Any], Frame]  # request, the real answer, ours


async def replay(golden: Golden, folder: str) -> list[Exchange]:
    golden.skip_without(f"wire/{folder}")
    rows = captured(golden, folder)
    answers = {
        (row["conn"], row["header"]["opaque"]): row for row in rows if row["kind"] == "response"
    }
    server = await started()
    peers: dict[int, RawPeer] = {}
    exchanges: list[Exchange] = []
    lagging = 0
    told_at = 0.0
    try:
        for row in rows:
            if row["dir"] != "c2s":
                continue
            if row["conn"] not in peers:
                peers[row["conn"]] = await RawPeer.connect(server.port)
            peer = peers[row["conn"]]
            peer.send(frame_bytes(row))
            if row["kind"] == "oneway":
                await peer.ask(TOPICS)  # behind it on the same connection: now it was served
                told_at = row["t"]
                continue
            recorded = answers.get((row["conn"], row["header"]["opaque"]))
            answer = await peer.answer(row["header"]["opaque"])
            if recorded is None or (answer.code != recorded["code"] and row["t"] < told_at + LAG_S):
                lagging += 1
            else:
                exchanges.append((row, recorded, answer))
    finally:
        for peer in peers.values():
            await peer.close()
        await server.stop()
    assert len(exchanges) > 5 and lagging <= 2
    return exchanges


@each_golden
@pytest.mark.parametrize("folder", ["json", "binary", "clients", "acl"])
async def test_every_captured_request_gets_the_captured_answer(golden: Golden, folder: str) -> None:
    for row, theirs, answer in await replay(golden, folder):
        compare(row, theirs, answer.code, answer.ext, answer.body)


@each_golden
@pytest.mark.parametrize("folder", ["v53", "v53-client498"])
async def test_brokers_and_clients_of_5_3_get_what_they_need(golden: Golden, folder: str) -> None:
    for row, real, answer in await replay(golden, folder):
        said = f"seq {row['seq']} {row['name']}"
        assert answer.code == real["code"], said
        if answer.code == 0 and row["code"] == ROUTE:
            ours, theirs = json.loads(answer.body), fastjson.loads(body_of(real))
            for ours_queue, theirs_queue in zip(
                ours["queueDatas"], theirs["queueDatas"], strict=True
            ):
                assert theirs_queue.items() <= ours_queue.items(), said


@each_golden
async def test_both_dialects_were_compared(golden: Golden) -> None:
    """The captures hold loose and strict routes, so the test above has seen both."""
    rows = [r for r in captured(golden, "json", "clients") if r.get("request_code") == ROUTE]
    found = {b"{0:" in body_of(row) for row in rows if row["code"] == 0}
    assert found == {True, False}


async def test_the_compressed_form_as_java_writes_it() -> None:
    version = b'{"counter":0,"timestamp":1}'
    text = bytes.fromhex(
        "0000001b"
        + version.hex()
        + "00000001"
        + "00000012542034203420362053494e474c455f544147"
        + "000000025b5d"
    )
    body = zlib.compress(text, 9)
    server = await started()
    peer = await RawPeer.connect(server.port)
    who = {
        "brokerName": "b",
        "brokerAddr": "127.0.0.1:1",
        "clusterName": "C",
        "haServerAddr": "127.0.0.1:2",
        "brokerId": "0",
        "compressed": "true",
        "bodyCrc32": str(zlib.crc32(body) & 0x7FFFFFFF),
    }
    try:
        for damaged in (body[:-9], zlib.compress(text[:-1]), zlib.compress(text[:4]), b"x"):
            answer = await peer.ask(REGISTER, {**who, "bodyCrc32": "0"}, damaged)
            assert answer.code == 1
        assert (await peer.ask(ROUTE, {"topic": "T"})).code == 17
        assert (await peer.ask(REGISTER, who, body)).code == 0
        route = json.loads((await peer.ask(ROUTE, {"topic": "T"})).body)
        assert route["queueDatas"][0]["readQueueNums"] == 4
        known = await peer.ask(322, who, version)
        assert known.ext == {"changed": "false"}
    finally:
        await peer.close()
        await server.stop()
