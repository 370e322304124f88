"""The client of etcd and a real one: the suite of all engines, then what only etcd can do.

A server of the machine is used when it is on PATH; otherwise Debian's package is unpacked into
`build/` and not installed, so no service of it is ever started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import Iterator
from contextlib import aclosing
from functools import partial
from pathlib import Path

import pytest
from peers.etcd import EtcdCluster, etcd_program
from peers.resolve import ToolMissing
from tests import tls_kit
from tests.unit.replication.consensus_suite import BOUND_S, CASES, Case, Heard, put
from tests.unit.replication.etcd_kit import EtcdEngine, run

from cosmodrome.errors import (
    ConsensusError,
    ConsensusRefused,
    ConsensusUnavailable,
    LeaseGone,
    ResultUnknown,
)
from cosmodrome.replication.consensus import Compare, Entry, Put
from cosmodrome.replication.etcd import Account, EtcdConsensus, parse_endpoints

ROOT = Account("root", "s3cret")


@pytest.fixture(scope="module", autouse=True)
def available() -> None:
    try:
        etcd_program()
    except ToolMissing as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("three"), 3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """An etcd that asks for user and password and forgets tokens soon."""
    options = ["--bcrypt-cost=4", "--auth-token-ttl=2"]
    with EtcdCluster(tmp_path_factory.mktemp("guarded"), options=options) as cluster:
        (member,) = cluster.members
        member.call("auth/user/add", {"name": ROOT.user, "password": ROOT.password})
        member.call("auth/user/add", {"name": "guest", "password": "guest"})
        member.call("auth/role/add", {"name": "root"})
        member.call("auth/user/grant", {"user": ROOT.user, "role": "root"})
        member.call("auth/enable", {})
        yield cluster


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EtcdCluster, Path]]:
    """An etcd that speaks TLS only and asks for a certificate."""
    certs = tls_kit.certificates(tmp_path_factory.mktemp("certs"))
    options = ["--client-cert-auth", f"--trusted-ca-file={certs / 'ca.pem'}"]
    folder = tmp_path_factory.mktemp("secure")
    with EtcdCluster(folder, certificates=certs, options=options) as cluster:
        yield cluster, certs


def named(case: Case) -> str:
    return case.__name__


KEEPING_DATA = [case for case in CASES if "emptied" not in named(case)]


@pytest.mark.parametrize("case", CASES, ids=named)
def test_one_member(case: Case, etcd: EtcdCluster) -> None:
    run(case, EtcdEngine(etcd))


@pytest.mark.parametrize("case", KEEPING_DATA, ids=named)
def test_three_members(case: Case, three: EtcdCluster) -> None:
    run(case, EtcdEngine(three))


@pytest.mark.parametrize("case", KEEPING_DATA, ids=named)
def test_user_and_password(case: Case, guarded: EtcdCluster) -> None:
    run(case, EtcdEngine(guarded, account=ROOT))


@pytest.mark.parametrize("case", CASES, ids=named)
def test_tls(case: Case, secure: tuple[EtcdCluster, Path]) -> None:
    cluster, certs = secure
    run(case, EtcdEngine(cluster, trust=tls_kit.client(certs, shows=certs)))


@pytest.mark.parametrize(
    ("account", "said"),
    [
        (None, "user name is empty; give user and password"),
        (Account("root", "wrong"), "invalid user ID or password"),
        (Account("guest", "guest"), "permission denied"),
    ],
)
async def test_who_may_not_is_refused(
    account: Account | None, said: str, guarded: EtcdCluster
) -> None:
    client = EtcdEngine(guarded, account=account).client()
    with pytest.raises(ConsensusRefused, match=said):
        await client.get("/cosmodrome/")
    with pytest.raises(ConsensusRefused, match=said):
        await client.commit([], [Put("/cosmodrome/a", b"")])
    with pytest.raises(ConsensusRefused, match=said):
        async with asyncio.timeout(BOUND_S):
            await anext(client.watch("/cosmodrome/", 1))
    await client.close()


async def test_an_account_where_nobody_asks_for_one_is_refused(etcd: EtcdCluster) -> None:
    client = EtcdEngine(etcd, account=ROOT).client()
    with pytest.raises(ConsensusRefused, match="authentication is not enabled"):
        await client.get("/cosmodrome/")
    await client.close()


async def test_a_token_that_expired_is_renewed(guarded: EtcdCluster) -> None:
    engine = EtcdEngine(guarded, account=ROOT)
    client, key = engine.client(), f"{engine.prefix}a"
    first = await put(client, key, b"1")
    token = client._token
    async with asyncio.timeout(BOUND_S):
        while client._token == token:
            await asyncio.sleep(3)  # a use would keep it alive
            await client.commit([], [Put(key, b"2")])
    heard = Heard()
    client._token = "forged.1"
    async with aclosing(client.watch(engine.prefix, first)) as watch:
        await heard.until(watch, lambda heard: heard.known.get(key) == b"2")
    await client.close()


async def test_a_server_that_nobody_vouches_for_is_not_talked_to(
    secure: tuple[EtcdCluster, Path],
) -> None:
    cluster, certs = secure
    stranger = ssl.create_default_context()
    nameless = tls_kit.client(certs)
    for context, said in ((stranger, "certificate verify failed"), (nameless, None)):
        client = EtcdEngine(cluster, trust=context).client()
        with pytest.raises(ConsensusUnavailable, match=said):
            await client.get("/cosmodrome/")
        await client.close()
    plain = EtcdConsensus(parse_endpoints(cluster.endpoints.replace("https", "http")))
    with pytest.raises(ConsensusUnavailable):
        await plain.get("/cosmodrome/")
    await plain.close()


class Counter:
    """A number that only compares move, by one each; its client has keys of its own."""

    def __init__(self, engine: EtcdEngine, name: str, lease: int) -> None:
        self.client = engine.client(attempt_s=3.0)
        self.key = f"{engine.prefix}{name}"
        self.reached = 0
        self.unknown = 0
        self._lease = lease

    async def count(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self._next()
            self.reached += 1

    async def _next(self) -> None:
        while True:
            try:
                entry = (await self.client.get(self.key)).entry(self.key)
                value = int(entry.value) if entry else 0
                # What was known to be done is there; what was unknown is there once or not.
                assert value in (self.reached, self.reached + 1)
                if value > self.reached:
                    return
                change = Put(self.key, b"%d" % (value + 1), self._lease)
                revision = entry.revision if entry else 0
                await self.client.commit([Compare(self.key, revision)], [change])
            except ResultUnknown:
                self.unknown += 1
            except ConsensusUnavailable:
                await asyncio.sleep(0.1)

    async def goes_on(self) -> None:
        goal = self.reached + 10
        async with asyncio.timeout(4 * BOUND_S):
            while self.reached < goal:
                await asyncio.sleep(0.01)


async def test_no_transaction_is_lost_or_doubled_when_the_leader_dies(three: EtcdCluster) -> None:
    """Five clients write all the time, so a leader is always killed under a transaction."""
    engine = EtcdEngine(three)
    client = engine.client()
    begin = (await client.get(engine.prefix)).revision + 1
    lease = await client.grant(3600)
    counters = [Counter(engine, f"{number}", lease.id) for number in range(5)]
    stop, heard = asyncio.Event(), Heard()
    async with asyncio.TaskGroup() as group:
        for counter in counters:
            group.create_task(counter.count(stop))
        for _ in range(3):
            await asyncio.gather(*(counter.goes_on() for counter in counters))
            leader = three.leader()
            leader.kill()
            await asyncio.gather(*(counter.goes_on() for counter in counters))
            leader.start()
        stop.set()
    assert await client.keep(lease.id) > 0
    reached = {counter.key: b"%d" % counter.reached for counter in counters}
    async with aclosing(client.watch(engine.prefix, begin)) as watch:
        await heard.until(watch, lambda heard: heard.known == reached)
    for counter in counters:
        mine = [e for e in heard.log if isinstance(e, Entry) and e.key == counter.key]
        numbers = [int(entry.value) for entry in mine]
        assert numbers == sorted(set(numbers)) and numbers[-1] == counter.reached
        await counter.client.close()
    assert sum(counter.unknown for counter in counters), "no answer was lost: kill it elsewhere"
    await client.close()


def has(keys: int, heard: Heard) -> bool:
    return len(heard.known) == keys


async def test_a_watch_outlives_its_member(three: EtcdCluster) -> None:
    engine = EtcdEngine(three)
    client, writer, heard = engine.client(attempt_s=3.0), engine.client(attempt_s=3.0), Heard()
    begin = await put(writer, f"{engine.prefix}0", b"")
    async with aclosing(client.watch(engine.prefix, begin)) as watch:
        for number, member in enumerate(three.members, 1):
            member.kill()
            async with asyncio.timeout(4 * BOUND_S):
                while True:
                    try:
                        await put(writer, f"{engine.prefix}{number}", b"")
                        break
                    except ConsensusError:
                        await asyncio.sleep(0.1)
            await heard.until(watch, partial(has, number + 1))
            member.start()
    assert not heard.readings
    await client.close()
    await writer.close()


async def test_a_minority_serves_nothing(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path, 3) as cluster:
        engine = EtcdEngine(cluster)
        client, key = engine.client(), f"{engine.prefix}a"
        hasty = engine.client(attempt_s=0.5)
        await put(client, key, b"1")
        for member in cluster.members[1:]:
            member.kill()
        with pytest.raises(ConsensusUnavailable, match=r"within 0.5 s|no leader"):
            await hasty.get(key)
        with pytest.raises((ResultUnknown, ConsensusUnavailable)):
            await hasty.commit([], [Put(key, b"2")])
        # A leader that has not noticed yet knows that there is no such lease.
        with pytest.raises((ConsensusUnavailable, LeaseGone)):
            await hasty.keep(1)
        for member in cluster.members[1:]:
            member.begin()
        async with asyncio.timeout(120):
            while True:  # until they are up and have a leader
                with contextlib.suppress(ConsensusUnavailable):
                    await client.get(key)
                    break
                await asyncio.sleep(0.2)
        with pytest.raises(LeaseGone):
            await client.keep(1)
        assert (await client.get(key)).entries[0].value in (b"1", b"2")
        await hasty.close()
        await client.close()
