"""The reader of the JSON dialect, as the law has it; `wire.fastjson` says what the dialect is.

Reading is iterative and takes linear time; depth is bounded. References are found, not resolved.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import msgspec

from cosmodrome.errors import ProtocolError

DEPTH_MAX = 100
DIGITS_MAX = 400  # of one number; far beyond a Java long, far below Python's own limit
BAD_OBJECT_KEY = "an object that is a key has a member whose name is not a string"

Reference = tuple[dict[Any, Any] | list[Any], Any, dict[Any, Any]]  # where it stands, and itself

_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_LITERAL = re.compile(r"true|false|null")
_LITERALS: Final = {"true": True, "false": False, "null": None}


class ObjectKey(tuple[tuple[str, Any], ...]):
    """An object that is a map key: its members as pairs, sorted by name."""

    __slots__ = ()

    @classmethod
    def of(cls, members: Mapping[str, Any]) -> ObjectKey:
        return cls(sorted((name, _hashable(value)) for name, value in members.items()))


def read(text: str) -> tuple[Any, list[Reference]]:
    """The value, and the references in it in the order of the text; ProtocolError says where the
    text stops being the dialect."""
    return Reader(text).read()


class Reader:
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
        self._references: list[Reference] = []

    def read(self) -> tuple[Any, list[Reference]]:
        value = self._read_value()
        self._skip()
        if self._at != len(self._text):
            self._fail("there is more text behind the value")
        return value, self._references

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
            self._note(container, len(container), value)
            container.append(value)
            return self._after_item(container, "]")
        key = self._keys[-1]
        if key != "@type":
            self._note(container, key, value)
            container[key] = value
        return self._after_item(container, "}")

    def _note(self, container: dict[Any, Any] | list[Any], key: Any, value: Any) -> None:
        """Remember a reference; what is within a key stays as it is."""
        if type(value) is dict and reference_path(value) is not None and True not in self._as_key:
            self._references.append((container, key, value))

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
                self._fail(BAD_OBJECT_KEY)
            try:
                return self._finish_key(ObjectKey.of(container))
            except TypeError:  # names that have no order, further within
                self._fail(BAD_OBJECT_KEY)
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


def reference_path(value: dict[Any, Any]) -> str | None:
    """Where an object refers to, None when it is no reference."""
    if len(value) == 1:
        path = value.get("$ref")
        if isinstance(path, str):
            return path
    return None


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return ObjectKey.of(value)
    if isinstance(value, list):
        return tuple(_hashable(item) for item in value)
    return value
