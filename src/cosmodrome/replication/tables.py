"""Tables beside the log that a slave gets from its master.

A table says which of its rows changed and takes rows that changed elsewhere. Rows are JSON values
by name. What is not there any more is a row with the value None.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

from cosmodrome.env.background import Background

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.2
UNKNOWN_NAMES_MAX = 100

Rows = Mapping[str, Any]


class Table(Protocol):
    """One table of the broker; `name` is that of its file, without the ending."""

    @property
    def name(self) -> str: ...

    @property
    def leads(self) -> bool:
        """Whether messages rely on its rows: then a row reaches a slave before what is sent after
        the change, so no message is there without its topic."""

    def rows(self) -> Rows:
        """All of them; nobody may change what was returned."""

    def on_change(self, changed: Callable[[Rows], None]) -> Callable[[], None]:
        """Have `changed` called with each row that changes; what was returned ends that.

        A row that changes often is given as it is, not as a copy: what is read of it later is
        newer, never older.
        """

    def apply(self, rows: Rows, *, whole: bool) -> None:
        """Rows of the master. With `whole` they are all that there are, and others go."""


@dataclasses.dataclass(slots=True)
class _Held:
    """Rows that wait for the log."""

    log_offset: int
    rows: dict[str, Any]
    whole: bool

    def merge(self, news: _Held) -> None:
        self.log_offset = max(self.log_offset, news.log_offset)
        if news.whole:
            self.rows, self.whole = news.rows, True
            return
        self.rows.update(news.rows)
        if self.whole:
            for name, row in news.rows.items():
                if row is None:
                    del self.rows[name]


class AppliedTables:
    """A slave's end: finds the table that rows of the master are for.

    Some tables say what was done with records of the log (`behind_log`): a delayed message that
    counts as delivered was delivered by a record. If a slave believed such rows before it has those
    records and then became the master, the message would be lost. So they wait until the log has
    reached the offset at which the master said them. At most two states of a table wait; what comes
    meanwhile is merged into the second, so the first is never put off. A link begins with whole
    tables, and behind a whole one the second is whole too: so neither is larger than the table,
    however long the log takes.
    """

    def __init__(
        self, tables: Iterable[Table], behind_log: Collection[str], log_end: Callable[[], int]
    ) -> None:
        self._tables = {table.name: table for table in tables}
        self._behind_log = frozenset(behind_log)
        self._log_end = log_end
        self._held: dict[str, list[_Held]] = {}
        self._unknown: set[str] = set()
        self._looking = Background("tables behind the log")

    async def start(self) -> None:
        self._looking.repeat(LOOK_SECONDS, self._look)

    async def stop(self) -> None:
        if await self._looking.stop():
            self._look()

    def begin(self) -> None:
        """A link begins. It brings all tables again; what waits still was said on the one before,
        perhaps by a master that has lost the log that it spoke of."""
        self._look()
        self._held.clear()

    def take(self, name: str, rows: Rows, *, whole: bool, log_offset: int = 0) -> None:
        """Rows of the master, said when its log ended at `log_offset`."""
        table = self._tables.get(name)
        if table is None:
            self._note_unknown(name)
        elif name in self._behind_log:
            self._hold(name, _Held(log_offset, dict(rows), whole))
            self._look()
        else:
            _apply(table, rows, whole=whole)

    def _hold(self, name: str, news: _Held) -> None:
        held = self._held.setdefault(name, [])
        if len(held) == 1 and held[0].whole:
            held.append(_Held(0, dict(held[0].rows), whole=True))
        if len(held) < 2:
            held.append(news)
        else:
            held[1].merge(news)

    def _look(self) -> None:
        if not self._held:
            return
        end = self._log_end()
        for name, held in list(self._held.items()):
            while held and held[0].log_offset <= end:
                ripe = held.pop(0)
                _apply(self._tables[name], ripe.rows, whole=ripe.whole)
            if not held:
                del self._held[name]

    def _note_unknown(self, name: str) -> None:
        """A newer master may have tables that this version does not know."""
        if name not in self._unknown and len(self._unknown) < UNKNOWN_NAMES_MAX:
            self._unknown.add(name)
            log.warning(
                "table_unknown name=%.100r; the master is newer: it is not kept here, update this"
                " broker before it has to become the master",
                name,
            )


def _apply(table: Table, rows: Rows, *, whole: bool) -> None:
    try:
        table.apply(rows, whole=whole)
    except Exception:
        # Whatever is wrong with them, the log has to go on.
        log.exception("table_not_applied name=%s rows=%d", table.name, len(rows))
