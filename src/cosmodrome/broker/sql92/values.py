"""Numbers and truth values of SQL92 filters: how texts become them and how they compare.

Compat: all of it is Java's, because that is where the filters of existing consumers were tried:
an integer constant that fits 32 bits compares with 32-bit integers only, decimals are doubles
with Java's spelling, and doubles have a total order (NaN is above everything and equals
itself, −0.0 is below 0.0). A text that is no such number raises ValueError.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re

_INTEGER = re.compile(r"[+-]?\d+\Z")
_DOUBLE = re.compile(
    r"([+-]?)(?:(NaN|Infinity)"
    r"|((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)[fFdD]?"
    r"|(0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)[fFdD]?)\Z"
)
_BLANKS = "".join(map(chr, range(33)))  # what Java trims


class Width(enum.Enum):
    INT32 = 32
    INT64 = 64
    DOUBLE = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """A constant; its width decides how a text it is compared with is read."""

    value: int | float
    width: Width

    def negated(self) -> Number:
        return Number(-self.value, self.width)


def number_of(literal: str) -> tuple[Number | None, str]:
    """The number that an expression spells, or None and what is wrong with it."""
    digits = literal.rstrip("lL")
    if digits.isdigit():
        if digits[0] == "0" and len(digits) > 1:
            return None, f"{literal[:32]} begins with 0; write the number without it"
        # Longer ones are too large anyway, and reading them would take long.
        value = int(digits) if len(digits) < 20 else 1 << 64
        if value >= 1 << 63:
            return None, f"{literal[:32]} is too large; integers have at most 64 bits"
        return Number(value, Width.INT32 if value < 1 << 31 else Width.INT64), ""
    double = float(literal)
    if math.isinf(double):
        return None, f"{literal[:32]} is too large for a double"
    if double == 0 and re.search("[1-9]", re.split("[eE]", literal)[0]):
        return None, f"{literal[:32]} is too small for a double"
    return Number(double, Width.DOUBLE), ""


def to_number(text: str, width: Width) -> int | float:
    """The number of a property's text, of exactly this width."""
    if width is Width.DOUBLE:
        return to_double(text)
    if _INTEGER.match(text) is None:
        raise ValueError(f"{text[:32]!r} is not an integer")
    value = int(text)
    limit = 1 << (width.value - 1)
    if not -limit <= value < limit:
        raise ValueError(f"{text[:32]!r} does not fit {width.value} bits")
    return value


def to_double(text: str) -> float:
    match = _DOUBLE.match(text.strip(_BLANKS))
    if match is None:
        raise ValueError(f"{text[:32]!r} is not a number")
    sign, word, decimal, hexadecimal = match.groups()
    if word is not None:
        value = math.nan if word == "NaN" else math.inf
    elif decimal is not None:
        value = float(decimal)
    else:
        try:
            value = float.fromhex(hexadecimal)
        except OverflowError:
            value = math.inf
    return -value if sign == "-" else value


def compare_integers(one: int, other: int) -> int:
    return (one > other) - (one < other)


def compare_doubles(one: float, other: float) -> int:
    if one < other:
        return -1
    if one > other:
        return 1
    if one == other and one != 0:
        return 0
    return compare_integers(_rank(one), _rank(other))


def is_true(text: str) -> bool:
    return text.lower() == "true"


def _rank(value: float) -> int:
    """Order among values that < and > do not tell apart: −0.0, 0.0, NaN beside anything."""
    if math.isnan(value):
        return 2
    return 0 if math.copysign(1, value) < 0 and value == 0 else 1
