"""A slave: what follows its master while a link is there, and what follows without one.

The name servers say where the master is. `haMasterAddress` wins for the HA port. Where clients
reach the master is known from the name servers, and from a master of ours when a link begins.
"""

from __future__ import annotations

import asyncio
import logging

from cosmodrome.broker.replicate.ask_master import AskMaster
from cosmodrome.broker.replicate.hand_back import HandBack
from cosmodrome.broker.replicate.java_tables import JavaTables
from cosmodrome.env.background import Background
from cosmodrome.env.options import StoreOptions
from cosmodrome.replication.follower import Follower, split_address
from cosmodrome.replication.tables import AppliedTables
from cosmodrome.replication.values import FollowerState

log = logging.getLogger(__name__)

_LINKED = (FollowerState.COPYING, FollowerState.IN_STEP)


class Slave:
    """`attend` is the one place that begins and ends what needs both a link and the address where
    clients reach the master."""

    def __init__(
        self,
        options: StoreOptions,
        follower: Follower,
        applied: AppliedTables,
        hand_back: HandBack,
        java_tables: JavaTables,
        ask_master: AskMaster,
    ) -> None:
        self.follower = follower
        self._fixed_address = options.ha_master_address
        self._applied = applied
        self._hand_back = hand_back
        self._java_tables = java_tables
        self._ask_master = ask_master
        self._linked = False
        self._attended: tuple[str, bool] | None = None  # address, and whether it is classic
        self._changed = asyncio.Event()
        self._attending = Background("attend the master")
        follower.linked.subscribe(self._on_linked)

    async def start(self) -> None:
        await self._applied.start()
        await self._hand_back.start()
        self._attending.start(self._attend)
        await self.follower.start()
        if self._fixed_address:
            self.follower.follow(self._fixed_address)

    async def stop(self) -> None:
        """The link first: nothing changes here any more."""
        await self.follower.stop()
        await self._attending.stop()
        self._attended = None
        await self._java_tables.unlinked()
        await self._hand_back.stop()
        await self._applied.stop()

    def found_master(self, address: str, ha_address: str) -> None:
        """A name server said where clients reach the master, and where its slaves do."""
        self._clients_reach_it_at(address)
        if not self._fixed_address:
            self.follower.follow(ha_address)

    def looks_for_master(self) -> bool:
        """Whether news about where it is are wanted."""
        return not self._ask_master.address or self.follower.facts().state not in _LINKED

    def _on_linked(self, linked: bool) -> None:
        self._linked = linked
        if linked and self.follower.master_address:
            self._clients_reach_it_at(self.follower.master_address)
        self._changed.set()

    def _clients_reach_it_at(self, address: str) -> None:
        if address != self._ask_master.address:
            log.info("master_found address=%s", address)
            self._ask_master.address = address
            self._changed.set()

    async def _attend(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            wanted = None
            if self._linked and self._ask_master.address:
                wanted = (self._ask_master.address, self.follower.facts().classic)
            elif self._linked:
                log.warning(
                    "master_address_unknown; offsets that are committed here do not reach the"
                    " master until a name server says where it is; set namesrvAddr"
                )
            if wanted != self._attended:
                await self._turn_to(wanted)

    async def _turn_to(self, wanted: tuple[str, bool] | None) -> None:
        self._attended = wanted
        await self._java_tables.unlinked()
        await self._hand_back.unlinked()
        if wanted is None:
            return
        address, classic = wanted
        host, port = split_address(address)
        await self._hand_back.linked(host, port)
        if classic:
            await self._java_tables.linked(host, port)
