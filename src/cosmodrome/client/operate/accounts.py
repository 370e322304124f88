"""Accounts of brokers with access control. Account files are not replicated: each broker that is
meant is asked."""

from __future__ import annotations

from cosmodrome.client.operate.fleet import Fleet
from cosmodrome.wire import bodies
from cosmodrome.wire.commands.acl import (
    AclInfoReply,
    DeleteAclConfig,
    GetBrokerClusterAclInfo,
    ListAccounts,
    UpdateAndCreateAclConfig,
    UpdateGlobalWhiteAddrsConfig,
)
from cosmodrome.wire.report_bodies import AccountList


class Accounts:
    """A call is about one broker, the masters of a cluster, or all masters."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def all(
        self, *, broker: str | None = None, cluster: str | None = None
    ) -> dict[str, AccountList]:
        """Accounts and white addresses by broker, without secrets."""
        replies = await self._fleet.each(await self._targets(broker, cluster), ListAccounts())
        return {name: bodies.decode(AccountList, reply.body) for name, reply in replies.items()}

    async def versions(
        self, *, broker: str | None = None, cluster: str | None = None
    ) -> dict[str, AclInfoReply]:
        """Which account files each broker runs with."""
        return await self._fleet.each(
            await self._targets(broker, cluster), GetBrokerClusterAclInfo()
        )

    async def put(
        self,
        account: UpdateAndCreateAclConfig,
        *,
        broker: str | None = None,
        cluster: str | None = None,
    ) -> list[str]:
        """Create an account, or change the fields that are given; the brokers that did."""
        return list(await self._fleet.each(await self._targets(broker, cluster), account))

    async def delete(
        self, access_key: str, *, broker: str | None = None, cluster: str | None = None
    ) -> list[str]:
        ask = DeleteAclConfig(access_key=access_key)
        return list(await self._fleet.each(await self._targets(broker, cluster), ask))

    async def set_white(
        self,
        addresses: str,
        *,
        file: str | None = None,
        broker: str | None = None,
        cluster: str | None = None,
    ) -> list[str]:
        """Replace the addresses that need no account, separated by commas."""
        ask = UpdateGlobalWhiteAddrsConfig(global_white_addrs=addresses, acl_file_full_path=file)
        return list(await self._fleet.each(await self._targets(broker, cluster), ask))

    async def _targets(self, broker: str | None, cluster: str | None) -> dict[str, str]:
        return await self._fleet.chosen(cluster=cluster, broker=broker)
