"""How replication stands, for operators: the answer to `haStatus` and rows of the runtime figures.

`facts` is asked each time. What it does not know is left out or, where upstream's form wants a
number, is what a broker of upstream says that does not know it.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

from cosmodrome.broker.foundation import Foundation
from cosmodrome.errors import Code, Refused
from cosmodrome.replication.values import (
    FollowerFacts,
    FollowerState,
    LinkFacts,
    SourceFacts,
)
from cosmodrome.wire import bodies
from cosmodrome.wire.commands.broker import GetBrokerHaStatus
from cosmodrome.wire.report_bodies import (
    HAClientRuntimeInfo,
    HAConnectionRuntimeInfo,
    HARuntimeInfo,
)
from cosmodrome.wire.table import Call, Reply

Facts = Callable[[], SourceFacts | FollowerFacts | None]

# Compat: what upstream's slave says while it was not told how far its master has synced.
NOT_TOLD = -1


class ReplicationView:
    def __init__(self, base: Foundation) -> None:
        self.facts: Facts = lambda: None  # of those who replicate, who are built later
        self.role_name: str = base.store_options.broker_role
        self._store_options = base.store_options
        self._store = base.store
        self._clock = base.env.clock

    # --- requests ---------------------------------------------------------------------------

    @GetBrokerHaStatus.handler
    def get_ha_status(self, ask: GetBrokerHaStatus, call: Call) -> Reply:
        return Reply(body=bodies.encode(self.status()))

    # --- figures ----------------------------------------------------------------------------

    def status(self) -> HARuntimeInfo:
        facts = self.facts()
        if facts is None:
            raise Refused(Code.SYSTEM_ERROR, "This broker does not take part in replication.")
        if isinstance(facts, SourceFacts):
            links = [self._link(link) for link in facts.links]
            return HARuntimeInfo(
                ha_connection_info=links,
                in_sync_slave_nums=sum(link.in_sync for link in links),
                master=True,
                master_commit_log_max_offset=facts.end,
                broker_role=self.role_name,
                refused_links=facts.refused_links,
                refused_why=facts.refused_why,
            )
        return HARuntimeInfo(
            ha_client_runtime_info=self._follower(facts), broker_role=self.role_name
        )

    def figures(self) -> dict[str, str]:
        """Rows of the runtime information, for people; programs take `status`."""
        facts = self.facts()
        rows = {"replicationRole": self.role_name}
        if isinstance(facts, SourceFacts):
            rows["replicationSlaves"] = str(len(facts.links))
            rows["replicationRefusedLinks"] = str(facts.refused_links)
            if facts.refused_why:
                rows["replicationRefusedWhy"] = facts.refused_why
            for name, link in zip(link_names(facts.links), facts.links, strict=True):
                rows[f"replicationSlave_{name}"] = (
                    f"{link.lag_bytes} bytes and {link.lag_seconds:.1f} s behind,"
                    f" last contact {link.silent_seconds:.1f} s ago"
                )
        elif facts is not None:
            rows["replicationState"] = facts.state.value
            rows["replicationMaster"] = facts.master
            if facts.why:
                rows["replicationWhy"] = facts.why
            if knows_lag(facts):
                rows["replicationLagBytes"] = str(facts.lag_bytes)
                rows["replicationLagSeconds"] = f"{facts.lag_seconds:.1f}"
            if facts.links_made:
                rows["replicationSilentSeconds"] = f"{facts.silent_seconds:.1f}"
            ratio = self.copied_ratio(facts)
            if ratio is not None:
                rows["replicationCopiedPercent"] = f"{100 * ratio:.1f}"
        return rows

    def copied_ratio(self, facts: FollowerFacts) -> float | None:
        """How much of what its master has a linked slave has; None when that is not known."""
        if not knows_lag(facts):
            return None
        first = self._store.facts().min_offset
        wanted = facts.master_end - first
        return 1.0 if wanted <= 0 else min(1.0, max(0, facts.end - first) / wanted)

    # --- inside -----------------------------------------------------------------------------

    def _link(self, link: LinkFacts) -> HAConnectionRuntimeInfo:
        return HAConnectionRuntimeInfo(
            addr=link.peer,
            diff=link.lag_bytes,
            in_sync=link.lag_bytes < self._store_options.ha_slave_fallbehind_max,
            slave_ack_offset=link.acked_end,
            transfer_from_where=link.sent_end,
            transferred_byte_in_second=int(link.sent_bytes_per_second),
            node=link.node,
            classic=link.classic,
            lag_seconds=round(link.lag_seconds, 3),
            silent_seconds=round(link.silent_seconds, 3),
        )

    def _follower(self, facts: FollowerFacts) -> HAClientRuntimeInfo:
        info = HAClientRuntimeInfo(
            master_addr=facts.master,
            master_flush_offset=NOT_TOLD,
            max_offset=facts.end,
            transferred_byte_in_second=int(facts.taken_bytes_per_second),
            state=facts.state.value,
            why=facts.why,
            classic=facts.classic,
            links_made=facts.links_made,
        )
        if knows_lag(facts):
            info.master_max_offset = facts.master_end
            info.lag_bytes = facts.lag_bytes
            info.lag_seconds = round(facts.lag_seconds, 3)
        if facts.links_made:
            info.silent_seconds = round(facts.silent_seconds, 3)
            info.last_read_timestamp = self._clock.now_ms() - round(1000 * facts.silent_seconds)
        ratio = self.copied_ratio(facts)
        if ratio is not None:
            info.copied_percent = round(100 * ratio, 1)
        return info


def knows_lag(facts: FollowerFacts) -> bool:
    """A slave without a link does not know what its master wrote meanwhile."""
    linked = facts.state in (FollowerState.COPYING, FollowerState.IN_STEP)
    return linked and facts.master_end >= 0


def link_names(links: Sequence[LinkFacts]) -> list[str]:
    """A name for each link that lasts as long as possible and that no other link has: broker and
    id, else the host, else also the port."""
    short = [link.node or link.peer.rpartition(":")[0] for link in links]
    counts = collections.Counter(short)
    return [
        name if counts[name] == 1 else link.peer for name, link in zip(short, links, strict=True)
    ]
