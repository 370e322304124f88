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
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from cosmodrome.env.base import Env
from cosmodrome.errors import Code, CosmodromeError, Refused, StoreCorrupt
from cosmodrome.wire import fastjson
from cosmodrome.wire.bodies import DataVersion

log = logging.getLogger(__name__)

Document = dict[str, Any]
Row = TypeVar("Row", bound=msgspec.Struct)

RETRY_SAVE_SECONDS = 5.0


class TableFile:
    """The file behind a table. `snapshot` runs on the loop and takes hold of the state; nobody
    may change what it returned. `finish` makes the document of it and runs off the loop, like
    the disk work after it."""

    def __init__(
        self,
        path: str,
        env: Env,
        snapshot: Callable[[], Mapping[str, Any]],
        finish: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    ) -> None:
        self.path = path
        self._env = env
        self._snapshot = snapshot
        self._finish = finish
        self._keep = True
        self._wanted = 0
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
        self._wanted += 1
        target = self._wanted
        while self._saved < target:
            if self._writer is None:
                self._writer = asyncio.create_task(self._write(), name=f"save {self.path}")
            await asyncio.shield(self._writer)
            if self._error is not None and self._saved < target:
                raise self._error

    def save_soon(self) -> None:
        """Save in the background; a failure is logged and tried again."""
        self._wanted += 1
        self._start()

    async def stop(self) -> None:
        """Save what is not saved yet. Safe to call twice."""
        self._stopped = True
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        while self._writer is not None:
            await asyncio.shield(self._writer)
        if self._saved < self._wanted:
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
            while self._saved < self._wanted:
                generation = self._wanted
                await self._env.offload(functools.partial(self._replace, self._snapshot()))
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

    def _replace(self, state: Mapping[str, Any]) -> None:
        document = self._finish(state) if self._finish else state
        self._env.disk.replace(self.path, fastjson.dumps(document, pretty=True), keep=self._keep)
        self._keep = True

    def _load(self) -> Document | None:
        backup = self.path + ".bak"
        document, why = self._read(self.path)
        if document is not None:
            return document
        previous, why_previous = self._read(backup)
        if previous is not None:
            # The next save must not push the damaged file over the generation just used.
            self._keep = False
            log.error(
                "table_damaged file=%s error=%s; using the previous generation %s: changes made"
                " just before the damage may be missing",
                self.path,
                why,
                backup,
            )
            return previous
        if why == why_previous == _ABSENT:
            return None
        raise StoreCorrupt(
            f"{self.path} cannot be used ({why}) and neither can {backup} ({why_previous});"
            " restore one of them from a copy, or move both away to start with an empty table"
        )

    def _read(self, path: str) -> tuple[Document | None, str]:
        if not self._env.disk.exists(path):
            return None, _ABSENT
        try:
            data = self._env.disk.read(path)
            if not data.strip():
                return None, "it is empty"
            document = fastjson.loads(data)
        except (OSError, ValueError, CosmodromeError) as error:
            return None, str(error)
        if not isinstance(document, dict):
            return None, "it does not hold a JSON object"
        return document, ""


_ABSENT = "it does not exist"


class VersionedTable(Generic[Row]):
    """Named rows under a data version, in one file: `{"dataVersion": ..., <member>: {...}}`.

    Rows are replaced, never changed in place. `rows` belongs to the owning service, which
    calls `changed` after every change of it.
    """

    def __init__(
        self,
        path: str,
        env: Env,
        *,
        row: type[Row],
        member: str,
        name_member: str,
        check_name: Callable[[str], None],
        kind: str,
    ) -> None:
        self.rows: dict[str, Row] = {}
        self._env = env
        self._file = TableFile(path, env, self._snapshot, self._finish)
        self._row = row
        self._member = member
        self._name_member = name_member
        self._check_name = check_name
        self._kind = kind
        self._known = frozenset(field.encode_name for field in msgspec.structs.fields(row))
        self._loaded = False
        self._counter = 0
        self._timestamp_ms = 0
        self._unknown: Document = {}
        self._unknown_rows: dict[str, Document] = {}

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

    def remove(self, name: str) -> bool:
        """Take a row out; false when it is not there."""
        if self.rows.pop(name, None) is None:
            return False
        self._unknown_rows.pop(name, None)
        self.changed()
        return True

    def changed(self) -> None:
        """Move the version and save in the background."""
        self._counter += 1
        self._timestamp_ms = self._env.clock.now_ms()
        self._file.save_soon()

    async def saved(self, name: str) -> None:
        """Return once the last change is on disk; refuse the request that made it otherwise."""
        try:
            await self._file.save()
        except OSError as error:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"The change of {self._kind} {name} is in effect but could not be saved"
                f" ({error}); make room or fix the permissions, then repeat the request.",
            ) from None

    def _snapshot(self) -> Document:
        return {"dataVersion": self.version, self._member: dict(self.rows)}

    def _finish(self, state: Mapping[str, Any]) -> Document:
        rows = {
            name: with_unknown(msgspec.to_builtins(row), self._unknown_rows.get(name))
            for name, row in state[self._member].items()
        }
        version = with_unknown(
            msgspec.to_builtins(state["dataVersion"]), self._unknown.get("dataVersion")
        )
        return with_unknown({"dataVersion": version, self._member: rows}, self._unknown)

    def _restore(self, document: Document) -> None:
        try:
            version = msgspec.convert(document.get("dataVersion") or {}, DataVersion, strict=False)
            self._counter, self._timestamp_ms = version.counter, version.timestamp
            self.rows.clear()
            for name, row in (document.get(self._member) or {}).items():
                self._check_name(name)
                self.rows[name] = msgspec.convert(
                    {**row, self._name_member: name}, self._row, strict=False
                )
                unknown = {key: value for key, value in row.items() if key not in self._known}
                if unknown:
                    self._unknown_rows[name] = unknown
        except (msgspec.ValidationError, Refused, AttributeError, TypeError) as error:
            raise StoreCorrupt(
                f"{self._file.path} holds an entry that is not a {self._kind} ({error});"
                " correct it, or restore the file from a copy"
            ) from None
        self._unknown = {key: value for key, value in document.items() if key != self._member}


def with_unknown(fresh: Mapping[str, Any], unknown: Mapping[str, Any] | None) -> Document:
    """`fresh` plus what it has no member for, sorted by name as upstream writes objects."""
    merged = {**unknown, **fresh} if unknown else fresh
    return {name: merged[name] for name in sorted(merged)}
