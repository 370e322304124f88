"""One JSON table on disk: how it is read, how it is saved, what happens when it is damaged.

Invariants:
- A save writes the state as it is when the save begins; saves of one file never overlap, so
  the newest state always wins, and callers that arrive meanwhile share the next one.
- `save()` returns only after a state at least as new as the caller's is on disk.
- At every moment a readable generation exists under the file's name or under `.bak`. A damaged
  file never becomes that previous generation.
- Members of the file that this version does not know are written back as they were read.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from cosmodrome.env import generations
from cosmodrome.env.background import Steps, in_turns
from cosmodrome.env.base import Env
from cosmodrome.env.signal import Signal
from cosmodrome.errors import Code, CosmodromeError, Refused, StoreCorrupt, reason_of
from cosmodrome.layout import FRAME_BYTES_MAX
from cosmodrome.wire import fastjson
from cosmodrome.wire.bodies import DataVersion

log = logging.getLogger(__name__)

Document = dict[str, Any]
State = Mapping[str, Any]  # of a table, to be written
Row = TypeVar("Row", bound=msgspec.Struct)

RETRY_SAVE_SECONDS = 5.0
REFUSED_LOGGED_MAX = 10
ROWS_WRITTEN_PER_STEP = 100
ROWS_PER_STEP = 500

# Of all rows as JSON: slaves and tools get a table in one frame, beside a header and a version.
TABLE_BYTES_MAX = FRAME_BYTES_MAX - 1024 * 1024

VERSION_ROW = "@dataVersion"  # no topic and no group can have this name


class RefusedRows:
    """Rows of another broker that cannot be taken over: a line for each of the first few."""

    def __init__(self, table: str) -> None:
        self._table = table
        self._count = 0

    def add(self, row: object, error: object) -> None:
        self._count += 1
        if self._count <= REFUSED_LOGGED_MAX:
            log.warning(
                "row_refused table=%s row=%.200r error=%.500s; what is here stays: look at the"
                " master's table",
                self._table,
                row,
                error,
            )

    def close(self) -> None:
        if self._count > REFUSED_LOGGED_MAX:
            log.warning("rows_refused table=%s count=%d", self._table, self._count)


class TableFile:
    """The file behind a table.

    `snapshot` takes hold of the state, at once or in turns; nobody may change what it returned.
    `finish` makes the document of it in steps. Both run on the loop, and so does the making of its
    text: a thread would make the loop wait for the interpreter again and again.
    """

    def __init__(
        self,
        path: str,
        env: Env,
        snapshot: Callable[[], State | Awaitable[State]],
        finish: Callable[[State], Steps[State]] | None = None,
    ) -> None:
        self.path = path
        self._env = env
        self._snapshot = snapshot
        self._finish = finish
        self._keep = True
        self._asked = 0
        self._saved = 0
        self._error: OSError | None = None
        self._writer: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._stopped = False

    async def load(self) -> Document | None:
        """The newest readable generation, or None when nothing was ever saved."""
        self._stopped = False
        return await self._env.offload(self._load)

    async def save(self) -> None:
        """Return once the present state is on disk; OSError when it could not be written."""
        self._asked += 1
        target = self._asked
        while self._saved < target:
            if self._writer is None:
                self._writer = asyncio.create_task(self._write(), name=f"save {self.path}")
            await asyncio.shield(self._writer)
            if self._error is not None and self._saved < target:
                raise self._error

    def save_soon(self) -> None:
        """Save in the background; a failure is logged and tried again."""
        self._asked += 1
        self._start()

    async def stop(self) -> None:
        """Save what is not saved yet. Safe to call twice."""
        self._stopped = True
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        while self._writer is not None:
            await asyncio.shield(self._writer)
        if self._saved < self._asked:
            await self._write()
            if self._error is not None:
                raise self._error

    def _start(self) -> None:
        self._retry = None
        if self._writer is None and not self._stopped:
            self._writer = asyncio.create_task(self._write(), name=f"save {self.path}")

    async def _write(self) -> None:
        try:
            # The first pass also gathers everything else that changes in this turn of the loop.
            await asyncio.sleep(0)
            while self._saved < self._asked:
                generation = self._asked
                state = self._snapshot()
                if isinstance(state, Awaitable):
                    state = await state
                document = await in_turns(self._finish(state)) if self._finish else state
                text = await in_turns(fastjson.dumping(document, pretty=True))
                await self._env.offload(functools.partial(self._replace, text))
                self._saved = generation
                self._error = None
        except OSError as error:
            self._error = error
            log.error(
                "table_save_failed file=%s error=%s; memory is ahead of the disk, trying again"
                " in %.0f s: free space or fix the permissions",
                self.path,
                error,
                RETRY_SAVE_SECONDS,
            )
            if not self._stopped and self._retry is None:
                self._retry = asyncio.get_running_loop().call_later(RETRY_SAVE_SECONDS, self._start)
        finally:
            self._writer = None

    def _replace(self, text: list[bytes]) -> None:
        self._env.disk.replace(self.path, b"".join(text), keep=self._keep)
        self._keep = True

    def _load(self) -> Document | None:
        try:
            found = generations.newest(self._env.disk, self.path, _decode)
        except generations.Unreadable as error:
            raise StoreCorrupt(
                f"{error}; restore one of them from a copy, or move both away to start with an"
                " empty table"
            ) from None
        if found is None:
            return None
        if found.damage:
            # The next save must not push the damaged file over the generation just used.
            self._keep = False
            log.error(
                "table_damaged file=%s error=%s; using the previous generation %s: changes made"
                " just before the damage may be missing",
                self.path,
                found.damage,
                generations.previous(self.path),
            )
        return found.content


def _decode(data: bytes) -> Document:
    if not data.strip():
        raise ValueError("it is empty")
    try:
        document = fastjson.loads(data)
    except CosmodromeError as error:
        raise ValueError(str(error)) from None
    if not isinstance(document, dict):
        raise ValueError("it does not hold a JSON object")
    return document


@dataclasses.dataclass(frozen=True, slots=True)
class TableKind(Generic[Row]):
    """What a table holds, and how its file spells it."""

    name: str  # of one row, in texts for people
    row: type[Row]
    rows_max: int
    member: str  # of the file, which holds the rows
    name_member: str  # of a row
    check_name: Callable[[str], None]
    check_row: Callable[[Row], None]  # ValueError for a row of another broker that cannot be


@dataclasses.dataclass(frozen=True, slots=True)
class Followed(Generic[Row]):
    """What became different by following another broker's table."""

    rows: tuple[Row, ...]  # new or changed
    gone: tuple[str, ...]
    version: bool


class VersionedTable(Generic[Row]):
    """Named rows under a data version, in one file: `{"dataVersion": ..., <member>: {...}}`.

    Rows are replaced, never changed in place. `rows` belongs to the owning service, which
    calls `changed` after every change of it. `changes` fires with the names of rows that are new,
    different or gone.
    """

    def __init__(self, path: str, env: Env, kind: TableKind[Row]) -> None:
        self.rows: dict[str, Row] = {}
        self.changes: Signal[Collection[str]] = Signal()
        self._env = env
        self._file = TableFile(path, env, self._snapshot, self._finish)
        self._kind = kind
        fields = msgspec.structs.fields(kind.row)
        self._known = frozenset(field.encode_name for field in fields)
        self._name_attribute = next(
            field.name for field in fields if field.encode_name == kind.name_member
        )
        self._loaded = False
        self._counter = 0
        self._timestamp_ms = 0
        self._unknown: Document = {}
        self._unknown_rows: dict[str, Document] = {}
        self._measured = self._measured_bytes = 0  # how many rows, and what they take
        self._encoding = asyncio.Lock()

    @property
    def version(self) -> DataVersion:
        return DataVersion(counter=self._counter, timestamp=self._timestamp_ms)

    async def load(self) -> bool:
        """Fill the table; false when nothing was ever saved."""
        if self._loaded:
            return True
        self._loaded = True
        document = await self._file.load()
        if document is None:
            self._timestamp_ms = self._env.clock.now_ms()
            self._file.save_soon()
            return False
        self._restore(document)
        return True

    async def stop(self) -> None:
        await self._file.stop()
        self._loaded = False

    def put(self, name: str, row: Row) -> None:
        """Add or replace; saved in the background."""
        known = self.rows.get(name)
        size = self._size_bytes()
        if known is None:
            self._check_room(size + row_bytes(name, row))
        else:
            size -= row_bytes(name, known)
        self.rows[name] = row
        self._measured, self._measured_bytes = len(self.rows), size + row_bytes(name, row)
        self.changed((name,))

    def remove(self, name: str) -> bool:
        """Take a row out; false when it is not there."""
        size = self._size_bytes()
        row = self.rows.pop(name, None)
        if row is None:
            return False
        self._measured, self._measured_bytes = len(self.rows), size - row_bytes(name, row)
        self._unknown_rows.pop(name, None)
        self.changed((name,))
        return True

    def changed(self, names: Collection[str] = ()) -> None:
        """These rows are other ones now: move the version and save in the background."""
        self._counter += 1
        self._timestamp_ms = self._env.clock.now_ms()
        self._file.save_soon()
        self.changes.fire(names)

    async def reply_body(self) -> bytes:
        """The table as the answer of a request, written a few rows at a time.

        A row that changes meanwhile is written as it is when its turn comes; the version says that
        there is a newer one.
        """
        async with self._encoding:  # one answer at a time is in the making
            version = msgspec.json.encode(self.version)
            parts = []
            names = list(self.rows)
            for at in range(0, len(names), ROWS_PER_STEP):
                some = {
                    name: self.rows[name]
                    for name in names[at : at + ROWS_PER_STEP]
                    if name in self.rows
                }
                parts += [msgspec.json.encode(some)[1:-1]] if some else []
                if len(names) > ROWS_PER_STEP:
                    await asyncio.sleep(0)
            member = self._kind.member.encode()
            return b'{"dataVersion":%b,"%b":{%b}}' % (version, member, b",".join(parts))

    def documents(self, names: Collection[str] | None = None) -> Document:
        """Rows (all, or these) as another broker takes them, None where one is gone, and the
        version as a row of its own."""
        found: Document = {
            name: self._row_document(name, self.rows[name]) if name in self.rows else None
            for name in (self.rows if names is None else names)
        }
        found[VERSION_ROW] = msgspec.to_builtins(self.version)
        return found

    def follow(self, documents: Mapping[str, Any], *, whole: bool) -> Followed[Row]:
        """Take over rows of another broker, and its version. With `whole` others go.

        A row that cannot be is refused with a line in the log; what was there under its name stays.
        """
        refused = RefusedRows(self._kind.member)
        version = self._followed_version(documents, refused)
        if version is None and whole:
            # No broker has a table without one: what this is, nobody knows.
            refused.add(VERSION_ROW, "a whole table without a version; nothing of it is taken")
            return Followed((), (), version=False)
        fresh: list[Row] = []
        gone = [name for name in self.rows if name not in documents] if whole else []
        for name, document in documents.items():
            if name == VERSION_ROW:
                continue
            if document is None:
                gone += [name] if name in self.rows else []
            elif (row := self._followed_row(name, document, refused)) is not None:
                fresh.append(row)
        for name in gone:
            del self.rows[name]
            self._unknown_rows.pop(name, None)
        refused.close()
        moved = version is not None and version != self.version
        if version is not None:
            self._counter, self._timestamp_ms = version.counter, version.timestamp
        if fresh or gone or moved:
            self._file.save_soon()
            self.changes.fire([*(getattr(row, self._name_attribute) for row in fresh), *gone])
        return Followed(tuple(fresh), tuple(gone), moved)

    async def saved(self, name: str) -> None:
        """Return once the last change is on disk; refuse the request that made it otherwise."""
        try:
            await self._file.save()
        except OSError as error:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"The change of {self._kind.name} {name} is in effect but could not be saved"
                f" ({reason_of(error)}); make room or fix the permissions, then repeat the"
                " request.",
            ) from None

    def _check_room(self, size: int) -> None:
        """Whether the table takes one row more, with which all would take `size` bytes."""
        name = self._kind.name
        if len(self.rows) >= self._kind.rows_max:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"This broker already has {self._kind.rows_max} {name}s; delete unused ones first.",
            )
        if size > TABLE_BYTES_MAX:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"The {len(self.rows)} {name}s of this broker take {size} bytes with this one, and"
                f" more than {TABLE_BYTES_MAX} do not fit into one answer; delete unused ones"
                " first.",
            )

    def _size_bytes(self) -> int:
        """What the rows take as JSON; counted again when somebody else added or removed some."""
        if self._measured != len(self.rows):
            self._measured = len(self.rows)
            self._measured_bytes = sum(row_bytes(name, row) for name, row in self.rows.items())
        return self._measured_bytes

    def _followed_version(
        self, documents: Mapping[str, Any], refused: RefusedRows
    ) -> DataVersion | None:
        try:
            version = msgspec.convert(documents[VERSION_ROW], DataVersion, strict=False)
        except KeyError:
            return None
        except msgspec.ValidationError as error:
            refused.add(VERSION_ROW, error)
            return None
        return DataVersion(counter=version.counter, timestamp=version.timestamp)

    def _followed_row(self, name: str, document: Any, refused: RefusedRows) -> Row | None:
        """The row, put into the table; None when it is there already or cannot be."""
        known = self.rows.get(name)
        try:
            self._kind.check_name(name)
            row, unknown = self._read_row(name, document)
            self._kind.check_row(row)
            if known is None and len(self.rows) >= self._kind.rows_max:
                raise ValueError(f"this broker already has {self._kind.rows_max} of them")
        except (msgspec.ValidationError, Refused, TypeError, ValueError) as error:
            refused.add(name, error)
            return None
        if row == known and unknown == self._unknown_rows.get(name):
            return None
        self.rows[name] = row
        self._unknown_rows.pop(name, None)
        if unknown:
            self._unknown_rows[name] = unknown
        return row

    def _read_row(self, name: str, document: Any) -> tuple[Row, Document | None]:
        """A row and what it has no members for."""
        row = msgspec.convert(
            {**document, self._kind.name_member: name}, self._kind.row, strict=False
        )
        return row, {key: document[key] for key in document if key not in self._known} or None

    def _row_document(self, name: str, row: Row) -> Document:
        return with_unknown(msgspec.to_builtins(row), self._unknown_rows.get(name))

    def _snapshot(self) -> Document:
        return {"dataVersion": self.version, self._kind.member: dict(self.rows)}

    def _finish(self, state: State) -> Steps[State]:
        rows: Document = {}
        for number, (name, row) in enumerate(state[self._kind.member].items(), 1):
            rows[name] = self._row_document(name, row)
            if number % ROWS_WRITTEN_PER_STEP == 0:
                yield
        version = with_unknown(
            msgspec.to_builtins(state["dataVersion"]), self._unknown.get("dataVersion")
        )
        return with_unknown({"dataVersion": version, self._kind.member: rows}, self._unknown)

    def _restore(self, document: Document) -> None:
        try:
            version = msgspec.convert(document.get("dataVersion") or {}, DataVersion, strict=False)
            self._counter, self._timestamp_ms = version.counter, version.timestamp
            self.rows.clear()
            for name, row in (document.get(self._kind.member) or {}).items():
                self._kind.check_name(name)
                self.rows[name], unknown = self._read_row(name, row)
                if unknown:
                    self._unknown_rows[name] = unknown
        except (msgspec.ValidationError, Refused, AttributeError, TypeError) as error:
            raise StoreCorrupt(
                f"{self._file.path} holds an entry that is not a {self._kind.name} ({error});"
                " correct it, or restore the file from a copy"
            ) from None
        self._unknown = {key: value for key, value in document.items() if key != self._kind.member}


def row_bytes(name: str, row: msgspec.Struct) -> int:
    """What a row takes in a table that is sent as JSON."""
    return len(msgspec.json.encode(row)) + len(name) + len('"":,')


def with_unknown(fresh: Mapping[str, Any], unknown: Mapping[str, Any] | None) -> Document:
    """`fresh` plus what it has no member for, sorted by name as upstream writes objects."""
    merged = {**unknown, **fresh} if unknown else fresh
    return {name: merged[name] for name in sorted(merged)}
