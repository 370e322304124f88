"""The SQL92 expressions that consumer groups registered with their heartbeats.

One row per group and topic, in upstream's file `consumerFilter.json`. A row is born when its
expression appears or changes, dies when the group has no member left or no longer filters the
topic that way, and is removed when it has been dead for `filterDataCleanTimeSpan`. A live row is
replaced only by a newer client version, so members that disagree do not take turns; whoever
comes back to a dead row is believed.

Losing the table costs nothing lasting: the next heartbeat brings every row again. Rows are
replaced, never changed in place.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cosmodrome.broker.members.table_file import (
    Document,
    RefusedRows,
    TableFile,
    with_unknown,
)
from cosmodrome.broker.receive.bloom import BIT_COUNT, bit_positions
from cosmodrome.broker.sql92 import Expression, Sql92Error, compile_expression
from cosmodrome.env.background import Background, Steps
from cosmodrome.env.base import Env
from cosmodrome.env.signal import Signal
from cosmodrome.errors import Refused, StoreCorrupt
from cosmodrome.wire.bodies import SQL92, TAG, SubscriptionData
from cosmodrome.wire.names import check_group, check_topic

log = logging.getLogger(__name__)

TABLE = "filterDataByTopic"
ROWS = "groupFilterData"
ROWS_MAX = 20_000
ROWS_PER_STEP = 100
CHARACTERS_MAX = 4 << 20  # of all expressions together
COMPLAINTS_MAX = 1000
SCAN_SECONDS = 60.0
# Compat: who was alive when the broker stopped counts as gone this long before the start.
DEAD_BEFORE_START_MS = 30_000


@dataclasses.dataclass(frozen=True, slots=True)
class Registered:
    """The expression of one group for one topic."""

    topic: str
    group: str
    text: str
    expression: Expression | None  # None when a stored text cannot be used
    client_version: int
    born_ms: int
    dead_ms: int = 0
    unknown: Document | None = None  # members of the row that are not ours

    @property
    def dead(self) -> bool:
        return self.dead_ms >= self.born_ms


class Expressions:
    """`changes` fires with the key of a row that is new, different or gone."""

    def __init__(self, path: str, env: Env, *, keep_dead_ms: int) -> None:
        self._clock = env.clock
        self._keep_dead_ms = keep_dead_ms
        self._file = TableFile(path, env, self._snapshot, self._document)
        self._groups: dict[str, dict[str, Registered]] = {}
        self._count = 0
        self._characters = 0
        self._unknown: Document | None = None
        self._complaints: dict[tuple[str, str], str] = {}
        self._scanner = Background("expire filters")
        self.changes: Signal[str] = Signal()

    async def start(self) -> None:
        if self._scanner.running:
            return
        try:
            document = await self._file.load()
        except StoreCorrupt as error:
            log.error(
                "filters_lost error=%s; starting without them: clients send them again", error
            )
            document = None
        if document is not None:
            self._restore(document)
        self.expire()
        self._scanner.repeat(SCAN_SECONDS, self.expire)

    async def stop(self) -> None:
        if await self._scanner.stop():
            await self._file.stop()

    def find(self, topic: str, group: str) -> Registered | None:
        return self._groups.get(group, {}).get(topic)

    def heard(self, group: str, subscriptions: Sequence[SubscriptionData]) -> None:
        """A member's heartbeat: register its expressions, end those it no longer has."""
        filtered = [
            item
            for item in subscriptions
            if item.expression_type != TAG
            and not item.class_filter_mode
            and item.sub_string.strip()
        ]
        for item in filtered:
            self._register(group, item)
        topics = {item.topic for item in filtered}
        self._end(row for row in self._rows(group) if row.topic not in topics)

    def left(self, group: str) -> None:
        """The last member of a group is gone."""
        self._end(self._rows(group))
        for key in [key for key in self._complaints if key[0] == group]:
            del self._complaints[key]

    def expire(self) -> None:
        """Forget what has been dead long enough."""
        oldest = self._clock.now_ms() - self._keep_dead_ms
        gone = [
            row
            for rows in self._groups.values()
            for row in rows.values()
            if row.dead and row.dead_ms <= oldest
        ]
        for row in gone:
            self._remove(row)
            log.info("filter_removed topic=%s group=%s", row.topic, row.group)
        if gone:
            self._file.save_soon()

    # --- for replication ----------------------------------------------------------------------

    def rows(self) -> Document:
        """All rows by `topic@group`, as a slave takes them over."""
        return {
            _key(row): _row_document(row) for rows in self._groups.values() for row in rows.values()
        }

    def row(self, key: str) -> Document | None:
        topic, _, group = key.partition("@")
        row = self.find(topic, group)
        return None if row is None else _row_document(row)

    def follow(self, rows: Mapping[str, Any], *, whole: bool) -> None:
        """Take over rows of the master. What is alive here stays unless the master has a live one
        that is not older: a member that is connected here brought it."""
        refused = RefusedRows("consumerFilter")
        gone = [key for key in self.rows() if key not in rows] if whole else []
        for key, document in rows.items():
            topic, _, group = key.partition("@")
            if document is None:
                gone.append(key)
                continue
            try:
                row = _row(topic, group, document)
                old = self.find(topic, group)
                if not self._has_room(old, row.text):
                    raise ValueError("this broker keeps no more filters")
            except (Refused, ValueError, TypeError, AttributeError, KeyError) as error:
                refused.add(key, repr(error))
                continue
            if old is None or _succeeds(row, old):
                self._put(row)
        for key in gone:
            topic, _, group = key.partition("@")
            old = self.find(topic, group)
            if old is not None and old.dead:
                self._remove(old)
                self._file.save_soon()
        refused.close()

    # --- changes ------------------------------------------------------------------------------

    def _register(self, group: str, item: SubscriptionData) -> None:
        old = self.find(item.topic, group)
        version, text = item.sub_version, item.sub_string
        if old is not None and version <= old.client_version and not old.dead:
            return
        if old is not None and old.text == text and old.expression is not None:
            self._put(
                dataclasses.replace(old, client_version=max(version, old.client_version), dead_ms=0)
            )
            return
        try:
            expression = _checked(group, item)
        except (Refused, Sql92Error) as error:
            if old is not None:
                self._remove(old)
                self._file.save_soon()
            self._complain(group, item, error)
            return
        if not self._has_room(old, text):
            self._complain(group, item, ValueError("this broker keeps no more filters"))
            return
        now_ms = self._clock.now_ms()
        unknown = old.unknown if old is not None else None
        self._put(Registered(item.topic, group, text, expression, version, now_ms, unknown=unknown))
        log.info("filter_registered topic=%s group=%s expression=%r", item.topic, group, text[:200])

    def _complain(self, group: str, item: SubscriptionData, error: Exception) -> None:
        """Once per expression, not with every heartbeat."""
        key = (group, item.topic)
        if self._complaints.get(key) == item.sub_string:
            return
        if len(self._complaints) >= COMPLAINTS_MAX:
            self._complaints.clear()
        self._complaints[key] = item.sub_string
        log.warning(
            "filter_refused topic=%s group=%s expression=%r error=%r; its pulls are refused"
            " until the consumer subscribes differently",
            item.topic[:255],
            group,
            item.sub_string[:200],
            str(error),
        )

    def _has_room(self, old: Registered | None, text: str) -> bool:
        count = self._count + (old is None)
        characters = self._characters + len(text) - (len(old.text) if old else 0)
        return count <= ROWS_MAX and characters <= CHARACTERS_MAX

    def _end(self, rows: Iterator[Registered]) -> None:
        now_ms = self._clock.now_ms()
        for row in rows:
            if not row.dead:
                self._put(dataclasses.replace(row, dead_ms=max(now_ms, row.born_ms)))

    def _rows(self, group: str) -> Iterator[Registered]:
        return iter(tuple(self._groups.get(group, {}).values()))

    def _put(self, row: Registered, *, save: bool = True) -> None:
        old = self.find(row.topic, row.group)
        if old is not None:
            self._take_out(old)
        self._groups.setdefault(row.group, {})[row.topic] = row
        self._count += 1
        self._characters += len(row.text)
        if save:
            self._file.save_soon()
        self.changes.fire(_key(row))

    def _remove(self, row: Registered) -> None:
        self._take_out(row)
        self.changes.fire(_key(row))

    def _take_out(self, row: Registered) -> None:
        rows = self._groups[row.group]
        del rows[row.topic]
        if not rows:
            del self._groups[row.group]
        self._count -= 1
        self._characters -= len(row.text)

    # --- the file -----------------------------------------------------------------------------

    def _snapshot(self) -> Mapping[str, Any]:
        return {TABLE: [row for rows in self._groups.values() for row in rows.values()]}

    def _document(self, state: Mapping[str, Any]) -> Steps[Document]:
        topics: dict[str, Document] = {}
        rows = sorted(state[TABLE], key=lambda row: (row.topic, row.group))
        for number, row in enumerate(rows, 1):
            if number % ROWS_PER_STEP == 0:
                yield
            topic = topics.setdefault(row.topic, {ROWS: {}, "topic": row.topic})
            topic[ROWS][row.group] = _row_document(row)
        return with_unknown({TABLE: topics}, self._unknown)

    def _restore(self, document: Document) -> None:
        self._groups.clear()
        self._count = self._characters = 0
        self._unknown = {name: document[name] for name in document if name != TABLE}
        latest_ms = self._clock.now_ms() - DEAD_BEFORE_START_MS
        table = document.get(TABLE)
        for topic, held in (table if isinstance(table, dict) else {}).items():
            rows = held.get(ROWS) if isinstance(held, dict) else None
            for group, fields in (rows if isinstance(rows, dict) else {}).items():
                try:
                    row = _row(topic, group, fields)
                except (Refused, ValueError, TypeError, AttributeError, KeyError) as error:
                    log.warning("filter_skipped topic=%s group=%s error=%s", topic, group, error)
                    continue
                if not row.dead:
                    row = dataclasses.replace(row, dead_ms=max(latest_ms, row.born_ms))
                if self._has_room(None, row.text):
                    self._put(row, save=False)


_MEMBERS = frozenset(
    (
        "bornTime",
        "clientVersion",
        "consumerGroup",
        "dead",
        "deadTime",
        "expression",
        "expressionType",
        "topic",
    )
)


def _key(row: Registered) -> str:
    return f"{row.topic}@{row.group}"


def _succeeds(row: Registered, old: Registered) -> bool:
    """Whether the master's row takes the place of one that is here."""
    if dataclasses.replace(row, expression=old.expression) == old:
        return False
    return old.dead or (not row.dead and row.client_version >= old.client_version)


def _checked(group: str, item: SubscriptionData) -> Expression:
    check_topic(item.topic)
    check_group(group)
    if item.expression_type != SQL92:
        raise Sql92Error(0, f"the expression type is {item.expression_type[:32]!r}", "")
    return compile_expression(item.sub_string)


def _row_document(row: Registered) -> Document:
    fields = {
        "bloomFilterData": {"bitNum": BIT_COUNT, "bitPos": bit_positions(row.group, row.topic)},
        "bornTime": row.born_ms,
        "clientVersion": row.client_version,
        "consumerGroup": row.group,
        "dead": row.dead,
        "deadTime": row.dead_ms,
        "expression": row.text,
        "expressionType": SQL92,
        "topic": row.topic,
    }
    # What an earlier broker computed stays: its settings may differ from the default.
    return with_unknown({**fields, **(row.unknown or {})}, None)


def _row(topic: str, group: str, fields: Document) -> Registered:
    check_topic(topic)
    check_group(group)
    text = fields["expression"]
    if not isinstance(text, str) or fields.get("expressionType", SQL92) != SQL92:
        raise ValueError("it holds no SQL92 expression")
    try:
        expression = compile_expression(text)
    except Sql92Error as error:
        log.warning("filter_unusable topic=%s group=%s error=%r", topic, group, str(error))
        expression = None
    return Registered(
        topic,
        group,
        text,
        expression,
        client_version=int(fields.get("clientVersion", 0)),
        born_ms=int(fields.get("bornTime", 0)),
        dead_ms=int(fields.get("deadTime", 0)),
        unknown={name: fields[name] for name in fields if name not in _MEMBERS} or None,
    )
