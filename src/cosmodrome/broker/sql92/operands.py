"""The parts of an SQL92 filter as values: what kind each has, and the tests made of them.

Property values are text, so the kind of every operand is known when the expression is read, and
the conversion that a comparison needs is chosen then, not per message. A test answers True,
False or None (unknown), or raises ValueError for a value that cannot be converted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cosmodrome.broker.sql92.values import (
    Number,
    Width,
    compare_doubles,
    compare_integers,
    is_true,
    to_double,
    to_number,
)

Properties = Mapping[str, str]
Test = Callable[[Properties], bool | None]
Value = str | bool | int | float | None


class Operand:
    """A part of an expression: what kind of value it has, and how to get it."""

    __slots__ = ("at", "constant", "depth", "get", "kind", "name", "number")

    def __init__(
        self,
        kind: type,
        get: Callable[[Properties], Value],
        at: int,
        *,
        constant: bool = False,
        name: str | None = None,
        number: Number | None = None,
        depth: int = 0,
    ) -> None:
        self.kind = kind  # str, bool, int (any number) or NoneType (always unknown)
        self.get = get
        self.at = at
        self.constant = constant  # a literal; a negated one does not count
        self.name = name  # of a property
        self.number = number
        self.depth = depth


NOTHING = type(None)
ORDERINGS: dict[str, Callable[[int], bool]] = {
    ">": lambda order: order > 0,
    ">=": lambda order: order >= 0,
    "<": lambda order: order < 0,
    "<=": lambda order: order <= 0,
}
TEXT_TESTS: dict[str, Callable[[str, str], bool]] = {
    "CONTAINS": str.__contains__,
    "STARTSWITH": str.startswith,
    "ENDSWITH": str.endswith,
}


def unknown(_: Properties) -> None:
    return None


def truth(test: Test, at: int, depth: int) -> Operand:
    return Operand(bool, test, at, depth=depth)


def number_operand(number: Number, at: int, *, constant: bool) -> Operand:
    value = number.value
    return Operand(int, lambda _: value, at, constant=constant, number=number)


def negative(operand: Operand, at: int) -> Operand:
    if operand.number is not None:
        return number_operand(operand.number.negated(), at, constant=False)
    get = operand.get

    def nothing(properties: Properties) -> None:
        """The negative of a text or a condition is unknown, but its errors count."""
        get(properties)

    return Operand(NOTHING, nothing, at, depth=operand.depth + 1)


def all_of(tests: Sequence[Test]) -> Test:
    def test(properties: Properties) -> bool | None:
        outcome: bool | None = True
        for one in tests:
            value = one(properties)
            if value is False:
                return False
            if value is None:
                outcome = None
        return outcome

    return test


def any_of(tests: Sequence[Test]) -> Test:
    def test(properties: Properties) -> bool | None:
        outcome: bool | None = False
        for one in tests:
            value = one(properties)
            if value is True:
                return True
            if value is None:
                outcome = None
        return outcome

    return test


def negation(inner: Test) -> Test:
    def test(properties: Properties) -> bool | None:
        value = inner(properties)
        return None if value is None else not value

    return test


def is_set(name: str) -> Test:
    """A property alone: true when its value is the word true.

    4.9.7 casts only values that are truth values already, which no property is: there a
    property alone never matches.
    """

    def test(properties: Properties) -> bool | None:
        value = properties.get(name)
        return None if value is None else is_true(value)

    return test


def is_null(operand: Operand, *, negated: bool) -> Test:
    get = operand.get
    return lambda properties: (get(properties) is None) is not negated


def is_in(name: str, texts: frozenset[str], *, negated: bool) -> Test:
    def test(properties: Properties) -> bool | None:
        value = properties.get(name)
        return None if value is None else (value in texts) is not negated

    return test


def text_test(name: str, word: str, part: str, *, negated: bool) -> Test:
    if not part:
        return lambda _: False  # Compat: 5.x lets the empty text match nothing, also negated
    check = TEXT_TESTS[word]

    def test(properties: Properties) -> bool:
        value = properties.get(name)
        return value is not None and check(value, part) is not negated

    return test


def equals(left: Operand, right: Operand) -> Test:
    get_left, get_right, compare = left.get, right.get, comparison(left, right)

    def test(properties: Properties) -> bool | None:
        one, other = get_left(properties), get_right(properties)
        if one is None:
            return True if other is None else None
        return other is not None and compare(one, other) == 0

    return test


def ordered_test(left: Operand, right: Operand, accept: Callable[[int], bool]) -> Test:
    get_left, get_right = left.get, right.get
    texts = left.kind is str and right.kind is str
    compare: Callable[..., int] = _compare_as_doubles if texts else comparison(left, right)

    def test(properties: Properties) -> bool | None:
        one = get_left(properties)
        if one is None:
            return None
        other = get_right(properties)
        return None if other is None else accept(compare(one, other))

    return test


def comparison(left: Operand, right: Operand) -> Callable[..., int]:
    """How two values of these kinds compare, a text being converted to the other's kind."""
    if left.number is not None and right.number is not None:
        if Width.DOUBLE in (left.number.width, right.number.width):
            return lambda one, other: compare_doubles(float(one), float(other))
        return compare_integers
    if left.number is not None and right.kind is str:
        convert, compare = _conversion(left.number)
        return lambda one, other: compare(one, convert(other))
    if right.number is not None and left.kind is str:
        convert, compare = _conversion(right.number)
        return lambda one, other: compare(convert(one), other)
    if left.kind is bool and right.kind is str:
        return lambda one, other: int(one is not is_true(other))
    if right.kind is bool and left.kind is str:
        return lambda one, other: int(is_true(one) is not other)
    if left.kind is right.kind:
        return lambda one, other: int(one != other)
    return lambda one, other: -1  # a number and a truth value are never equal


def _conversion(number: Number) -> tuple[Callable[[str], float], Callable[..., int]]:
    width = number.width
    compare = compare_doubles if width is Width.DOUBLE else compare_integers
    return lambda text: to_number(text, width), compare


def _compare_as_doubles(one: str, other: str) -> int:
    return compare_doubles(to_double(one), to_double(other))
