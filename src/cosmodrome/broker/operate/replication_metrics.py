"""The metrics of replication: a master's links, or how far a slave is."""

from __future__ import annotations

from collections.abc import Iterator

from cosmodrome.broker.operate import metric_table as table
from cosmodrome.broker.operate.replication_view import ReplicationView, knows_lag, link_names
from cosmodrome.replication.values import FollowerFacts, FollowerState, SourceFacts
from cosmodrome.transport.http.exposition import Sample, WalkItem


def replication_samples(view: ReplicationView) -> Iterator[WalkItem]:
    yield Sample(table.REPLICATION_ROLE, (view.role_name,), 1)
    facts = view.facts()
    if isinstance(facts, SourceFacts):
        yield from _source(facts)
    elif facts is not None:
        yield from _follower(facts, view.copied_ratio(facts))


def _source(facts: SourceFacts) -> Iterator[WalkItem]:
    yield Sample(table.REPLICATION_LINKS, (), len(facts.links))
    yield Sample(table.REPLICATION_REFUSED, (), facts.refused_links)
    named = list(zip(link_names(facts.links), facts.links, strict=True))
    for name, link in named:
        yield Sample(table.REPLICATION_SLAVE_LAG_BYTES, (name,), link.lag_bytes)
    for name, link in named:
        yield Sample(table.REPLICATION_SLAVE_LAG_SECONDS, (name,), link.lag_seconds)
    for name, link in named:
        yield Sample(table.REPLICATION_SLAVE_SILENT, (name,), link.silent_seconds)
    for name, link in named:
        yield Sample(table.REPLICATION_SLAVE_SENT, (name,), link.sent_bytes_per_second)


def _follower(facts: FollowerFacts, copied: float | None) -> Iterator[WalkItem]:
    for state in FollowerState:
        yield Sample(table.REPLICATION_STATE, (state.value,), int(state is facts.state))
    yield Sample(table.REPLICATION_LINKS_MADE, (), facts.links_made)
    yield Sample(table.REPLICATION_TAKEN, (), facts.taken_bytes_per_second)
    if knows_lag(facts):
        yield Sample(table.REPLICATION_LAG_BYTES, (), facts.lag_bytes)
        yield Sample(table.REPLICATION_LAG_SECONDS, (), facts.lag_seconds)
    if facts.links_made:
        yield Sample(table.REPLICATION_SILENT, (), facts.silent_seconds)
    if copied is not None:
        yield Sample(table.REPLICATION_COPIED, (), copied)
