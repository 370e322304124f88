"""Settings of running servers as commands show and change them, for brokers and name servers.

Tables are settings by server. Values whose names sound like secrets are masked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cosmodrome.cli.support.exits import NotFound
from cosmodrome.cli.support.masking import SECRET
from cosmodrome.cli.support.operating import similar
from cosmodrome.cli.support.output import UNKNOWN, Column, show

Tables = Mapping[str, Mapping[str, str]]

MASK = "********"


class ServerSettings:
    """`kind` is what a server is called, `column` the column that names it."""

    def __init__(self, kind: str, column: str, hint: str) -> None:
        self._kind = kind
        self._column = column
        self._hint = hint

    def refuse_unknown(self, keys: Iterable[str], tables: Tables) -> None:
        known = {key for table in tables.values() for key in table}
        for key in keys:
            if key not in known:
                close = similar(key, known) or ";"
                raise NotFound(f"no {self._kind} has a setting {key}{close} {self._hint}")

    def show(self, output: str, tables: Tables, keys: tuple[str, ...]) -> None:
        """Print all settings, or those with these keys."""
        self.refuse_unknown(keys, tables)
        rows = (
            {self._column: name, "key": key, "value": masked(key, value)}
            for name, table in tables.items()
            for key, value in sorted(table.items())
            if not keys or key in keys
        )
        show(output, (Column(self._column), Column("key"), Column("value")), rows)

    def show_changes(
        self, output: str, before: Tables, after: Tables | None, changes: Mapping[str, str]
    ) -> None:
        """Print what became of the changes; `after` is None when they were not made."""
        columns = map(Column, (self._column, "key", "before", "after", "outcome"))
        rows = []
        for name, table in before.items():
            now = dict(changes) if after is None else after.get(name)
            for key in changes:
                value = UNKNOWN if now is None else now.get(key)
                changed = "would be changed" if after is None else "changed"
                rows.append(
                    {
                        self._column: name,
                        "key": key,
                        "before": masked(key, table.get(key)),
                        "after": masked(key, value),
                        "outcome": "unchanged" if value == table.get(key) else changed,
                    }
                )
        show(output, tuple(columns), rows)


def masked(key: str, value: object) -> object:
    return MASK if isinstance(value, str) and value and SECRET.search(key) else value
