"""The JSON dialect of upstream's serializer, and nothing else.

Besides standard JSON it has three habits: integer map keys without quotes `{0:5}`, whole objects
as map keys `{{"topic":"T"}:5}`, and references to a value written earlier
`{"$ref":"$.table.a"}`. In Python

- a bare integer key is an `int`, a quoted one a `str` (so `{0:1}` and `{"0":1}` differ),
- an object key is an `ObjectKey`: a tuple of (name, value) pairs sorted by name, whose own
  nested objects are `ObjectKey`s and whose arrays are tuples,
- a reference is the referenced value itself,
- members named `@type` are dropped: a peer does not choose our types.

Reading is iterative and takes linear time; depth and the growth through references are bounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn

import msgspec

from cosmodrome.errors import ProtocolError

DEPTH_MAX = 100
DIGITS_MAX = 400  # of one number; far beyond a Java long, far below Python's own limit
REFERENCED_VALUES_MAX = 1_000_000  # values that all references of one text may stand for

_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_LITERAL = re.compile(r"true|false|null")
_LITERALS: Final = {"true": True, "false": False, "null": None}
_PATH_STEP = re.compile(r"\.([^.\[\]]+)|\[([0-9]+)\]")


class ObjectKey(tuple[tuple[str, Any], ...]):
    """An object that is a map key: its members as pairs, sorted by name."""

    __slots__ = ()

    @classmethod
    def of(cls, members: Mapping[str, Any]) -> ObjectKey:
        return cls(sorted((name, _hashable(value)) for name, value in members.items()))


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
    return _Reader(data).read()


def dumps(value: Any, *, pretty: bool = False, quote_keys: bool = False) -> bytes:
    """Write the dialect without blanks, or with tabs and line ends as upstream's files have them.

    `quote_keys` writes standard JSON instead: integer and object keys become strings.
    """
    parts: list[str] = []
    _Writer(parts, pretty=pretty, quote_keys=quote_keys).write(value, 0)
    return "".join(parts).encode()


class _Reader:
    """Iterative: `_open` holds the containers around the current value.

    A container that is being read as a map key is remembered in `_as_key`; when it closes it
    becomes an ObjectKey instead of a value.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._open: list[dict[Any, Any] | list[Any]] = []
        self._keys: list[Any] = []  # the pending key of each open dict, None for lists
        self._as_key: list[bool] = []
        self._has_references = False

    def read(self) -> Any:
        value = self._read_value()
        self._skip()
        if self._at != len(self._text):
            self._fail("there is more text behind the value")
        return _Resolver(value).resolve() if self._has_references else value

    def _read_value(self) -> Any:
        while True:
            value = self._begin_value()
            if value is _OPENED:
                continue
            # A complete value: store it, then close as many containers as end here.
            while True:
                if not self._open:
                    return value
                closed = self._store(value)
                if closed is _OPENED:
                    break
                value = closed

    def _begin_value(self) -> Any:
        """A scalar or an empty container; _OPENED when a container waits for its members."""
        self._skip()
        char = self._text[self._at : self._at + 1]
        if char == "{":
            self._at += 1
            self._skip()
            if self._text.startswith("}", self._at):
                self._at += 1
                return {}
            self._push({}, as_key=False)
            return self._read_key()
        if char == "[":
            self._at += 1
            self._skip()
            if self._text.startswith("]", self._at):
                self._at += 1
                return []
            self._push([], as_key=False)
            return _OPENED
        if char == '"':
            return self._string()
        if match := _LITERAL.match(self._text, self._at):
            self._at = match.end()
            return _LITERALS[match.group()]
        return self._number()

    def _store(self, value: Any) -> Any:
        """Put a value into its container; the container itself if that is now complete."""
        container = self._open[-1]
        if isinstance(container, list):
            container.append(value)
            return self._after_item(container, "]")
        key = self._keys[-1]
        if key == "$ref" and isinstance(value, str):
            self._has_references = True
        if key != "@type":
            container[key] = value
        return self._after_item(container, "}")

    def _after_item(self, container: dict[Any, Any] | list[Any], end: str) -> Any:
        self._skip()
        if self._text.startswith(",", self._at):
            self._at += 1
            return _OPENED if end == "]" else self._read_key()
        if not self._text.startswith(end, self._at):
            self._fail(f"expected ',' or '{end}'")
        self._at += 1
        self._open.pop()
        self._keys.pop()
        if self._as_key.pop():
            assert isinstance(container, dict)
            if not all(isinstance(name, str) for name in container):
                self._fail("an object that is a key has a member whose name is not a string")
            return self._finish_key(ObjectKey.of(container))
        return container

    def _read_key(self) -> Any:
        """The key of the innermost dict and its colon; always leaves a value to be read."""
        while True:
            self._skip()
            char = self._text[self._at : self._at + 1]
            if char == '"':
                return self._finish_key(self._string())
            if char != "{":
                return self._finish_key(self._integer_key())
            self._at += 1
            self._skip()
            if self._text.startswith("}", self._at):
                self._at += 1
                return self._finish_key(ObjectKey())
            self._push({}, as_key=True)

    def _finish_key(self, key: Any) -> Any:
        self._skip()
        if not self._text.startswith(":", self._at):
            self._fail("expected ':' after a key")
        self._at += 1
        self._keys[-1] = key
        return _OPENED

    def _push(self, container: dict[Any, Any] | list[Any], *, as_key: bool) -> None:
        if len(self._open) >= DEPTH_MAX:
            self._fail(f"nested more than {DEPTH_MAX} deep")
        self._open.append(container)
        self._keys.append(None)
        self._as_key.append(as_key)

    def _string(self) -> str:
        match = _STRING.match(self._text, self._at)
        if match is None:
            self._fail("a string has no end")
        try:
            # A lone surrogate cannot be encoded again, so it is a fault here too.
            text = msgspec.json.decode(match.group().encode(), type=str)
        except (msgspec.DecodeError, UnicodeError):
            self._fail("a string has a bad escape or a control character")
        self._at = match.end()
        return text

    def _integer_key(self) -> int:
        match = _NUMBER.match(self._text, self._at)
        if match is None or match.group(1) or match.group(2):
            self._fail("expected a key: a string, an integer or an object")
        return int(self._digits(match))

    def _number(self) -> int | float:
        match = _NUMBER.match(self._text, self._at)
        if match is None:
            self._fail("expected a value" if self._at < len(self._text) else "the text ends early")
        if not (match.group(1) or match.group(2)):
            return int(self._digits(match))
        number = float(self._digits(match))
        if math.isinf(number):
            self._fail("a number is out of range")
        return number

    def _digits(self, match: re.Match[str]) -> str:
        if len(match.group()) > DIGITS_MAX:
            self._fail(f"a number has more than {DIGITS_MAX} characters")
        self._at = match.end()
        return match.group()

    def _skip(self) -> None:
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        self._at = match.end()

    def _fail(self, why: str) -> NoReturn:
        raise ProtocolError(f"not JSON at character {self._at}: {why}")


_OPENED: Final = object()


class _Resolver:
    """Replaces `{"$ref": path}` by the value at that path from the root.

    A target may not hold unresolved references and the size of all targets together is bounded, so
    a small text cannot stand for a huge or endless value.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._budget = REFERENCED_VALUES_MAX
        self._sizes: dict[str, int] = {}
        self._targets: dict[str, Any] = {}

    def resolve(self) -> Any:
        # In the order of the text, because upstream refers only to what it wrote before.
        places: list[tuple[Any, Any, str]] = []
        walks = [(self._root, _members(self._root))]
        while walks:
            container, members = walks[-1]
            for key, value in members:
                path = _reference(value)
                if path is not None:
                    places.append((container, key, path))
                elif isinstance(value, dict | list):
                    walks.append((value, _members(value)))
                    break
            else:
                walks.pop()
        for container, key, path in places:
            container[key] = self._target(path)
        return self._root

    def _target(self, path: str) -> Any:
        if path not in self._sizes:
            self._targets[path] = target = self._find(path)
            self._sizes[path] = self._size(target, path)
        self._budget -= self._sizes[path]
        if self._budget < 0:
            raise ProtocolError("references stand for too much data")
        return self._targets[path]

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
            if _reference(value) is not None:
                raise ProtocolError(f"reference {path[:64]!r} leads to another reference")
            if isinstance(value, dict):
                pending.extend(value.values())
            elif isinstance(value, list):
                pending.extend(value)
        return count


def _members(container: Any) -> Iterator[tuple[Any, Any]]:
    return iter(container.items() if isinstance(container, dict) else enumerate(container))


def _reference(value: Any) -> str | None:
    if type(value) is dict and len(value) == 1:
        path = value.get("$ref")
        if isinstance(path, str):
            return path
    return None


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


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return ObjectKey.of(value)
    if isinstance(value, list):
        return tuple(_hashable(item) for item in value)
    return value
