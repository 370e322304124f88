"""The JSON dialect of upstream's serializer, and nothing else.

Besides standard JSON it has three peculiarities: integer map keys without quotes `{0:5}`, whole
objects as map keys `{{"topic":"T"}:5}`, and references to a value written earlier
`{"$ref":"$.table.a"}`. In Python

- a bare integer key is an `int`, a quoted one a `str` (so `{0:1}` and `{"0":1}` differ),
- an object key is an `ObjectKey`: a tuple of (name, value) pairs sorted by name, whose own
  nested objects are `ObjectKey`s and whose arrays are tuples,
- a reference is the referenced value itself,
- members named `@type` are dropped: a peer does not choose our types.

Reading takes linear time; depth and the growth through references are bounded. What is not plain
JSON is read by `speed.dialect`, compiled where that is possible.
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterator
from typing import Any

import msgspec

from cosmodrome.errors import ProtocolError
from cosmodrome.speed.dialect import DEPTH_MAX, ObjectKey, Reference, read, reference_path

__all__ = ["DEPTH_MAX", "ObjectKey", "dumps", "loads"]

REFERENCED_VALUES_MAX = 100_000  # values that all references of one text may stand for

ROWS_PER_STEP = 32
TABLE_DEPTH = 1  # of objects whose members are rows, in what a file holds

_PATH_STEP = re.compile(r"\.([^.\[\]]+)|\[([0-9]+)\]")


def loads(data: bytes | str) -> Any:
    """Read standard JSON or the dialect; ProtocolError says where it stops being either."""
    special = (b'"$ref"', b'"@type"') if isinstance(data, bytes) else ('"$ref"', '"@type"')
    if special[0] not in data and special[1] not in data:  # type: ignore[operator]
        try:
            return msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # the reader below either accepts it or finds the position of the fault
    if isinstance(data, bytes):
        try:
            data = data.decode()
        except UnicodeDecodeError as error:
            raise ProtocolError(f"JSON text is not UTF-8 at byte {error.start}") from None
    value, references = read(data)
    return _Resolver(value).resolve(references) if references else value


def dumps(value: Any, *, pretty: bool = False, quote_keys: bool = False) -> bytes:
    """Write the dialect without blanks, or with tabs and line ends as upstream's files have them.

    `quote_keys` writes standard JSON instead: integer and object keys become strings.
    """
    parts: list[str] = []
    _Writer(parts, pretty=pretty, quote_keys=quote_keys).write(value, 0)
    return "".join(parts).encode()


def dumping(value: Any, *, pretty: bool = False) -> Generator[None, None, list[bytes]]:
    """`dumps` in steps, in pieces: a large table is written a few rows at a time."""
    parts: list[str] = []
    pieces: list[bytes] = []
    for _ in _Writer(parts, pretty=pretty, quote_keys=False).writing(value, 0):
        pieces.append("".join(parts).encode())
        parts.clear()
        yield
    return [*pieces, "".join(parts).encode()]


class _Resolver:
    """Replaces `{"$ref": path}` by the value at that path from the root.

    A target may not hold unresolved references and the size of all targets together is bounded, so
    a small text cannot stand for a huge or endless value.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._budget = REFERENCED_VALUES_MAX
        self._sizes: dict[int, int] = {}
        self._targets: dict[str, Any] = {}

    def resolve(self, references: list[Reference]) -> Any:
        # In the order of the text, because upstream refers only to what it wrote before.
        for container, key, reference in references:
            if container[key] is reference:  # and not replaced by a later member of that name
                container[key] = self._target(reference["$ref"])
        return self._root

    def _target(self, path: str) -> Any:
        if path not in self._targets:
            self._targets[path] = self._find(path)
        target = self._targets[path]
        # By the target itself: many paths may lead to the same one.
        size = self._sizes.get(id(target)) if isinstance(target, dict | list) else 1
        if size is None:
            size = self._sizes[id(target)] = self._size(target, path)
        self._budget -= size
        if self._budget < 0:
            raise ProtocolError("references stand for too much data")
        return target

    def _find(self, path: str) -> Any:
        if not path.startswith("$"):
            raise ProtocolError(f"reference {path[:64]!r} does not start at the root '$'")
        value, at = self._root, 1
        while at < len(path):
            step = _PATH_STEP.match(path, at)
            if step is None:
                raise ProtocolError(f"reference {path[:64]!r} is malformed")
            name, index = step.groups()
            try:
                if index is None and isinstance(value, dict):
                    value = value[name] if name in value else value[int(name)]
                else:
                    value = value[int(name if index is None else index)]
            except (KeyError, IndexError, TypeError, ValueError):
                raise ProtocolError(f"reference {path[:64]!r} leads nowhere") from None
            at = step.end()
        return value

    def _size(self, target: Any, path: str) -> int:
        count = 0
        pending = [target]
        while pending:
            value = pending.pop()
            count += 1
            if count > self._budget:
                raise ProtocolError("references stand for too much data")
            if isinstance(value, dict):
                if reference_path(value) is not None:
                    raise ProtocolError(f"reference {path[:64]!r} leads to another reference")
                pending.extend(value.values())
            elif isinstance(value, list):
                pending.extend(value)
        return count


class _Writer:
    def __init__(self, parts: list[str], *, pretty: bool, quote_keys: bool) -> None:
        self._parts = parts
        self._pretty = pretty
        self._quote_keys = quote_keys

    def write(self, value: Any, depth: int) -> None:
        if depth > DEPTH_MAX:
            raise ProtocolError(f"cannot write JSON nested more than {DEPTH_MAX} deep")
        if isinstance(value, ObjectKey):
            self._object(dict(value), depth)
        elif isinstance(value, dict):
            self._object(value, depth)
        elif isinstance(value, list | tuple):
            self._parts.append("[")
            for index, item in enumerate(value):
                if index:
                    self._parts.append(",")
                self.write(item, depth + 1)
            self._parts.append("]")
        else:
            self._parts.append(_scalar(value))

    def writing(self, value: Any, depth: int) -> Iterator[None]:
        """`write`, with a pause after some members of a table or of what has tables."""
        if not isinstance(value, dict) or depth > TABLE_DEPTH:
            self.write(value, depth)
            return
        self._parts.append("{")
        for index, (key, item) in enumerate(value.items()):
            if index:
                self._parts.append(",")
            self._key(key, depth)
            self._parts.append(":")
            yield from self.writing(item, depth + 1)
            if index % ROWS_PER_STEP == ROWS_PER_STEP - 1:
                yield
        if value:
            self._line(depth)
        self._parts.append("}")

    def _object(self, members: dict[Any, Any], depth: int) -> None:
        self._parts.append("{")
        for index, (key, value) in enumerate(members.items()):
            if index:
                self._parts.append(",")
            self._key(key, depth)
            self._parts.append(":")
            self.write(value, depth + 1)
        if members:
            self._line(depth)
        self._parts.append("}")

    def _key(self, key: Any, depth: int) -> None:
        if isinstance(key, str):
            self._line(depth + 1)
            self._parts.append(_scalar(key))
        elif self._quote_keys:
            self._line(depth + 1)
            self._parts.append(_scalar(dumps(key, quote_keys=True).decode()))
        elif isinstance(key, ObjectKey | int) and not isinstance(key, bool):
            # Compat: the serializer starts a new line only before keys that are strings.
            self.write(key, depth + 1)
        else:
            raise ProtocolError(f"cannot write a {type(key).__name__} as a JSON key")

    def _line(self, depth: int) -> None:
        if self._pretty:
            self._parts.append("\n" + "\t" * depth)


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if value is True or value is False:
        return "true" if value else "false"
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ProtocolError(f"JSON has no way to write {value!r}")
        return float.__repr__(value)
    if isinstance(value, str):
        try:
            return msgspec.json.encode(value).decode()
        except UnicodeEncodeError:
            raise ProtocolError("cannot write a string with half a surrogate pair") from None
    raise ProtocolError(f"cannot write a {type(value).__name__} as JSON")
