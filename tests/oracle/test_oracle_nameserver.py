"""Our name server and the real one hear the same frames and must answer alike.

One story is told to both over raw sockets: brokers come, change, lose rights and leave, operators
write the KV table, and after each chapter every query is asked. Remarks and dates may differ.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from peers.java import JavaCluster
from peers.process import Process, accepts, free_port
from peers.resolve import ROOT, ToolMissing

from cosmodrome.wire import fastjson

MODERN, OLD = 409, 317
Answer = tuple[int, dict[str, str], Any]


class Link:
    """One connection: a broker is gone when its connection is."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self._file = self._socket.makefile("rb")

    def ask(
        self, code: int, fields: dict[str, str], body: bytes = b"", version: int = MODERN
    ) -> Answer:
        header = json.dumps(
            {
                "code": code,
                "flag": 0,
                "language": "JAVA",
                "opaque": 1,
                "version": version,
                "extFields": fields,
            }
        ).encode()
        self._socket.sendall(
            struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body
        )
        size, mark = struct.unpack(">II", self._file.read(8))
        data = self._file.read(size - 4)
        header_size = mark & 0xFFFFFF
        answer = json.loads(data[:header_size])
        content = data[header_size:]
        return answer["code"], answer.get("extFields") or {}, _plain(content)

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def _plain(body: bytes) -> Any:
    """A body without what may differ: the order of lists that are sets in upstream's memory."""
    if not body:
        return None
    return {"bare keys": b"{0:" in body, "value": _sorted(fastjson.loads(body))}


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        # Ours also names the flag as 4.8 and older did.
        return {str(key): _sorted(value[key]) for key in value if key != "topicSynFlag"}
    if isinstance(value, list):
        return sorted((_sorted(item) for item in value), key=lambda item: json.dumps(item))
    return value


class Server:
    def __init__(self, port: int) -> None:
        self.port = port
        self._links: dict[str, Link] = {}

    def link(self, name: str) -> Link:
        if name not in self._links:
            self._links[name] = Link(self.port)
        return self._links[name]

    def drop(self, name: str) -> None:
        self._links.pop(name).close()

    def close(self) -> None:
        for name in tuple(self._links):
            self.drop(name)


class Both:
    """The same question to both; the answers must be equal."""

    def __init__(self, ours: Server, theirs: Server) -> None:
        self.ours = ours
        self.theirs = theirs

    def ask(
        self,
        code: int,
        fields: dict[str, str] | None = None,
        body: bytes = b"",
        *,
        link: str = "client",
        version: int = MODERN,
    ) -> Answer:
        ours, theirs = (
            server.link(link).ask(code, fields or {}, body, version)
            for server in (self.ours, self.theirs)
        )
        assert ours == theirs, f"request {code} {fields}"
        return ours

    def ask_everything(self) -> None:
        for cluster in ("C1", "C2", "Nowhere"):
            self.ask(224, {"cluster": cluster})
        for code in (106, 206, 311, 312, 313):
            self.ask(code)
        self._system_topics()
        for topic in (*TOPICS, "Fresh", "Squeezed", "Nowhere"):
            for version in (MODERN, OLD):
                self.ask(105, {"topic": topic}, version=version)
            strict = {"topic": topic, "acceptStandardJsonOnly": "true"}
            self.ask(105, strict, version=OLD)

    def _system_topics(self) -> None:
        """One address of any broker: which of them is chance."""
        answers = [server.link("client").ask(304, {}) for server in (self.ours, self.theirs)]
        names = [answer[2]["value"].pop("brokerAddr", None) for answer in answers]
        assert answers[0] == answers[1]
        assert all((name is None) == (names[1] is None) for name in names)


TOPICS = {"Plain": 0, "Unit": 1, "UnitSub": 2, "UnitBoth": 3, "Ordered": 0, "%RETRY%g": 0}


def topic(name: str, flag: int = 0, queues: int = 4, perm: int = 6) -> dict[str, Any]:
    return {
        "order": name == "Ordered",
        "perm": perm,
        "readQueueNums": queues,
        "topicFilterType": "SINGLE_TAG",
        "topicName": name,
        "topicSysFlag": flag,
        "writeQueueNums": queues,
    }


def registration(counter: int, *topics: dict[str, Any], filters: tuple[str, ...] = ()) -> bytes:
    wrapper = {
        "dataVersion": {"counter": counter, "timestamp": 1_700_000_000_000},
        "topicConfigTable": {one["topicName"]: one for one in topics},
    }
    document = {"filterServerList": list(filters), "topicConfigSerializeWrapper": wrapper}
    return json.dumps(document, separators=(",", ":")).encode()


def squeezed(counter: int, *topics: dict[str, Any]) -> bytes:
    """The compressed form: counted texts in one stream."""

    def counted(text: str) -> bytes:
        return struct.pack(">i", len(text)) + text.encode()

    lines = [
        f"{one['topicName']} {one['readQueueNums']} {one['writeQueueNums']} {one['perm']}"
        f" {one['topicFilterType']}"
        for one in topics
    ]
    version = json.dumps({"counter": counter, "timestamp": 1_700_000_000_000})
    plain = counted(version) + struct.pack(">i", len(lines)) + b"".join(map(counted, lines))
    return zlib.compress(plain + counted("[]"), 9)


def broker(name: str, cluster: str, number: int, port: int, body: bytes = b"") -> dict[str, str]:
    return {
        "brokerName": name,
        "brokerAddr": f"10.0.0.{port % 200}:{port}",
        "clusterName": cluster,
        "haServerAddr": f"10.0.0.{port % 200}:{port + 1}",
        "brokerId": str(number),
        "compressed": "false",
        "bodyCrc32": str(zlib.crc32(body) & 0x7FFFFFFF),
    }


ALL = tuple(topic(name, flag) for name, flag in TOPICS.items())


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("nameservers")
    try:
        java = JavaCluster(folder / "java", free_port(), free_port(-2, 1))
        java.directory.mkdir()
        java.prepare()
    except ToolMissing as error:
        pytest.skip(str(error))
    port = free_port()
    ours = Process(
        "cosmo namesrv",
        [*(sys.executable, "-m", "cosmodrome.cli", "namesrv", "run"), "--port", str(port)],
        folder / "cosmo.log",
        env={"PYTHONPATH": str(ROOT / "src"), "ROCKETMQ_HOME": str(folder)},
    )
    pair = Both(Server(port), Server(java.namesrv_port))
    try:
        java.namesrv.start()
        ours.start()
        ours.wait_until(lambda: accepts(port), 30)
        java.namesrv.wait_until(lambda: accepts(java.namesrv_port), 60)
        yield pair
    finally:
        pair.ours.close()
        pair.theirs.close()
        ours.stop()
        java.namesrv.stop()


@pytest.fixture
def clean(both: Both) -> Iterator[Both]:
    """Every broker of the test leaves at its end."""
    yield both
    for name, cluster, number, port in (
        ("a", "C1", 0, 10911),
        ("a", "C1", 1, 10921),
        ("b", "C2", 0, 10931),
    ):
        both.ask(104, broker(name, cluster, number, port))
    both.ask_everything()


def register_all(both: Both) -> None:
    body = registration(1, *ALL, filters=("10.0.0.9:30000",))
    both.ask(103, broker("a", "C1", 0, 10911, body), body, link="a0")
    body = registration(1, topic("Plain", queues=8), topic("Unit", 0), topic("%RETRY%g"))
    both.ask(103, broker("b", "C2", 0, 10931, body), body, link="b0")
    # A slave registers what it copied; it is told its master.
    body = registration(1, *ALL)
    answer = both.ask(103, broker("a", "C1", 1, 10921, body), body, link="a1")
    assert set(answer[1]) == {"masterAddr", "haServerAddr"}


def test_an_empty_name_server(both: Both) -> None:
    both.ask_everything()
    both.ask(322, broker("a", "C1", 0, 10911), b'{"counter":1,"timestamp":2}')
    for code in (205, 327):
        both.ask(code, {"brokerName": "nobody"})
    both.ask(216, {"topic": "Nowhere"})
    both.ask(104, broker("nobody", "C1", 0, 1))


def test_brokers_come(clean: Both) -> None:
    register_all(clean)
    clean.ask_everything()


def test_brokers_change(clean: Both) -> None:
    register_all(clean)
    for body in (
        registration(1, topic("Fresh")),  # the same version
        registration(2, topic("Fresh"), topic("Plain", queues=2, perm=4)),
        b"",
    ):
        clean.ask(103, broker("a", "C1", 0, 10911, body), body, link="a0")
        if not body.count(b'"counter":1,'):
            clean.ask_everything()
    for counter in (2, 3):
        version = {"counter": counter, "timestamp": 1_700_000_000_000}
        clean.ask(322, broker("a", "C1", 0, 10911), json.dumps(version).encode(), link="a0")
    body = squeezed(4, topic("Squeezed", 3))
    fields = broker("b", "C2", 0, 10931, body) | {"compressed": "true"}
    clean.ask(103, fields, body, link="b0")
    clean.ask_everything()
    wrong = registration(9, topic("Wrong"))
    clean.ask(103, broker("b", "C2", 0, 10931) | {"bodyCrc32": "7"}, wrong, link="b0")
    clean.ask_everything()


def test_a_slave_becomes_master(clean: Both) -> None:
    register_all(clean)
    clean.ask(104, broker("a", "C1", 0, 10911), link="a0")
    clean.ask_everything()
    body = registration(3, *ALL)
    clean.ask(103, broker("a", "C1", 0, 10921, body), body, link="a1")
    clean.ask_everything()
    clean.ask(104, broker("a", "C1", 0, 10921), link="a1")


def test_write_permissions(clean: Both) -> None:
    register_all(clean)
    for code, counted in ((205, "wipeTopicCount"), (327, "addTopicCount")):
        answer = clean.ask(code, {"brokerName": "a"})
        assert answer[1] == {counted: str(len(ALL))}
        clean.ask_everything()


def test_topics_are_deleted(clean: Both) -> None:
    register_all(clean)
    clean.ask(216, {"topic": "Plain", "clusterName": "C2"})
    clean.ask_everything()
    clean.ask(216, {"topic": "Plain"})
    clean.ask_everything()


def test_values_and_ordered_topics(clean: Both) -> None:
    space = {"namespace": "ORDER_TOPIC_CONFIG"}
    clean.ask(219, {"namespace": "nothing"})
    clean.ask(101, {**space, "key": "nothing"})
    clean.ask(102, {**space, "key": "nothing"})
    for key, value in (("Plain", "a:4"), ("Ordered", "a:4;b:8"), ("Gone", "x")):
        clean.ask(100, {**space, "key": key, "value": value})
        clean.ask(101, {**space, "key": key})
    clean.ask(102, {**space, "key": "Gone"})
    clean.ask(101, {**space, "key": "Gone"})
    clean.ask(219, space)
    register_all(clean)
    body = registration(1, *ALL)
    answer = clean.ask(103, broker("a", "C1", 0, 10911, body), body, link="a0")
    assert answer[2]["value"]["table"] == {"Plain": "a:4", "Ordered": "a:4;b:8"}
    clean.ask_everything()
    clean.ask(318, {}, b"orderMessageEnable=true")
    clean.ask_everything()
    route = clean.ask(105, {"topic": "Ordered"})[2]["value"]
    assert route["orderTopicConf"] == "a:4;b:8"
    clean.ask(318, {}, b"orderMessageEnable=false")
    for key in ("Plain", "Ordered"):
        clean.ask(102, {**space, "key": key})
    clean.ask(219, space)


def test_connections_break(clean: Both) -> None:
    register_all(clean)
    for name in ("a0", "b0"):
        for server in (clean.ours, clean.theirs):
            server.drop(name)
            # The real one takes a moment to hear of it.
            for _ in range(200):
                if name[0] + '"' not in json.dumps(server.link("client").ask(106, {})[2]) or (
                    name == "a0" and _has_no_master(server)
                ):
                    break
        clean.ask_everything()


def _has_no_master(server: Server) -> bool:
    table = server.link("client").ask(106, {})[2]["value"]["brokerAddrTable"]
    return "0" not in table.get("a", {}).get("brokerAddrs", {})


def test_wrong_requests(both: Both) -> None:
    for path in ("kvConfigPath", "configStorePath"):
        both.ask(318, {}, f"{path}=/tmp/elsewhere".encode())
    # Without its fields a request is refused by ours; the real one answers some of them never.
    assert all(server.link("client").ask(105, {})[0] for server in (both.ours, both.theirs))
    both.ask_everything()
