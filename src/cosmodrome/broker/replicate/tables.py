"""The one list of what a broker keeps beside the log: what its slaves get, and what they do not.

Whoever adds a file adds it here, as a table or as local with the reason; a test looks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Protocol

from cosmodrome.broker.later.delivery import Delivery
from cosmodrome.broker.later.room import Later
from cosmodrome.broker.members.offsets import Kept, Offsets
from cosmodrome.broker.members.room import Members
from cosmodrome.broker.members.table_file import RefusedRows
from cosmodrome.broker.operate.settings import MUST_AGREE, Settings
from cosmodrome.broker.receive.expressions import Expressions
from cosmodrome.env.signal import Signal
from cosmodrome.errors import Refused
from cosmodrome.replication.tables import Rows, Table
from cosmodrome.store.store import Store
from cosmodrome.wire.names import check_topic

# In the order in which a slave gets them.
REPLICATED: Final[Mapping[str, str]] = {
    "brokerOverrides": "brokerOverrides.properties",
    "topics": "topics.json",
    "subscriptionGroup": "subscriptionGroup.json",
    "deletedTopics": "deletedTopics.json",
    "consumerOffset": "consumerOffset.json",
    "consumerFilter": "consumerFilter.json",
    "delayOffset": "delayOffset.json",
    "timerOffset": "timerOffset.json",
}
# What they say is true only where the log has the records that they speak of. Of offsets too: a
# transaction counts as decided by one, and one behind the end of its queue would hide new messages.
BEHIND_LOG: Final = frozenset(("consumerOffset", "delayOffset", "timerOffset"))
# File or directory below the store -> why no slave gets it.
LOCAL: Final[Mapping[str, str]] = {
    "acl": "has secrets; operators copy account files themselves",
    "plain_acl.yml": "has secrets; operators copy account files themselves",
    "abort": "says how this process ended",
    "checkpoint": "says what of this disk is synced",
    "commitlog": "is the log, which has a stream of its own",
    "consumequeue": "is built from the log",
    "index": "is built from the log",
    "lock": "belongs to this process",
    "storeInventory.json": "counts the files of this disk",
    "kvConfig.json": "belongs to the name server, which may share the directory",
}

Stop = Callable[[], None]
Changed = Callable[[Rows], None]


def replicated_tables(
    store: Store,
    members: Members,
    later: Later,
    expressions: Expressions,
    settings: Settings,
    kept: Kept,
) -> tuple[Table, ...]:
    """The tables of `REPLICATED`; `kept` are offsets that the master may not know yet."""
    return (
        SettingsTable(settings),
        NamedTable("topics", members.topics),
        NamedTable("subscriptionGroup", members.groups),
        DeletionsTable(store),
        OffsetsTable(members.offsets, kept),
        FiltersTable(expressions),
        ProgressTable(later.delays),
        ProgressTable(later.timers),
    )


class Named(Protocol):
    """Topics or groups."""

    @property
    def changes(self) -> Signal[Collection[str]]: ...
    def documents(self, names: Collection[str] | None = None) -> dict[str, Any]: ...
    def follow(self, documents: Mapping[str, Any], *, whole: bool) -> None: ...


class NamedTable:
    """Topics or groups: JSON by name, and the version as a row of its own."""

    leads = True

    def __init__(self, name: str, owner: Named) -> None:
        self.name = name
        self._owner = owner

    def rows(self) -> Rows:
        return self._owner.documents()

    def on_change(self, changed: Changed) -> Stop:
        return self._owner.changes.subscribe(lambda names: changed(self._owner.documents(names)))

    def apply(self, rows: Rows, *, whole: bool) -> None:
        self._owner.follow(rows, whole=whole)


class OffsetsTable:
    """`topic@group` -> queue id -> offset."""

    name = "consumerOffset"
    leads = False

    def __init__(self, offsets: Offsets, kept: Kept) -> None:
        self._offsets = offsets
        self._kept = kept

    def rows(self) -> Rows:
        return self._offsets.rows()

    def on_change(self, changed: Changed) -> Stop:
        row = self._offsets.row
        # With each commit: so the row as it is, no copy.
        committed = self._offsets.committed.subscribe(
            lambda commit: changed({commit[0]: row(commit[0])})
        )
        replaced = self._offsets.replaced.subscribe(
            lambda keys: changed({key: row(key) for key in keys})
        )

        def stop() -> None:
            committed()
            replaced()

        return stop

    def apply(self, rows: Rows, *, whole: bool) -> None:
        self._offsets.follow(rows, whole=whole, kept=self._kept)


class DeletionsTable:
    """Topic -> where the log ended when it was deleted. A slave forgets a row by itself, when its
    own log has lost the last record that the row is about."""

    name = "deletedTopics"
    leads = False

    def __init__(self, store: Store) -> None:
        self._store = store

    def rows(self) -> Rows:
        return dict(self._store.deletions.before)

    def on_change(self, changed: Changed) -> Stop:
        deletions = self._store.deletions

        def tell(topic: str) -> None:
            if topic in deletions.before:
                changed({topic: deletions.before[topic]})

        return deletions.changes.subscribe(tell)

    def apply(self, rows: Rows, *, whole: bool) -> None:
        known, fresh = self._store.deletions.before, {}
        refused = RefusedRows(self.name)
        for topic, log_end in rows.items():
            try:
                check_topic(topic)
                if log_end is not None and not 0 <= log_end < 1 << 63:
                    raise ValueError(f"the log cannot end at {log_end}")
            except (Refused, TypeError, ValueError) as error:
                refused.add(topic, error)
                continue
            if log_end is not None and known.get(topic) != log_end:
                fresh[topic] = int(log_end)
        refused.close()
        if fresh:
            self._store.follow_deletions(fresh)


class FiltersTable:
    """`topic@group` -> the SQL92 filter as its file has it."""

    name = "consumerFilter"
    leads = False

    def __init__(self, expressions: Expressions) -> None:
        self._expressions = expressions

    def rows(self) -> Rows:
        return self._expressions.rows()

    def on_change(self, changed: Changed) -> Stop:
        row = self._expressions.row
        return self._expressions.changes.subscribe(lambda key: changed({key: row(key)}))

    def apply(self, rows: Rows, *, whole: bool) -> None:
        self._expressions.follow(rows, whole=whole)


class ProgressTable:
    """How far delayed or timed messages were delivered."""

    leads = False

    def __init__(self, delivery: Delivery) -> None:
        self.name = delivery.table
        self._delivery = delivery

    def rows(self) -> Rows:
        return self._delivery.rows()

    def on_change(self, changed: Changed) -> Stop:
        return self._delivery.moved.subscribe(lambda _: changed(self._delivery.rows()))

    def apply(self, rows: Rows, *, whole: bool) -> None:
        self._delivery.follow(rows, whole=whole)


class SettingsTable:
    """Key -> text, of the settings that must agree."""

    name = "brokerOverrides"
    leads = False

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def rows(self) -> Rows:
        return self._settings.rows()

    def on_change(self, changed: Changed) -> Stop:
        def tell(keys: frozenset[str]) -> None:
            if keys & MUST_AGREE:
                rows = self._settings.rows()
                changed({key: rows[key] for key in keys & MUST_AGREE})

        return self._settings.changed.subscribe(tell)

    def apply(self, rows: Rows, *, whole: bool) -> None:
        self._settings.follow(rows)
