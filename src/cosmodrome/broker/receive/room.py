"""The room of pulls: what they find, what they filter by, and where they wait."""

from __future__ import annotations

import dataclasses

from cosmodrome.broker.foundation import Foundation, Service
from cosmodrome.broker.members.room import Members
from cosmodrome.broker.receive.consume import Consume
from cosmodrome.broker.receive.expressions import Expressions
from cosmodrome.broker.receive.filter_servers import FilterServers
from cosmodrome.broker.receive.filters import Filters
from cosmodrome.broker.receive.locks import Locks
from cosmodrome.broker.receive.offset_moves import OffsetMoves
from cosmodrome.broker.receive.waiters import Waiters
from cosmodrome.wire.commands.consume import PullReply


@dataclasses.dataclass(frozen=True, slots=True)
class Receive:
    consume: Consume
    waiters: Waiters[PullReply]
    expressions: Expressions
    filter_servers: FilterServers
    locks: Locks

    @property
    def handlers(self) -> tuple[object, ...]:
        return (self.consume, self.locks, self.filter_servers)

    @property
    def services(self) -> tuple[Service, ...]:
        """Without `waiters`, which have to end before the answers in flight."""
        return (self.expressions, self.filter_servers)


def build_receive(base: Foundation, members: Members) -> Receive:
    options = base.options
    expressions = Expressions(
        base.config_file("consumerFilter.json"),
        base.env,
        keep_dead_ms=options.filter_data_clean_time_span,
    )
    # The SQL92 filters of a group live with its members.
    members.clients.heard.subscribe(lambda beat: expressions.heard(beat.group, beat.subscriptions))
    members.clients.left.subscribe(expressions.left)
    waiters: Waiters[PullReply] = Waiters(base.store.arrivals, options.pulls_held_max)
    filters = Filters(options, members.clients, expressions)
    consume = Consume(base, members, filters, waiters, OffsetMoves(base))
    locks = Locks(base.role, base.gate.account_of)
    return Receive(consume, waiters, expressions, FilterServers(options), locks)
