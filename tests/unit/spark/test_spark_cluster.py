"""Asking a cluster without an event loop: real embedded nodes, and peers that fail on purpose."""

from __future__ import annotations

import dataclasses
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.plain_peer import Peer, answer
from tests.unit.spark.live_kit import another_broker, connection, dead_address, queue_of, send

from cosmodrome import Message
from cosmodrome.blocking import Node, Producer, embedded
from cosmodrome.client.values import NoRoute
from cosmodrome.errors import Code, ConfigError, CosmodromeError, Refused, TimedOut, Unreachable
from cosmodrome.spark import links
from cosmodrome.spark.cluster import Cluster, PartlyUnreachable
from cosmodrome.wire.commands.consume import QueryMessage, QueryMessageReply
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.message import UNIQ_KEY, format_properties, pack_host
from cosmodrome.wire.record import Record, encode_record


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with embedded() as node:
        yield node


@pytest.fixture(autouse=True)
def no_kept_connections() -> Iterator[None]:
    yield
    links.close_all()


def test_queues_bounds_and_times(node: Node, cosmo_topic: str) -> None:
    send(node, cosmo_topic, 5, queue_id=1)
    with Cluster(connection(node.namesrv)) as cluster:
        assert cosmo_topic in cluster.topics()
        queues = cluster.queues([cosmo_topic])
        assert [queue.queue_id for queue in queues] == [0, 1, 2, 3]
        assert set(queues.values()) == {(node.broker_address,)}
        bounds = cluster.bounds(queues)
        assert [bounds[queue] for queue in queues] == [(0, 0), (0, 5), (0, 0), (0, 0)]
        assert list(cluster.at_time(queues, 0).values()) == [0, 0, 0, 0]
        assert list(cluster.at_time(queues, 1 << 50).values()) == [0, 5, 0, 0]
        busy = list(queues)[1]
        average = cluster.average_bytes(busy, 0)
        assert average is not None and 91 < average < 400
        assert cluster.average_bytes(busy, 5) is None


def test_many_queues_are_one_round_trip(node: Node, cosmo_topic: str) -> None:
    send(node, cosmo_topic, 1)
    with Cluster(connection(node.namesrv)) as cluster:
        queues = list(cluster.queues([cosmo_topic]))
        found = cluster.bounds(queues * 300)  # more than leave at once
        assert found == dict.fromkeys(queues, (0, 0)) | {queues[0]: (0, 1)}


def test_a_missing_topic_is_named(node: Node, cosmo_topic: str) -> None:
    send(node, cosmo_topic, 1)
    with Cluster(connection(node.namesrv)) as cluster, pytest.raises(NoRoute, match="no-such"):
        cluster.queues([cosmo_topic, "no-such"])


def test_a_queue_that_is_not_there_is_named(node: Node, cosmo_topic: str) -> None:
    send(node, cosmo_topic, 1)
    with Cluster(connection(node.namesrv)) as cluster:
        gone = queue_of(cosmo_topic, 0, "other")
        with pytest.raises(PartlyUnreachable, match="broker other") as raised:
            cluster.bounds([gone, *cluster.queues([cosmo_topic])])
        assert len(raised.value.results) == 4
        assert set(raised.value.failures) == {"other"}


def test_progress_of_a_group(node: Node, cosmo_topic: str) -> None:
    send(node, cosmo_topic, 9, queue_id=2)
    with Cluster(connection(node.namesrv)) as cluster:
        queues = list(cluster.queues([cosmo_topic]))
        cluster.commit("lag", {queues[2]: 7})
        assert cluster.committed("lag", queues)[queues[2]] == 7
        cluster.commit("lag", {queues[2]: 3})
        assert cluster.committed("lag", queues)[queues[2]] == 3


def test_messages_by_unique_key(node: Node, cosmo_topic: str) -> None:
    ids = send(node, cosmo_topic, 3, queue_id=3)
    with Cluster(connection(node.namesrv)) as cluster:
        (found,) = cluster.find_by_unique_keys(cosmo_topic, [ids[1]])[ids[1]]
        assert found[:3] == ("embedded", 3, 1)
        assert found.properties[UNIQ_KEY] == ids[1]
        many = cluster.find_by_unique_keys(cosmo_topic, [*ids, "F" * 32])
        assert [len(many[key]) for key in (*ids, "F" * 32)] == [1, 1, 1, 0]


def test_names_in_a_namespace(node: Node, cosmo_topic: str) -> None:
    send(node, cosmo_topic, 2, namespace="shop")
    with Cluster(connection(node.namesrv, namespace="shop")) as cluster:
        assert cosmo_topic in cluster.topics()
        queues = list(cluster.queues([cosmo_topic]))
        assert queues[0].topic == cosmo_topic
        assert cluster.bounds(queues)[queues[0]] == (0, 2)
        cluster.commit("g", {queues[0]: 1})
        assert cluster.committed("g", queues)[queues[0]] == 1
    with Cluster(connection(node.namesrv)) as outside:
        assert f"shop%{cosmo_topic}" in outside.topics()
        assert cosmo_topic not in outside.topics()


def test_the_next_name_server_is_asked(node: Node, cosmo_topic: str) -> None:
    send(node, cosmo_topic, 1)
    with Cluster(connection(f"{dead_address()};{node.namesrv}")) as cluster:
        assert len(cluster.queues([cosmo_topic])) == 4
        assert len(cluster.queues([cosmo_topic])) == 4


def test_no_name_server_says_where_it_looked() -> None:
    address = dead_address()
    with (
        Cluster(connection(address, retries=1)) as cluster,
        pytest.raises(Unreachable, match=rf"no name server answers, 2 attempts: .*{address}"),
    ):
        cluster.topics()


def test_a_restarted_broker_is_found_again(cosmo_topic: str) -> None:
    with embedded() as node:
        send(node, cosmo_topic, 4)
        with Cluster(connection(node.namesrv, retries=3)) as cluster:
            queues = list(cluster.queues([cosmo_topic]))
            assert cluster.bounds(queues)[queues[0]] == (0, 4)
            node.stop_broker()
            with (
                Cluster(connection(node.namesrv, retries=0)) as other,
                pytest.raises(Unreachable, match="does not answer"),
            ):
                other._brokers.update(cluster._brokers)
                other.bounds(queues)
            node.start_broker()
            assert cluster.bounds(queues)[queues[0]] == (0, 4)


def test_a_silent_broker_is_waited_for_once(
    cosmo_topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(links.Attempts, "wait", lambda self: waits.append(len(self.failures)))
    with embedded() as node:
        send(node, cosmo_topic, 4)
        with Cluster(connection(node.namesrv, retries=3)) as cluster:
            queues = list(cluster.queues([cosmo_topic]))
            cluster.bounds(queues)
            for _ in range(2):
                node.stop_broker()
                waits.clear()
                for _ in range(3):
                    with pytest.raises(Unreachable, match="does not answer"):
                        cluster.bounds(queues)
                    with pytest.raises(Unreachable, match="does not answer"):
                        cluster.commit("g", {queues[0]: 1})
                assert waits == [1, 2, 3, 1, 2, 3]
                node.start_broker()
                assert cluster.bounds(queues)[queues[0]] == (0, 4)
                cluster.commit("g", {queues[0]: 1})


def test_a_replica_answers_when_the_master_does_not(node: Node, cosmo_topic: str) -> None:
    send(node, cosmo_topic, 6)
    with Cluster(connection(node.namesrv)) as cluster:
        queue = next(iter(cluster.queues([cosmo_topic])))
        cluster.bounds([queue])
        assert not cluster.answered_by_replica("embedded")
        cluster._brokers["embedded"] = {0: dead_address(), 1: node.broker_address}
        assert cluster.bounds([queue]) == {queue: (0, 6)}
        assert cluster.answered_by_replica("embedded")
        with pytest.raises(Unreachable):
            cluster.commit("g", {queue: 1})  # only the master's offsets count


def test_more_copies_than_a_broker_gives_at_once(
    node: Node, cosmo_topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that was restarted again and again; its rows are seconds apart in the index."""
    send(node, cosmo_topic, 1)
    host = pack_host("127.0.0.1", 1)
    log = [
        Record(
            **dict.fromkeys((f.name for f in dataclasses.fields(Record)), 0)  # type: ignore[arg-type]
            | {"topic": cosmo_topic, "queue_offset": number, "store_ms": 5_000 * number}
            | {"born_host": host, "store_host": host, "body": b"x"}
            | {"properties": format_properties({UNIQ_KEY: "K", "N": str(number)})}
        )
        for number in range(100)
    ]
    real = Cluster._ask_broker

    def ask(cluster: Cluster, name: str, topic: str, commands: Any, **how: Any) -> Any:
        if not isinstance(commands[0], QueryMessage):
            return real(cluster, name, topic, commands, **how)
        assert len(commands) == 1
        newest = [one for one in log if one.store_ms <= commands[0].end_timestamp][-32:]
        reply = QueryMessageReply(index_last_update_timestamp=0, index_last_update_phyoffset=0)
        reply.body = b"".join(map(encode_record, newest))
        return [reply]

    monkeypatch.setattr(Cluster, "_ask_broker", ask)
    with Cluster(connection(node.namesrv)) as cluster:
        found = cluster.find_by_unique_keys(cosmo_topic, ["K"])["K"]
        assert sorted(one.queue_offset for one in found) == list(range(100))


def test_two_brokers(node: Node, cosmo_topic: str, tmp_path: Path) -> None:
    with another_broker(node, "b", tmp_path) as address:
        with Producer(node.namesrv, group="p") as producer:
            for name in ("embedded", "b"):
                for number in range(3):
                    message = Message(cosmo_topic, b"%d" % number)
                    producer.send(message, queue=queue_of(cosmo_topic, number, name))
        with Cluster(connection(node.namesrv)) as cluster:
            queues = cluster.queues([cosmo_topic])
            assert {queue.broker_name for queue in queues} == {"embedded", "b"}
            assert queues[queue_of(cosmo_topic, 0, "b")] == (address,)
            bounds = cluster.bounds(queues)
            assert sum(high for _, high in bounds.values()) == 6
            found = cluster.find_by_unique_keys(cosmo_topic, ["none"])["none"]
            assert found == []
    with Cluster(connection(node.namesrv)) as cluster:
        cluster._brokers["b"] = {0: address}
        with pytest.raises(PartlyUnreachable) as raised:
            cluster.bounds(queues)
        assert {queue.broker_name for queue in raised.value.results} == {"embedded"}


def test_refusals_name_the_queue(node: Node, cosmo_topic: str) -> None:
    send(node, cosmo_topic, 1)
    with Cluster(connection(node.namesrv)) as cluster:
        cluster.queues([cosmo_topic])
        beyond = queue_of(cosmo_topic, 99)
        with pytest.raises(Refused, match="queue 99 on embedded") as raised:
            cluster.average_bytes(beyond, 0)
        assert raised.value.code == Code.SYSTEM_ERROR


def test_every_request_is_signed() -> None:
    def respond(frames: list[Frame]) -> bytes:
        return b"".join(answer(frame, body=b'{"topicList":["T"]}') for frame in frames)

    with Peer(respond) as peer:
        keys: dict[str, Any] = {
            "access_key": "me",
            "secret_key": "secret-1",
            "security_token": "token",
        }
        with Cluster(connection(peer.address, **keys)) as cluster:
            assert cluster.topics() == ["T"]
        (request,) = peer.requests
        assert request.ext["AccessKey"] == "me" and request.ext["SecurityToken"] == "token"
        assert len(request.ext["Signature"]) == 28
        assert "secret-1" not in str(request)


# --- connections that are kept -----------------------------------------------------------------


def test_a_connection_is_kept_for_the_next_user(node: Node) -> None:
    wanted = connection(node.namesrv)
    first = links.take(node.namesrv, wanted)
    second = links.take(node.namesrv, wanted)
    assert first is not second
    first.connect()
    second.connect()
    links.give_back(node.namesrv, wanted, first)
    links.give_back(node.namesrv, wanted, second)
    assert links.take(node.namesrv, connection(node.namesrv, timeout_ms=1)) not in (first, second)
    assert {links.take(node.namesrv, wanted), links.take(node.namesrv, wanted)} == {first, second}
    first.close()
    second.close()


def test_idle_and_broken_connections_are_not_given_out(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = connection(node.namesrv)
    link = links.take(node.namesrv, wanted)
    link.connect()
    links.give_back(node.namesrv, wanted, link)
    monkeypatch.setattr(links, "IDLE_S", -1.0)
    assert links.take(node.namesrv, wanted) is not link
    assert not link.is_open
    monkeypatch.setattr(links, "IDLE_S", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        link = links.take(address, wanted)
        link.connect()
        server.accept()[0].close()
        links.give_back(address, wanted, link)
        assert links.take(address, wanted) is not link


def test_connections_of_a_parent_process_are_not_used(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = connection(node.namesrv)
    link = links.take(node.namesrv, wanted)
    link.connect()
    links.give_back(node.namesrv, wanted, link)
    monkeypatch.setattr(links._pool, "_process", -1)
    assert links.take(node.namesrv, wanted) is not link


def test_tls_files_that_cannot_be_used_are_named() -> None:
    with pytest.raises(ConfigError, match="tlsCa=/no/such"):
        links.tls_context(connection("h:1", tls=True, tls_ca="/no/such"))
    with pytest.raises(ConfigError, match="tlsCert=/no/such"):
        links.tls_context(connection("h:1", tls=True, tls_cert="/no/such"))
    context = links.tls_context(connection("h:1", tls=True, tls_verify=False))
    assert context is not None and not context.check_hostname
    assert links.tls_context(connection("h:1")) is None


def test_who_is_not_let_in_is_told_which_options_it_is_about() -> None:
    def hint(error: CosmodromeError, cause: Exception | None = None, **options: Any) -> str:
        error.__cause__ = cause
        explained = links.explained(error, connection("h:1", **options))
        assert isinstance(explained, type(error)) and str(explained).startswith(str(error))
        return str(explained).removeprefix(str(error))

    keys: dict[str, Any] = {"access_key": "me", "secret_key": "hidden"}
    acl = "org.apache.rocketmq.acl.common.AclException: "
    unsigned = Refused(Code.SYSTEM_ERROR, f"{acl}No accessKey is configured")
    assert hint(unsigned) == "; set the options accessKey and secretKey"
    forged = Refused(Code.NO_PERMISSION, "check signature failed.")
    assert hint(forged, **keys) == "; check the options accessKey and secretKey"
    topic = Refused(Code.SYSTEM_ERROR, f"{acl}No default permission for topic:t")
    assert hint(topic, **keys).endswith("must allow it to accessKey=me")
    group = Refused(Code.SYSTEM_ERROR, f"{acl}No default permission for group:g")
    assert "the option consumerGroup" in hint(group, **keys)
    for other in (
        Refused(Code.TOPIC_NOT_EXIST, "no topic signature failed"),
        Refused(Code.NO_PERMISSION, "the topic[t] sending message is forbidden"),
        TimedOut("late"),
    ):
        assert links.explained(other, connection("h:1")) is other

    closed = Unreachable("h:1 closed the connection before it answered")
    assert hint(closed) == "; if it takes TLS only, set the option tls=true"
    assert "tls=true" in hint(Unreachable("it broke"), ConnectionResetError())
    assert "tlsCert and tlsKey" in hint(closed, tls=True)
    assert hint(closed, tls=True, tls_cert="c") == ""
    alert = ssl.SSLError(1, "[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] alert")
    assert "tlsCert and tlsKey" in hint(Unreachable("broke"), alert, tls=True)
    spoken = ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number")
    assert "leave the option tls out" in hint(Unreachable("no TLS"), spoken, tls=True)
    untrusted = ssl.SSLCertVerificationError(1, "unable to get issuer")
    untrusted.verify_message = "unable to get issuer"
    words = hint(Unreachable("no TLS"), untrusted, tls=True)
    assert (
        words.startswith("; unable to get issuer: ") and "tlsCa" in words and "tlsVerify" in words
    )
