"""The client of etcd against a server that follows a script: every way to answer wrongly."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
from tests.unit.replication.pair_kit import on_net

from cosmodrome.errors import (
    ConfigError,
    ConsensusRefused,
    ConsensusUnavailable,
    LeaseGone,
    ResultUnknown,
)
from cosmodrome.replication.consensus import Changes, Compare, Delete, Entry, Outcome, Put, Reading
from cosmodrome.replication.etcd import (
    ATTEMPT_S,
    SILENCE_S,
    Account,
    EtcdConsensus,
    parse_endpoints,
)
from cosmodrome.replication.gateway import HEADERS_MAX, RESPONSE_BYTES_MAX, Endpoint
from cosmodrome.sim.net import NetLoop

FIRST, SECOND = 23_790, 23_791
BOTH = f"http://127.0.0.1:{FIRST},http://127.0.0.1:{SECOND}"

HANG = b"<hang>"  # at the end of an answer: nothing more comes, and the connection stays
END = b"<end>"  # at the end of an answer: the server closes the connection


def http(body: Any, status: str = "200 OK", headers: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(data)}\r\n\r\n".encode() + data


def chunked(*chunks: bytes, end: bytes = b"0\r\n\r\n", status: str = "200 OK") -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + body + end


def error(status: str, code: int, message: str) -> bytes:
    return http({"error": message, "message": message, "code": code}, status)


VERSION = http({"etcdserver": "3.4.23", "etcdcluster": "3.4.0"})
OK = http({"header": {"revision": "7"}, "succeeded": True})
EMPTY = http({"header": {"revision": "7"}})
TIMED_OUT = error("503 Service Unavailable", 14, "etcdserver: request timed out")
BAD_TOKEN = error("401 Unauthorized", 16, "etcdserver: invalid auth token")


class Scripted:
    """Serves answers one after the other; /version has one of its own."""

    def __init__(self, *answers: bytes, version: bytes = VERSION) -> None:
        self.answers = list(answers)
        self.version = version
        self.asked: list[tuple[str, dict[str, Any], str]] = []  # path, question, token
        self.connections = 0

    async def start(self, port: int) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)

    def stop(self) -> None:
        self._server.close()

    @property
    def paths(self) -> list[str]:
        return [path for path, _, _ in self.asked]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
                body = await reader.readexactly(int(headers["Content-Length"]))
                path = head.split(" ")[1]
                if path == "/version":
                    answer = self.version
                else:
                    token = headers.get("Authorization", "")
                    self.asked.append((path, json.loads(body), token))
                    answer = self.answers.pop(0)
                rest = answer.removesuffix(HANG).removesuffix(END)
                for at in range(0, len(rest), 1 << 20):
                    writer.write(rest[at : at + (1 << 20)])
                    await writer.drain()
                if answer.endswith(HANG):
                    await reader.read()
                if answer.endswith((END, HANG)):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def serve(*servers: Scripted) -> EtcdConsensus:
    for port, server in enumerate(servers, FIRST):
        await server.start(port)
    endpoints = parse_endpoints(BOTH)[: len(servers)]
    return EtcdConsensus(endpoints)


def on_script(*servers: Scripted) -> Callable[[Callable[[EtcdConsensus], Awaitable[None]]], None]:
    """Run a test with a client of these servers, in virtual time."""

    def run(test: Callable[[EtcdConsensus], Awaitable[None]]) -> None:
        async def scenario(loop: NetLoop) -> None:
            client = await serve(*servers)
            await test(client)
            await client.close()
            for server in servers:
                server.stop()
                assert not server.answers, "not everything was asked for"
            await asyncio.sleep(1)
            assert loop.ends() == [], "connections are left"

        on_net(scenario)

    return run


PUT = [Put("k", b"v")]

# What may come back instead of an answer, and the reason that is given.
FAULTS = {
    "nothing": (END, "it closed the connection"),
    "half a head": (b"HTTP/1.1 200 OK\r\nContent-" + END, "it closed the connection"),
    "half a body": (OK[:-5] + END, "it closed the connection"),
    "in mid-chunk": (chunked(end=b"40\r\n{" + END), "it closed the connection"),
    "before the last chunk": (chunked(b'{"header":{}}', end=END), "it closed the connection"),
    "silence": (HANG, "no answer within 1 s"),
    "silence in the body": (OK[:-5] + HANG, "no answer within 1 s"),
    "another protocol": (b"\x00\x01\x02 hello\r\n\r\n", "is it etcd's client port"),
    "no JSON": (http(b"<html>"), "JSON is malformed"),
    "other JSON": (http({"header": {"revision": []}}), "Expected `int`"),
    "no status": (b"HTTP/1.1 OK\r\n\r\n", "does not answer with HTTP/1.1"),
    "no length": (b"HTTP/1.1 200 OK\r\n\r\n{}" + END, "no length"),
    "a negative length": (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "no length"),
    "too long": (
        f"HTTP/1.1 200 OK\r\nContent-Length: {RESPONSE_BYTES_MAX + 1}\r\n\r\n".encode(),
        "or more than",
    ),
    "too long in chunks": (chunked(*[b" " * 65_536] * 65), "has more than"),
    "a long line": (b"HTTP/1.1 200 " + b"x" * 200_000, "limit"),
    "many headers": (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * HEADERS_MAX * 2, "headers"),
    "many trailers": (chunked(b"{}", end=b"0\r\n" + b"a: b\r\n" * HEADERS_MAX * 2), "trailers"),
    "no chunk size": (chunked(end=b"-1\r\n\r\n"), "has no size"),
    "a long chunk": (chunked(end=b"1\r\n{}\r\n"), "longer than it said"),
    "a redirect": (
        http(b"", "307 Temporary Redirect", f"Location: http://127.0.0.1:{SECOND}/\r\n"),
        "redirects, which is not followed",
    ),
    "503 of etcd": (TIMED_OUT, "request timed out"),
    "503 of a stream": (
        http({"error": {"grpc_code": 14, "message": "etcdserver: no leader"}}, "503 No"),
        "no leader",
    ),
    "503 of a proxy": (http(b"sorry", "503 Service Unavailable"), "status 503"),
    "500 of etcd": (error("500 No", 2, "context deadline exceeded"), "context deadline"),
}
NAMED = pytest.mark.parametrize("fault", list(FAULTS.values()), ids=list(FAULTS))


@NAMED
def test_a_transaction_without_an_answer_is_unknown_and_not_repeated(
    fault: tuple[bytes, str],
) -> None:
    wrong, right = Scripted(fault[0]), Scripted(OK)

    async def test(client: EtcdConsensus) -> None:
        with pytest.raises(ResultUnknown, match=fault[1]):
            await client.commit([], PUT)
        assert right.asked == []
        # The next call begins where the last one did not fail.
        assert await client.commit([], PUT) == Outcome(True, 7)

    on_script(wrong, right)(test)
    assert len(wrong.asked) == 1


@NAMED
def test_a_read_without_an_answer_goes_to_the_next_endpoint(fault: tuple[bytes, str]) -> None:
    wrong, right = Scripted(fault[0]), Scripted(EMPTY)

    async def test(client: EtcdConsensus) -> None:
        assert await client.get("k") == Reading(7, ())

    on_script(wrong, right)(test)
    assert wrong.connections == 1


@NAMED
def test_when_nobody_answers_every_reason_is_given(fault: tuple[bytes, str]) -> None:
    async def test(client: EtcdConsensus) -> None:
        with pytest.raises(ConsensusUnavailable) as caught:
            await client.get("k")
        assert str(caught.value).count(fault[1]) == 2
        assert f"127.0.0.1:{FIRST}: " in str(caught.value)
        assert f"127.0.0.1:{SECOND}: " in str(caught.value)

    on_script(Scripted(fault[0]), Scripted(fault[0]))(test)


@NAMED
def test_a_transaction_that_was_not_sent_goes_to_the_next_endpoint(
    fault: tuple[bytes, str],
) -> None:
    wrong, right = Scripted(version=fault[0]), Scripted(OK)

    async def test(client: EtcdConsensus) -> None:
        assert (await client.commit([], PUT)).succeeded

    on_script(wrong, right)(test)
    assert wrong.asked == []


def test_a_dead_and_a_silent_machine_cost_one_attempt_each() -> None:
    async def scenario(loop: NetLoop) -> None:
        server = Scripted(OK, EMPTY)
        await server.start(SECOND)
        client = EtcdConsensus(parse_endpoints(BOTH))
        assert (await client.commit([], PUT)).succeeded  # nobody listens at the first
        assert loop.time() < ATTEMPT_S
        loop.silent.add(FIRST)
        again = EtcdConsensus(parse_endpoints(BOTH))
        begun = loop.time()
        await again.get("k")
        assert ATTEMPT_S <= loop.time() - begun < ATTEMPT_S + 0.1
        loop.silent.add(SECOND)
        begun = loop.time()
        with pytest.raises(ConsensusUnavailable, match=r"within 1 s; .*within 1 s"):
            await again.get("k")
        assert 2 * ATTEMPT_S <= loop.time() - begun < 2 * ATTEMPT_S + 0.1
        await client.close()
        await again.close()
        server.stop()

    on_net(scenario)


def test_one_connection_is_kept_and_requests_take_turns() -> None:
    rows = [
        {"key": base64.b64encode(b"k%d" % n).decode(), "mod_revision": str(n), "lease": "5"}
        for n in range(3)
    ]
    body = json.dumps({"header": {"revision": "9"}, "kvs": rows}).encode()
    trailers = b"0\r\nGrpc-Trailer: x\r\n\r\n"
    server = Scripted(
        chunked(body[:10], body[10:], end=trailers),
        TIMED_OUT,
        http(body),
        http({"result": {"TTL": "3"}}),
        http({"header": {"revision": "8"}}, headers="Connection: close\r\n"),
        OK,
    )

    async def test(client: EtcdConsensus) -> None:
        calls = (client.get("k/"), client.get("k"), client.get("k"), client.keep(4))
        found, failed, read, kept = await asyncio.gather(*calls, return_exceptions=True)
        entries = tuple(Entry(f"k{n}", b"", n, 5) for n in range(3))
        assert found == read == Reading(9, entries) and kept == 3
        assert isinstance(failed, ConsensusUnavailable)
        assert server.connections == 1
        await client.revoke(4)
        await client.commit([Compare("a", 6), Compare("b")], [Put("a", b"\xff", 4), Delete("b")])
        assert server.connections == 2

    on_script(server)(test)
    assert server.asked[0][1] == {"key": "ay8=", "range_end": "azA="}
    assert server.asked[3][:2] == ("/v3/lease/keepalive", {"ID": "4"})
    compare = {"target": "MOD", "result": "EQUAL"}
    assert server.asked[-1][1] == {
        "compare": [
            {"key": "YQ==", "mod_revision": "6", **compare},
            {"key": "Yg==", "mod_revision": "0", **compare},
        ],
        "success": [
            {"request_put": {"key": "YQ==", "value": "/w==", "lease": "4"}},
            {"request_delete_range": {"key": "Yg=="}},
        ],
    }


def test_a_connection_that_ended_while_idle_costs_nothing() -> None:
    server = Scripted(EMPTY + END, OK)

    async def test(client: EtcdConsensus) -> None:
        await client.get("k")
        await asyncio.sleep(1)
        assert (await client.commit([], PUT)).succeeded
        assert server.connections == 2

    on_script(server)(test)


def test_a_cancelled_call_takes_its_connection_with_it() -> None:
    server = Scripted(HANG, EMPTY)

    async def test(client: EtcdConsensus) -> None:
        call = asyncio.ensure_future(client.get("k"))
        await asyncio.sleep(0.1)
        call.cancel()
        await asyncio.wait([call])
        assert (await client.get("k")).revision == 7
        assert server.connections == 2

    on_script(server)(test)


# --- what etcd refuses ---------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["3.3.27", "2.3.8", "not a version", ""])
def test_an_old_etcd_is_refused(version: str) -> None:
    async def test(client: EtcdConsensus) -> None:
        with pytest.raises(ConsensusRefused, match=f"runs etcd {version}; version 3.4 or newer"):
            await client.commit([], PUT)

    on_script(Scripted(version=http({"etcdserver": version})))(test)


@pytest.mark.parametrize("version", ["3.4.0", "3.5.21", "3.10.1", "4.0.0-rc.1"])
def test_a_newer_etcd_is_taken(version: str) -> None:
    async def test(client: EtcdConsensus) -> None:
        assert (await client.commit([], PUT)).succeeded

    on_script(Scripted(OK, version=http({"etcdserver": version})))(test)


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (http(b"Not Found\n", "404 Not Found"), ConsensusRefused, "enable-grpc-gateway"),
        (
            error("403 No", 7, "etcdserver: permission denied"),
            ConsensusRefused,
            "permission denied",
        ),
        (error("400 No", 3, "etcdserver: user name is empty"), ConsensusRefused, "give user and"),
        (error("429 No", 8, "mvcc: database space exceeded"), ConsensusRefused, "space exceeded"),
        (error("404 No", 5, "etcdserver: requested lease not found"), LeaseGone, "has ended"),
        (BAD_TOKEN, ConsensusRefused, "its own new token"),
    ],
)
def test_a_refusal_is_certain_and_asks_nobody_else(
    answer: bytes, kind: type[Exception], text: str
) -> None:
    answers = [answer, answer] if answer == BAD_TOKEN else [answer]
    refuses, other = Scripted(*answers, OK), Scripted()

    async def test(client: EtcdConsensus) -> None:
        with pytest.raises(kind, match=text):
            await client.commit([], PUT)
        assert (await client.commit([], PUT)).succeeded

    on_script(refuses, other)(test)
    assert refuses.connections == 1 and other.connections == 0


def test_a_keepalive_without_a_time_says_that_the_lease_is_gone() -> None:
    async def test(client: EtcdConsensus) -> None:
        with pytest.raises(LeaseGone):
            await client.keep(4)
        await client.revoke(4)

    gone = error("404 Not Found", 5, "etcdserver: requested lease not found")
    on_script(Scripted(http({"result": {"ID": "4"}}), gone))(test)


def test_a_token_is_got_once_and_again_when_it_has_ended() -> None:
    old, new = http({"token": "old.1"}), http({"token": "new.2"})
    stale = error("400 Bad Request", 3, "etcdserver: revision of auth store is old")
    server = Scripted(old, EMPTY, EMPTY, BAD_TOKEN, new, OK, stale, new, OK)

    async def scenario(loop: NetLoop) -> None:
        await server.start(FIRST)
        client = EtcdConsensus(parse_endpoints(BOTH)[:1], account=Account("cosmo", "secret"))
        await client.get("k")
        await client.get("k")
        assert (await client.commit([], PUT)).succeeded
        assert (await client.commit([], PUT)).succeeded
        await client.close()
        server.stop()

    on_net(scenario)
    assert server.connections == 1
    login = ("/v3/auth/authenticate", {"name": "cosmo", "password": "secret"}, "")
    assert [asked for asked in server.asked if asked[0] == login[0]] == [login] * 3
    tokens = [token for path, _, token in server.asked if path != login[0]]
    assert tokens == ["old.1", "old.1", "old.1", "new.2", "new.2", "new.2"]


def test_a_transaction_is_not_unknown_when_only_its_token_could_not_be_renewed() -> None:
    token = http({"token": "t"})
    breaks, other = Scripted(token, BAD_TOKEN, END), Scripted(token, OK)

    async def scenario(loop: NetLoop) -> None:
        await breaks.start(FIRST)
        await other.start(SECOND)
        client = EtcdConsensus(parse_endpoints(BOTH), account=Account("cosmo", "secret"))
        assert (await client.commit([], PUT)).succeeded
        await client.close()
        breaks.stop()
        other.stop()

    on_net(scenario)
    assert breaks.answers == other.answers == []


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (
            error("400 No", 3, "etcdserver: authentication failed, invalid user ID or password"),
            ConsensusRefused,
            "invalid user ID or password",
        ),
        (error("412 No", 9, "authentication is not enabled"), ConsensusRefused, "not enabled"),
        (http({"token": "a\r\nX: y"}), ConsensusUnavailable, "token cannot be sent back"),
    ],
)
def test_no_token_no_request(answer: bytes, kind: type[Exception], text: str) -> None:
    server = Scripted(answer)

    async def scenario(loop: NetLoop) -> None:
        await server.start(FIRST)
        client = EtcdConsensus(parse_endpoints(BOTH)[:1], account=Account("cosmo", "secret"))
        with pytest.raises(kind, match=text) as caught:
            await client.commit([], PUT)
        assert "secret" not in str(caught.value) and "secret" not in repr(Account("a", "secret"))
        await client.close()
        server.stop()

    on_net(scenario)
    assert server.paths == ["/v3/auth/authenticate"]


# --- watches -------------------------------------------------------------------------------------


def said(revision: int, **more: Any) -> bytes:
    return json.dumps({"result": {"header": {"revision": str(revision)}, **more}}).encode() + b"\n"


def event(key: str, revision: int, value: bytes | None = b"") -> dict[str, Any]:
    row = {"key": base64.b64encode(key.encode()).decode(), "mod_revision": str(revision)}
    if value is None:
        return {"type": "DELETE", "kv": row}
    return {"kv": {**row, "value": base64.b64encode(value).decode()}}


CREATED = said(7, created=True)
CHANGED = said(9, events=[event("k/a", 8, b"1"), event("k/b", 8), event("k/a", 9, None)])
NEWS = Changes(9, (Entry("k/b", b"", 8),), ("k/a",))


def start_revisions(server: Scripted) -> list[int]:
    asked = [question for path, question, _ in server.asked if path == "/v3/watch"]
    return [int(question["create_request"]["start_revision"]) for question in asked]


def test_lines_of_a_watch_come_in_any_pieces() -> None:
    both = CREATED + CHANGED
    pieces = [
        [both],
        [CREATED, CHANGED],
        [both[n : n + 1] for n in range(len(both))],
        [CREATED + b"\n" + CHANGED[:20], CHANGED[20:]],
    ]
    for chunks in pieces:
        server = Scripted(chunked(*chunks, end=HANG))

        async def test(client: EtcdConsensus) -> None:
            async with aclosing(client.watch("k/", 8)) as watch:
                assert await anext(watch) == NEWS

        on_script(server)(test)
        assert server.asked[0][1]["create_request"] == {
            "key": "ay8=",
            "range_end": "azA=",
            "start_revision": "8",
        }


NO_LEADER = b'{"error":{"grpc_code":14,"message":"etcdserver: no leader"}}'


@pytest.mark.parametrize(
    "end",
    [
        b"0\r\n\r\n",
        END,
        b"40\r\n{" + END,
        chunked(NO_LEADER).partition(b"\r\n\r\n")[2],
        chunked(b"garbage\n").partition(b"\r\n\r\n")[2],
        chunked(b"{}\n").partition(b"\r\n\r\n")[2],
        chunked(said(9, canceled=True, cancel_reason="later")).partition(b"\r\n\r\n")[2],
        chunked(*[b"x" * 65_536] * 65).partition(b"\r\n\r\n")[2],
        HANG,
    ],
    ids=["ended", "closed", "torn", "leader", "garbage", "empty", "cancelled", "long", "silent"],
)
def test_a_watch_that_ends_goes_on_elsewhere(end: bytes) -> None:
    first = Scripted(chunked(CREATED, CHANGED, end=end))
    second = Scripted(chunked(said(9, created=True), said(10, events=[event("k/c", 10)]), end=HANG))

    async def test(client: EtcdConsensus) -> None:
        loop = asyncio.get_running_loop()
        async with aclosing(client.watch("k/", 8)) as watch:
            assert await anext(watch) == NEWS
            begun = loop.time()
            assert await anext(watch) == Changes(10, (Entry("k/c", b"", 10),), ())
            assert (loop.time() - begun >= SILENCE_S) is (end == HANG)

    on_script(first, second)(test)
    assert start_revisions(first) == [8] and start_revisions(second) == [10]


def test_a_watch_waits_for_an_engine_that_is_away() -> None:
    async def scenario(loop: NetLoop) -> None:
        client = EtcdConsensus(parse_endpoints(BOTH))
        watch = client.watch("k/", 8)
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(100)
        assert not waiting.done()
        server = Scripted(chunked(CREATED, CHANGED, end=HANG))
        await server.start(SECOND)
        assert await waiting == NEWS
        await watch.aclose()
        await client.close()
        server.stop()

    on_net(scenario)


def test_a_member_that_is_behind_is_not_an_empty_engine() -> None:
    """Only a read can tell: it goes through the leader."""
    reading = http({"header": {"revision": "9"}})
    server = Scripted(chunked(said(3, created=True), CHANGED, end=HANG), reading)

    async def test(client: EtcdConsensus) -> None:
        async with aclosing(client.watch("k/", 8)) as watch:
            assert await anext(watch) == NEWS

    on_script(server)(test)


def test_an_engine_with_a_lower_revision_is_another_one() -> None:
    server = Scripted(
        chunked(said(3, created=True), end=HANG),
        http({"header": {"revision": "3"}}),
        chunked(said(3, created=True), said(4, events=[event("k/a", 4)]), end=HANG),
    )

    async def test(client: EtcdConsensus) -> None:
        async with aclosing(client.watch("k/", 8)) as watch:
            assert await anext(watch) == Reading(3, ())
            assert await anext(watch) == Changes(4, (Entry("k/a", b"", 4),), ())

    on_script(server)(test)
    assert start_revisions(server) == [8, 4]


def test_a_watch_is_refused_and_its_token_renewed() -> None:
    def cancelled(why: str) -> bytes:
        reason = f"rpc error: code = {why}"
        return chunked(said(9, created=True, canceled=True, cancel_reason=reason))

    server = Scripted(
        http({"token": "old"}),
        cancelled("Unauthenticated desc = etcdserver: invalid auth token"),
        http({"token": "new"}),
        chunked(CREATED, CHANGED),
        cancelled("PermissionDenied desc = etcdserver: permission denied"),
    )

    async def scenario(loop: NetLoop) -> None:
        await server.start(FIRST)
        client = EtcdConsensus(parse_endpoints(BOTH)[:1], account=Account("cosmo", "secret"))
        watch = client.watch("k/", 8)
        assert await anext(watch) == NEWS
        with pytest.raises(ConsensusRefused, match="permission denied"):
            await anext(watch)
        await client.close()
        server.stop()

    on_net(scenario)
    assert [token for path, _, token in server.asked if path == "/v3/watch"] == [
        "old",
        "new",
        "new",
    ]


# --- endpoints -----------------------------------------------------------------------------------


def test_endpoints_are_read_as_they_are_written() -> None:
    text = "http://a.example:2379, https://[::1]:1/,https://127.0.0.1:65535"
    found = parse_endpoints(text)
    assert found == (
        Endpoint("a.example", 2379, secure=False),
        Endpoint("::1", 1, secure=True),
        Endpoint("127.0.0.1", 65535, secure=True),
    )
    assert [str(endpoint) for endpoint in found] == [
        *("http://a.example:2379", "https://[::1]:1", "https://127.0.0.1:65535")
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is no endpoint; write http://host:port"),
        ("http://a:1,", "'' is no endpoint"),
        ("a:2379", "'a:2379' is no endpoint"),
        ("ftp://a:1", "no endpoint"),
        ("http://a", "no endpoint"),
        ("http://:2379", "no endpoint"),
        ("http://a:0", "no endpoint"),
        ("http://a:65536", "no endpoint"),
        ("http://a:x", "no endpoint"),
        ("http://[::1:2379", "no endpoint"),
        ("http://a b:1", "no endpoint"),
        ("http://ä:1", "no endpoint"),
        ("http://a:1;http://b:1", "no endpoint"),
        ("http://a:1/v3", "something behind the port"),
        ("http://a:1?x=y", "something behind the port"),
        ("http://me:secret@a:1", "user and password do not belong"),
        ("http://a:1,http://A:1", "twice"),
        (",".join(f"http://a:{port}" for port in range(1, 18)), "17 endpoints; name 16"),
    ],
)
def test_wrong_endpoints_are_explained(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_endpoints(text)
    assert said in str(caught.value) and "secret" not in str(caught.value)


def test_https_needs_a_context() -> None:
    with pytest.raises(ConfigError, match=r"tls\.client\.trustCertPath"):
        EtcdConsensus(parse_endpoints("https://a:1"))
