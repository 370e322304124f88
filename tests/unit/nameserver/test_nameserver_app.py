from __future__ import annotations

import asyncio
import json
import logging
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.nameserver.nameserver_peer import RawPeer

from cosmodrome.env.options import NameServerOptions, SocketOptions
from cosmodrome.env.real import real_env
from cosmodrome.errors import Code, ConfigError, Refused
from cosmodrome.nameserver import routes as routes_module
from cosmodrome.nameserver.app import NameServer, build_nameserver
from cosmodrome.transport.channel import Channel
from cosmodrome.wire import commands, fastjson
from cosmodrome.wire.table import Command


def topic(name: str, queues: int = 4, perm: int = 6, sys_flag: int = 0) -> dict[str, Any]:
    return {
        "order": False,
        "perm": perm,
        "readQueueNums": queues,
        "topicFilterType": "SINGLE_TAG",
        "topicName": name,
        "topicSysFlag": sys_flag,
        "writeQueueNums": queues,
    }


def wrapper(*topics: dict[str, Any], counter: int = 1) -> dict[str, Any]:
    return {
        "dataVersion": {"counter": counter, "timestamp": 1_700_000_000_000},
        "topicConfigTable": {each["topicName"]: each for each in topics},
    }


def registration_body(*topics: dict[str, Any], counter: int = 1) -> bytes:
    value = {
        "filterServerList": [],
        "topicConfigSerializeWrapper": wrapper(*topics, counter=counter),
    }
    return json.dumps(value).encode()


def who(name: str = "broker-a", broker_id: int = 0, port: int = 10911) -> dict[str, str]:
    return {
        "brokerName": name,
        "brokerAddr": f"127.0.0.1:{port}",
        "clusterName": "DefaultCluster",
        "haServerAddr": f"127.0.0.1:{port + 1}",
        "brokerId": str(broker_id),
    }


@pytest.fixture
async def nameserver(tmp_path: Path) -> AsyncIterator[NameServer]:
    server = build_nameserver(
        NameServerOptions(listen_port=0, kv_config_path=str(tmp_path / "kvConfig.json")),
        SocketOptions(),
        real_env(seed=1),
    )
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def peer(nameserver: NameServer) -> AsyncIterator[RawPeer]:
    peer = await RawPeer.connect(nameserver.port)
    yield peer
    await peer.close()


async def register(peer: RawPeer, *topics: dict[str, Any], **words: Any) -> None:
    body = registration_body(*topics)
    answer = await peer.ask(103, who(**words), body)
    assert answer.code == 0, answer.remark


async def code_of_route(peer: RawPeer, name: str) -> int:
    return (await peer.ask(105, {"topic": name})).code


# --- life


async def test_start_and_stop_twice_and_again() -> None:
    server = build_nameserver(NameServerOptions(listen_port=0), SocketOptions(), real_env())
    assert not server.ready
    for _ in range(2):
        await server.start()
        await server.start()
        assert server.ready and server.address == f"127.0.0.1:{server.port}"
        peer = await RawPeer.connect(server.port)
        assert await code_of_route(peer, "T") == Code.TOPIC_NOT_EXIST
        await server.stop()
        await server.stop()
        assert not server.ready
        assert await peer.closed()
        await peer.close()


async def test_a_taken_port_is_said(nameserver: NameServer) -> None:
    options = NameServerOptions(listen_port=nameserver.port)
    second = build_nameserver(options, SocketOptions(), real_env())
    for _ in range(2):
        with pytest.raises(ConfigError, match=str(nameserver.port)):
            await second.start()
    assert not second.ready
    await second.stop()


def test_bad_durations_are_said() -> None:
    bad: list[dict[str, Any]] = [
        {"broker_expired_time": 0},
        {"scan_not_active_broker_interval": -1},
    ]
    for words in bad:
        with pytest.raises(ConfigError, match="positive"):
            build_nameserver(NameServerOptions(**words), SocketOptions(), real_env())


@pytest.mark.parametrize(
    ("bind", "address"),
    [("", "127.0.0.1:9"), ("0.0.0.0", "127.0.0.1:9"), ("::", "[::1]:9"), ("h", "h:9")],
)
def test_address_can_be_reached(bind: str, address: str) -> None:
    options = NameServerOptions(listen_port=9, bind_address=bind)
    assert build_nameserver(options, SocketOptions(), real_env()).address == address


# --- brokers


async def test_register_route_and_leave(peer: RawPeer) -> None:
    await register(peer, topic("T"))
    answer = await peer.ask(105, {"topic": "T"})
    assert answer.code == 0
    assert answer.body == (
        b'{"brokerDatas":[{"brokerAddrs":{"0":"127.0.0.1:10911"},"brokerName":"broker-a",'
        b'"cluster":"DefaultCluster"}],"filterServerTable":{},"queueDatas":[{"brokerName":'
        b'"broker-a","perm":6,"readQueueNums":4,"topicSynFlag":0,"topicSysFlag":0,'
        b'"writeQueueNums":4}]}'
    )
    assert (await peer.ask(104, who())).code == 0
    assert await code_of_route(peer, "T") == Code.TOPIC_NOT_EXIST
    assert (await peer.ask(104, who())).code == 0


async def test_the_dialect_follows_version_and_wish(peer: RawPeer) -> None:
    await register(peer, topic("T"))
    await register(peer, broker_id=1, port=10921)
    quoted = b'{"0":"127.0.0.1:10911","1":"127.0.0.1:10921"}'
    bare = b'{0:"127.0.0.1:10911",1:"127.0.0.1:10921"}'
    for version, ext, expected in (
        (401, {}, quoted),
        (409, {"acceptStandardJsonOnly": "false"}, quoted),
        (400, {"acceptStandardJsonOnly": "true"}, quoted),
        (400, {}, bare),
        (317, {}, bare),
        (63, {"acceptStandardJsonOnly": "false"}, bare),
    ):
        body = (await peer.ask(105, {"topic": "T", **ext}, version=version)).body
        assert expected in body
        assert b" " not in body
    info = await peer.ask(106)
    assert info.body == (
        b'{"brokerAddrTable":{"broker-a":{"brokerAddrs":'
        + bare
        + b',"brokerName":"broker-a","cluster":"DefaultCluster"}},'
        b'"clusterAddrTable":{"DefaultCluster":["broker-a"]}}'
    )


async def test_a_slave_learns_its_master(peer: RawPeer) -> None:
    first = await peer.ask(103, who(broker_id=1, port=10921))
    assert (first.code, first.ext) == (0, {})
    await register(peer, topic("T"))
    second = await peer.ask(103, who(broker_id=1, port=10921))
    assert second.ext == {"masterAddr": "127.0.0.1:10911", "haServerAddr": "127.0.0.1:10912"}


async def test_an_old_broker_sends_the_bare_wrapper(peer: RawPeer) -> None:
    body = json.dumps(wrapper(topic("T"))).encode()
    assert (await peer.ask(103, who(), body, version=36)).code == 0
    assert await code_of_route(peer, "T") == 0


async def test_a_registration_without_answer_counts(peer: RawPeer) -> None:
    peer.tell(103, who(), registration_body(topic("T")))
    assert await code_of_route(peer, "T") == 0


async def test_checksums(peer: RawPeer) -> None:
    body = registration_body(topic("T"))
    right = zlib.crc32(body) & 0x7FFFFFFF
    wrong = await peer.ask(103, {**who(), "bodyCrc32": str(right ^ 1)}, body)
    assert wrong.code == 1 and "bodyCrc32" in str(wrong.remark)
    assert await code_of_route(peer, "T") == Code.TOPIC_NOT_EXIST
    assert (await peer.ask(103, {**who(), "bodyCrc32": "0"}, body)).code == 0
    assert (await peer.ask(103, {**who(), "bodyCrc32": str(right)}, body)).code == 0


async def test_a_bad_registration_is_refused_with_a_reason(
    peer: RawPeer, caplog: pytest.LogCaptureFixture
) -> None:
    await register(peer, topic("T"))
    before = (await peer.ask(106)).body, (await peer.ask(206)).body
    with caplog.at_level(logging.WARNING):
        for ext, body in (
            (who(), b"{"),
            (who(), b"[]"),
            (who(), registration_body(topic("../T"))),
            (who(), registration_body(topic("U")).replace(b'"U":', b'"V":')),
            (who(), registration_body(topic("T", queues=-1), counter=2)),
            ({**who(), "brokerAddr": "nowhere"}, b""),
            ({**who(), "brokerId": "-1"}, b""),
            ({**who(), "brokerId": "x"}, b""),
            ({**who(), "compressed": "true"}, b"not zlib"),
            ({"brokerName": "a"}, b""),
        ):
            answer = await peer.ask(103, ext, body)
            assert answer.code == 1 and answer.remark
    assert before == ((await peer.ask(106)).body, (await peer.ask(206)).body)
    assert "registration refused" in caplog.text


async def test_query_data_version(peer: RawPeer) -> None:
    version = {"counter": 1, "timestamp": 1_700_000_000_000}
    unknown = await peer.ask(322, who(), json.dumps(version).encode())
    assert (unknown.ext, unknown.body) == ({"changed": "true"}, b"")
    await register(peer, topic("T"))
    same = await peer.ask(322, who(), json.dumps(version).encode())
    assert same.ext == {"changed": "false"}
    assert json.loads(same.body) == version
    other = await peer.ask(322, who(), json.dumps({**version, "counter": 2}).encode())
    assert other.ext == {"changed": "true"}
    assert json.loads(other.body) == version
    assert (await peer.ask(322, who())).ext == {"changed": "true"}
    assert (await peer.ask(322, who(), b"{{")).code == 1


# --- liveness


async def until_route(peer: RawPeer, name: str, code: int) -> None:
    async with asyncio.timeout(60):
        while await code_of_route(peer, name) != code:
            pass


async def test_a_closed_connection_unregisters_at_once(
    nameserver: NameServer, peer: RawPeer
) -> None:
    broker = await RawPeer.connect(nameserver.port)
    await register(broker, topic("T"))
    assert await code_of_route(peer, "T") == 0
    await broker.close()
    await until_route(peer, "T", Code.TOPIC_NOT_EXIST)


async def test_a_new_connection_takes_liveness_over(nameserver: NameServer, peer: RawPeer) -> None:
    old = await RawPeer.connect(nameserver.port)
    new = await RawPeer.connect(nameserver.port)
    await register(old, topic("T"))
    await register(old, topic("Marker"), name="marker", port=1)
    await register(new, topic("T"))
    await old.close()
    await until_route(peer, "Marker", Code.TOPIC_NOT_EXIST)
    assert await code_of_route(peer, "T") == 0
    await new.close()
    await until_route(peer, "T", Code.TOPIC_NOT_EXIST)


async def test_a_silent_broker_is_dropped_and_its_connection_closed() -> None:
    options = NameServerOptions(
        listen_port=0, scan_not_active_broker_interval=20, broker_expired_time=150
    )
    server = build_nameserver(options, SocketOptions(), real_env())
    await server.start()
    broker, peer = await RawPeer.connect(server.port), await RawPeer.connect(server.port)
    try:
        await register(broker, topic("T"))
        assert await broker.closed()
        assert await code_of_route(peer, "T") == Code.TOPIC_NOT_EXIST
    finally:
        await broker.close()
        await peer.close()
        await server.stop()


async def test_name_servers_share_nothing(nameserver: NameServer, peer: RawPeer) -> None:
    other = build_nameserver(NameServerOptions(listen_port=0), SocketOptions(), real_env())
    await other.start()
    elsewhere = await RawPeer.connect(other.port)
    await register(peer, topic("T"))
    assert await code_of_route(elsewhere, "T") == Code.TOPIC_NOT_EXIST
    await register(elsewhere, topic("T"))
    assert await code_of_route(elsewhere, "T") == 0
    await elsewhere.close()
    await other.stop()


# --- lists and changes


async def topics_in(peer: RawPeer, code: int, ext: dict[str, str] | None = None) -> set[str]:
    answer = await peer.ask(code, ext)
    assert answer.code == 0
    return set(json.loads(answer.body)["topicList"])


async def test_topic_lists(peer: RawPeer) -> None:
    assert json.loads((await peer.ask(304)).body) == {"topicList": []}
    flags = {"Plain": 0, "Unit": 1, "Sub": 2, "Both": 3}
    await register(peer, *(topic(name, sys_flag=flag) for name, flag in flags.items()))
    assert await topics_in(peer, 206) == set(flags)
    assert await topics_in(peer, 224, {"cluster": "DefaultCluster"}) == set(flags)
    assert await topics_in(peer, 224, {"cluster": "Nowhere"}) == set()
    assert await topics_in(peer, 311) == {"Unit", "Both"}
    assert await topics_in(peer, 312) == {"Sub", "Both"}
    assert await topics_in(peer, 313) == {"Sub"}
    system = json.loads((await peer.ask(304)).body)
    assert system["brokerAddr"] == "127.0.0.1:10911"
    assert set(system["topicList"]) == {"DefaultCluster", "broker-a"}


async def test_write_permission_and_topic_deletion(peer: RawPeer) -> None:
    await register(peer, topic("T", perm=7), topic("U"))

    async def perm() -> int:
        body = json.loads((await peer.ask(105, {"topic": "T"})).body)
        return int(body["queueDatas"][0]["perm"])

    assert (await peer.ask(205, {"brokerName": "broker-a"})).ext == {"wipeTopicCount": "2"}
    assert await perm() == 5
    assert (await peer.ask(327, {"brokerName": "broker-a"})).ext == {"addTopicCount": "2"}
    assert await perm() == 6
    assert (await peer.ask(205, {"brokerName": "nobody"})).ext == {"wipeTopicCount": "0"}
    assert (await peer.ask(216, {"topic": "T", "clusterName": "Other"})).code == 0
    assert await topics_in(peer, 206) == {"T", "U"}
    assert (await peer.ask(216, {"topic": "T", "clusterName": "DefaultCluster"})).code == 0
    assert (await peer.ask(216, {"topic": "U"})).code == 0
    assert await topics_in(peer, 206) == set()


async def test_order_configuration_reaches_brokers_and_routes(peer: RawPeer) -> None:
    await register(peer, topic("T"))
    order = {"namespace": "ORDER_TOPIC_CONFIG", "key": "T", "value": "broker-a:4;值"}
    assert (await peer.ask(100, order)).code == 0
    again = await peer.ask(103, who(), registration_body(topic("T")))
    assert json.loads(again.body) == {"table": {"T": "broker-a:4;值"}}
    assert b"orderTopicConf" not in (await peer.ask(105, {"topic": "T"})).body
    assert (await peer.ask(318, body=b"orderMessageEnable=true")).code == 0
    standard = (await peer.ask(105, {"topic": "T"})).body
    assert json.loads(standard)["orderTopicConf"] == "broker-a:4;值"
    loose = (await peer.ask(105, {"topic": "T"}, version=317)).body
    assert fastjson.loads(loose)["orderTopicConf"] == "broker-a:4;值"


async def test_kv_and_settings_by_typed_calls(nameserver: NameServer, tmp_path: Path) -> None:
    channel = Channel("127.0.0.1", nameserver.port)
    try:
        await channel.call(commands.PutKvConfig(namespace="NS", key="k", value="v1 值"))
        got = await channel.call(commands.GetKvConfig(namespace="NS", key="k"))
        assert got.value == "v1 值"
        listed = await channel.call(commands.GetKvlistByNamespace(namespace="NS"))
        assert json.loads(listed.body) == {"table": {"k": "v1 值"}}
        await channel.call(commands.DeleteKvConfig(namespace="NS", key="k"))
        all_missing: list[Command[Any]] = [
            commands.GetKvConfig(namespace="NS", key="k"),
            commands.GetKvlistByNamespace(namespace="Nowhere"),
        ]
        for missing in all_missing:
            with pytest.raises(Refused) as refusal:
                await channel.call(missing)
            assert refusal.value.code == Code.QUERY_NOT_FOUND
        await channel.call(commands.UpdateNamesrvConfig(body=b"productEnvName=east"))
        shown = await channel.call(commands.GetNamesrvConfig())
        assert "productEnvName=east" in shown.body.decode().splitlines()
        with pytest.raises(Refused) as refusal:
            await channel.call(commands.UpdateNamesrvConfig(body=b"kvConfigPath=/tmp/x"))
        assert refusal.value.code == Code.NO_PERMISSION
    finally:
        await channel.close()
    assert json.loads((tmp_path / "kvConfig.json").read_text()) == {"configTable": {"NS": {}}}


async def test_unknown_codes_are_answered(peer: RawPeer) -> None:
    assert (await peer.ask(9999)).code == Code.REQUEST_CODE_NOT_SUPPORTED
    assert (await peer.ask(10)).code == Code.REQUEST_CODE_NOT_SUPPORTED


# --- large registrations


async def test_a_large_registration_stops_nobody(
    nameserver: NameServer, peer: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes_module, "TOPICS_PER_STEP", 50)
    seen: list[int] = []
    turns = 0
    registering = routes_module.Routes.registering

    def counted(self: routes_module.Routes, *words: Any) -> Any:
        for step in registering(self, *words):
            seen.append(turns)
            yield step

    monkeypatch.setattr(routes_module.Routes, "registering", counted)

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await register(peer, *(topic(f"Topic{number}") for number in range(2000)))
    counting.cancel()
    assert len(seen) == 2 * 2000 // 50
    assert len(set(seen)) == len(seen), "others run after each step"
    assert await code_of_route(peer, "Topic1999") == 0


async def test_a_registration_that_inflates_to_too_much_is_refused(peer: RawPeer) -> None:
    for count, size, said in ((200_000, 1, "at most 100000"), (90_000, 200, "than 16777216 bytes")):
        line = b"T" * size + b" 1 1 6 SINGLE_TAG"
        lines = (len(line).to_bytes(4, "big") + line) * count
        version = b'{"counter":1,"timestamp":2}'
        body = zlib.compress(
            b"".join((len(version).to_bytes(4, "big"), version, count.to_bytes(4, "big"), lines))
        )
        answer = await peer.ask(103, who() | {"compressed": "true"}, body)
        assert answer.code == 1 and said in (answer.remark or "")
    assert await code_of_route(peer, "T") == Code.TOPIC_NOT_EXIST
