"""Reads typed values out of the text options that Spark hands over.

Names are case-insensitive because Spark's are. An unknown name is refused, with the nearest one.
"""

from __future__ import annotations

import datetime
import difflib
from collections.abc import Callable, Iterable, Mapping

from cosmodrome.errors import ConfigError, Refused

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
_SUFFIXES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
WHOLE_MAX = (1 << 63) - 1


class OptionValues:
    """The options of one reader or writer; an empty value counts as absent."""

    def __init__(self, options: Mapping[str, str], known: Iterable[str]) -> None:
        names = {name.lower(): name for name in known}
        self._values: dict[str, str] = {}
        for key, value in options.items():
            name = names.get(key.lower())
            if name is None:
                raise ConfigError(f"unknown option {key!r}{_nearest(key, names)}")
            if value is not None and value.strip():
                self._values[name] = value.strip()

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str) -> str | None:
        return self._values.get(name)

    def words(self, name: str) -> tuple[str, ...]:
        """A comma list without empty parts and repetitions."""
        parts = (part.strip() for part in self._values.get(name, "").split(","))
        return tuple(dict.fromkeys(part for part in parts if part))

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if value.lower() in _TRUE:
            return True
        if value.lower() in _FALSE:
            return False
        raise ConfigError(f"{name}={value!r}: write true or false")

    def whole(self, name: str, default: int, *, least: int = 1, most: int = WHOLE_MAX) -> int:
        value = self.optional_whole(name, least=least, most=most)
        return default if value is None else value

    def optional_whole(self, name: str, *, least: int = 1, most: int = WHOLE_MAX) -> int | None:
        text = self._values.get(name)
        if text is None:
            return None
        try:
            value = int(text)
        except ValueError:
            raise ConfigError(f"{name}={text!r}: write a whole number") from None
        return _within(name, value, least, most)

    def size(self, name: str, default: int, *, least: int = 1, most: int = WHOLE_MAX) -> int:
        """Bytes, also as `64k`, `16m`, `1g` (a trailing b or ib is allowed)."""
        value = self.optional_size(name, least=least, most=most)
        return default if value is None else value

    def optional_size(self, name: str, *, least: int = 1, most: int = WHOLE_MAX) -> int | None:
        text = self._values.get(name)
        if text is None:
            return None
        digits = text.lower().removesuffix("b").removesuffix("i").strip()
        unit = _SUFFIXES.get(digits[-1:], 1)
        number = digits[:-1].strip() if unit > 1 else digits
        if not number.isdecimal():
            raise ConfigError(f"{name}={text!r}: write bytes, for example 1048576 or 1m")
        return _within(name, int(number) * unit, least, most)

    def moment_ms(self, name: str) -> int | None:
        """ISO 8601 (UTC when it names no zone) or milliseconds since 1970."""
        text = self._values.get(name)
        if text is None:
            return None
        if text.isdecimal():
            return _within(name, int(text), 0, WHOLE_MAX)
        try:
            moment = datetime.datetime.fromisoformat(text)
        except ValueError:
            raise ConfigError(
                f"{name}={text!r}: write ISO 8601, for example 2025-03-01T12:00:00Z,"
                " or milliseconds since 1970"
            ) from None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=datetime.UTC)
        since = moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
        # Rounded up: the first message at or after the moment has a whole millisecond.
        return _within(name, -(-since // datetime.timedelta(milliseconds=1)), 0, WHOLE_MAX)

    def choice(self, name: str, choices: Iterable[str], default: str) -> str:
        """One of `choices`, whatever its case."""
        text = self._values.get(name)
        if text is None:
            return default
        known = {choice.lower(): choice for choice in choices}
        if text.lower() not in known:
            raise ConfigError(f"{name}={text!r}: write one of {', '.join(known.values())}")
        return known[text.lower()]


def require_name(check: Callable[[str], None], name: str, what: str = "") -> None:
    """ConfigError when `check` (of `wire.names`) refuses a name; `what` says where it came from."""
    try:
        check(name)
    except Refused as error:
        raise ConfigError(f"{what}: {error.remark}" if what else error.remark) from None


def _within(name: str, value: int, least: int, most: int) -> int:
    if value < least:
        raise ConfigError(f"{name}={value}: it must be at least {least}")
    if value > most:
        raise ConfigError(f"{name}={value}: it must be at most {most}")
    return value


def _nearest(key: str, names: Mapping[str, str]) -> str:
    close = difflib.get_close_matches(key.lower(), names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {names[close[0]]}?"
    return f"; known options: {', '.join(sorted(names.values()))}"
