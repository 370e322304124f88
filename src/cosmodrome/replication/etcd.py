"""etcd as a consensus engine, without a library: five kinds of POST to its JSON gateway.

Each endpoint has one kept connection, and a watch has one of its own. An attempt takes `attempt_s`
at most, from connecting to the last byte of the answer; then the next endpoint is asked. Whoever
answered last is asked first. When all endpoints failed once, the call fails with every reason.

A transaction goes on to the next endpoint only while no byte of it was sent. Afterwards its result
is known when etcd says so, and unknown whatever else comes back: half an answer, garbage, a 503.

A watch asks the member to end it when the member loses sight of its leader. A connection can also
go silent without an end, so a watch that heard nothing for `silence_s` is begun again elsewhere,
where it left off.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import urllib.parse
from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeVar

from cosmodrome.env.backoff import Backoff
from cosmodrome.errors import (
    ConfigError,
    ConsensusRefused,
    ConsensusUnavailable,
    LeaseGone,
    ProtocolError,
    ResultUnknown,
    reason_of,
)
from cosmodrome.replication import gateway
from cosmodrome.replication.consensus import Changes, Compare, Delete, Lease, Outcome, Put, Reading
from cosmodrome.replication.gateway import Connection, Endpoint, key_bytes, key_range
from cosmodrome.transport.tls import Context, no_tls

ATTEMPT_S = 1.0
SILENCE_S = 5.0
PAUSES_S = (0.1, 1.0)  # between attempts of a watch
VERSION_MIN = (3, 4)
ENDPOINTS_MAX = 16

_HOST = re.compile(r"[A-Za-z0-9._:-]{1,255}", re.ASCII)
_TOKEN = re.compile(r"[!-~]{1,8192}", re.ASCII)  # it becomes a header

A = TypeVar("A")


@dataclasses.dataclass(frozen=True, slots=True)
class Account:
    user: str
    password: str = dataclasses.field(repr=False)


def parse_endpoints(text: str) -> tuple[Endpoint, ...]:
    """`http://host:port,https://host:port`, the value of haConsensus."""
    found = tuple(_endpoint(word.strip()) for word in text.split(","))
    if len(set(found)) < len(found):
        raise ConfigError(f"haConsensus={text}: it names an endpoint twice; name each once")
    if len(found) > ENDPOINTS_MAX:
        raise ConfigError(f"haConsensus has {len(found)} endpoints; name {ENDPOINTS_MAX} at most")
    return found


def _endpoint(word: str) -> Endpoint:
    if "@" in word:  # not repeated: it may be a password
        raise ConfigError("haConsensus: user and password do not belong into an endpoint")
    try:
        url = urllib.parse.urlsplit(word)
        host, port = url.hostname or "", url.port or 0
    except ValueError:
        url, host, port = urllib.parse.urlsplit(""), "", 0
    if url.scheme not in ("http", "https") or not port or not _HOST.fullmatch(host):
        raise ConfigError(
            f"haConsensus: {word!r} is no endpoint; write http://host:port or https://host:port,"
            " with commas in between"
        )
    if url.path not in ("", "/") or url.query or url.fragment:
        raise ConfigError(f"haConsensus: {word!r} has something behind the port; remove it")
    return Endpoint(host, port, url.scheme == "https")


class _Member:
    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.lock = asyncio.Lock()  # one request at a time
        self.connection: Connection | None = None

    def drop(self) -> None:
        if self.connection is not None:
            self.connection.abort()
            self.connection = None


class _Failed(Exception):
    """An attempt without an answer. `asked`: the request may have arrived."""

    def __init__(self, why: str, *, asked: bool) -> None:
        super().__init__(why)
        self.asked = asked


class EtcdConsensus:
    """Implements `consensus.Consensus`."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        account: Account | None = None,
        tls: Context = no_tls,
        attempt_s: float = ATTEMPT_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        if tls() is None and any(endpoint.secure for endpoint in endpoints):
            raise ConfigError(
                "haConsensus has https:// endpoints, and this process has no TLS; set"
                " tls.client.trustCertPath and tls.enable=true"
            )
        self._members = [_Member(endpoint) for endpoint in endpoints]
        self._first = 0  # whoever answered last
        self._account = account
        self._tls = tls
        self._token = ""
        self._attempt_s = attempt_s
        self._silence_s = silence_s
        self._watches: set[Connection] = set()
        self._closed = False

    async def grant(self, ttl_s: int) -> Lease:
        granted = await self._ask("/v3/lease/grant", {"TTL": str(ttl_s)}, gateway.Granted)
        return Lease(granted.ID, granted.TTL)

    async def keep(self, lease: int) -> int:
        kept = await self._ask("/v3/lease/keepalive", {"ID": str(lease)}, gateway.Kept)
        if kept.result.TTL <= 0:  # etcd has no other way to say it
            raise LeaseGone("the lease has ended")
        return kept.result.TTL

    async def revoke(self, lease: int) -> None:
        try:
            await self._ask("/v3/lease/revoke", {"ID": str(lease)}, gateway.Revoked)
        except LeaseGone:
            pass

    async def get(self, key: str) -> Reading:
        found = await self._ask("/v3/kv/range", key_range(key), gateway.Range)
        return Reading(found.header.revision, tuple(row.entry() for row in found.kvs))

    async def commit(self, compares: Sequence[Compare], changes: Sequence[Put | Delete]) -> Outcome:
        question = {
            "compare": [
                {
                    "key": key_bytes(compare.key),
                    "target": "MOD",
                    "result": "EQUAL",
                    "mod_revision": str(compare.revision),
                }
                for compare in compares
            ],
            "success": [_change(change) for change in changes],
        }
        done = await self._ask("/v3/kv/txn", question, gateway.Committed, once=True)
        return Outcome(done.succeeded, done.header.revision)

    async def watch(self, key: str, revision: int) -> AsyncGenerator[Reading | Changes, None]:
        pauses = Backoff(*PAUSES_S)
        turn = self._first
        while True:
            if self._closed:
                raise ConsensusUnavailable("this client was closed")
            member = self._members[turn % len(self._members)]
            turn += 1
            connection: Connection | None = None
            try:
                async with asyncio.timeout(self._attempt_s):
                    connection = await self._open(member.endpoint)
                    self._watches.add(connection)
                    await self._begin_watch(connection, key, revision)
                while True:
                    async with asyncio.timeout(self._silence_s):
                        answer = await connection.watched()
                    pauses.reset()
                    news = await self._news(key, revision, answer)
                    if news is not None:
                        revision = news.revision + 1
                        yield news
                    if isinstance(news, Reading):
                        break
            except gateway.TokenEnded:
                self._token = ""
            except (*gateway.FAULTS, ConsensusUnavailable):
                pass  # calls fail for the same reason, and say it
            finally:
                if connection is not None:
                    connection.abort()
                    self._watches.discard(connection)
            await asyncio.sleep(pauses.next_s())

    async def close(self) -> None:
        self._closed = True
        for member in self._members:
            member.drop()
        for connection in self._watches:
            connection.abort()
        await asyncio.sleep(0)  # transports tell their protocols in the next turn

    # --- a watch ---------------------------------------------------------------------------------

    async def _begin_watch(self, connection: Connection, key: str, revision: int) -> None:
        token = await self._token_by(connection)
        asked = {"create_request": {**key_range(key), "start_revision": str(revision)}}
        await connection.begin("/v3/watch", asked, token)

    async def _news(
        self, key: str, revision: int, answer: gateway.Watched.Result
    ) -> Reading | Changes | None:
        if answer.compact_revision:
            return await self.get(key)
        if answer.created and answer.header.revision + 1 < revision:
            # The member is behind, or the engine is another one: only a read can tell.
            reading = await self.get(key)
            return reading if reading.revision + 1 < revision else None
        return answer.changes() if answer.events else None

    # --- one call --------------------------------------------------------------------------------

    async def _ask(self, path: str, question: object, answer: type[A], *, once: bool = False) -> A:
        """Ask one endpoint after the other; `once`: until it may have arrived at one."""
        if self._closed:
            raise ConsensusUnavailable("this client was closed")
        reasons = []
        first = self._first
        for step in range(len(self._members)):
            turn = (first + step) % len(self._members)
            try:
                found = await self._attempt(self._members[turn], path, question, answer)
            except _Failed as failed:
                reasons.append(str(failed))
                self._first = (turn + 1) % len(self._members)
                if once and failed.asked:
                    raise ResultUnknown(
                        f"the answer to a transaction was lost ({failed}); read again"
                    ) from None
                continue
            self._first = turn
            return found
        raise ConsensusUnavailable(f"no endpoint of haConsensus answered: {'; '.join(reasons)}")

    async def _attempt(self, member: _Member, path: str, question: object, answer: type[A]) -> A:
        asked = False
        try:
            async with asyncio.timeout(self._attempt_s), member.lock:
                try:
                    if member.connection is None or not member.connection.usable:
                        member.drop()
                        member.connection = await self._open(member.endpoint)
                    for _ in range(2):
                        token = await self._token_by(member.connection)
                        asked = True
                        try:
                            return await member.connection.ask(path, question, answer, token)
                        except gateway.TokenEnded:
                            self._token, asked = "", False
                    raise ConsensusRefused(f"etcd at {member.endpoint} refuses its own new token")
                finally:
                    if member.connection is not None and not member.connection.usable:
                        member.drop()
        except gateway.FAULTS as error:
            raise _Failed(f"{member.endpoint}: {self._why(error)}", asked=asked) from None

    async def _open(self, endpoint: Endpoint) -> Connection:
        tls: dict[str, Any] = {}
        if endpoint.secure:
            tls = {"ssl": self._tls(), "server_hostname": endpoint.host}
        reader, writer = await asyncio.open_connection(
            endpoint.host, endpoint.port, limit=gateway.READ_BYTES, **tls
        )
        connection = Connection(reader, writer, endpoint)
        try:
            version = (await connection.ask("/version", None, gateway.Version)).etcdserver
            numbers = re.match(r"(\d+)\.(\d+)", version, re.ASCII)
            if numbers is None or (int(numbers[1]), int(numbers[2])) < VERSION_MIN:
                raise ConsensusRefused(
                    f"{endpoint} runs etcd {version[:40]}; version 3.4 or newer is needed"
                )
            if self._closed:
                raise ConsensusUnavailable("this client was closed")
        except BaseException:
            connection.abort()
            raise
        return connection

    async def _token_by(self, connection: Connection) -> str:
        """The token of the account; empty without one. Members know each other's tokens."""
        if self._account is not None and not self._token:
            asked = {"name": self._account.user, "password": self._account.password}
            made = await connection.ask("/v3/auth/authenticate", asked, gateway.Authenticated)
            if not _TOKEN.fullmatch(made.token):
                raise ProtocolError("its token cannot be sent back")
            self._token = made.token
        return self._token

    def _why(self, error: BaseException) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer within {self._attempt_s:g} s"
        if isinstance(error, EOFError):
            return "it closed the connection"
        return reason_of(error)


def _change(change: Put | Delete) -> dict[str, Any]:
    if isinstance(change, Delete):
        return {"request_delete_range": {"key": key_bytes(change.key)}}
    put = {"key": key_bytes(change.key), "value": change.value, "lease": str(change.lease)}
    return {"request_put": put}
