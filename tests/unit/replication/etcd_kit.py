"""A real etcd as an engine of the suite."""

from __future__ import annotations

import asyncio
import itertools
import ssl

from peers.etcd import EtcdCluster
from tests.unit.replication.consensus_suite import BOUND_S, Case

from cosmodrome.replication.etcd import Account, EtcdConsensus, parse_endpoints

_numbers = itertools.count(1)


class EtcdEngine:
    """Keys of its own in an etcd that others use too."""

    def __init__(
        self,
        cluster: EtcdCluster,
        *,
        account: Account | None = None,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self.prefix = f"/cosmodrome/test/{next(_numbers)}/"
        self.cluster = cluster
        self._account = account
        self._trust = trust

    def client(self, attempt_s: float = BOUND_S) -> EtcdConsensus:
        """It has time: a busy machine must not look like a dead one."""
        return EtcdConsensus(
            parse_endpoints(self.cluster.endpoints),
            account=self._account,
            tls=lambda: self._trust,
            attempt_s=attempt_s,
        )

    async def compact(self) -> None:
        client = self.client()
        revision = (await client.get(self.prefix)).revision
        await client.close()
        asked = {"revision": str(revision)}
        await asyncio.to_thread(self.cluster.members[0].call, "kv/compaction", asked, self._token())

    async def empty(self) -> None:
        (member,) = self.cluster.members
        member.empty()  # not in a thread: the child would end with it

    def _token(self) -> str:
        if self._account is None:
            return ""
        asked = {"name": self._account.user, "password": self._account.password}
        return str(self.cluster.members[0].call("auth/authenticate", asked)["token"])


def run(case: Case, engine: EtcdEngine) -> None:
    async def scenario() -> None:
        await case(engine)

    asyncio.run(scenario())
