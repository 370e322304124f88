"""SQL92 message filters: the text of a condition becomes a test of a message's properties.

    text ─► tokens ─► operands with static kinds ─► closures

A message matches when the condition is True; unknown (None) is no match. A test never raises: a
value that cannot be converted means "no match" for the whole expression, whatever stands
around it.
"""

from __future__ import annotations

from collections import OrderedDict

from cosmodrome.broker.sql92.operands import Properties, Test
from cosmodrome.broker.sql92.parser import parse
from cosmodrome.broker.sql92.tokens import Sql92Error

__all__ = ["CHARACTERS_MAX", "Expression", "Sql92Error", "compile_expression"]

CHARACTERS_MAX = 32_767
CACHED_EXPRESSIONS_MAX = 1024
CACHED_CHARACTERS_MAX = 1 << 20


class Expression:
    """A condition that was read once and tests any number of messages; one test takes at most
    `comparisons`."""

    __slots__ = ("_test", "comparisons", "text")

    def __init__(self, text: str, test: Test, comparisons: int) -> None:
        self.text = text
        self._test = test
        self.comparisons = comparisons

    def matches(self, properties: Properties) -> bool:
        try:
            return self._test(properties) is True
        except ValueError:
            return False  # a value that is no number of the kind it is compared with


def compile_expression(text: str) -> Expression:
    """The expression of a text, remembered; Sql92Error when there is none."""
    known = _memo.get(text)
    if known is None:
        try:
            known = _read(text)
        except Sql92Error as error:
            known = (error.position, error.text)
        _memo.put(text, known)
    if isinstance(known, Expression):
        return known
    position, why = known
    raise Sql92Error(position, why, text)


def _read(text: str) -> Expression:
    if len(text) > CHARACTERS_MAX:
        raise Sql92Error(
            CHARACTERS_MAX,
            f"the expression has {len(text)} characters; {CHARACTERS_MAX} is the limit",
            text,
        )
    return Expression(text, *parse(text))


class _Memo:
    """The outcomes of the last readings, bounded in number and in text."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Expression | tuple[int, str]] = OrderedDict()
        self._characters = 0

    def get(self, text: str) -> Expression | tuple[int, str] | None:
        found = self._known.get(text)
        if found is not None:
            self._known.move_to_end(text)
        return found

    def put(self, text: str, outcome: Expression | tuple[int, str]) -> None:
        if len(text) > CHARACTERS_MAX:
            return
        self._known[text] = outcome
        self._characters += len(text)
        while len(self._known) > CACHED_EXPRESSIONS_MAX or self._characters > CACHED_CHARACTERS_MAX:
            oldest, _ = self._known.popitem(last=False)
            self._characters -= len(oldest)


_memo = _Memo()
