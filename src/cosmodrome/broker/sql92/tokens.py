"""The words of an SQL92 filter, each with its position, and the error that points at one."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

from cosmodrome.errors import CosmodromeError

WORDS_MAX = 1_024  # of one expression: 256 comparisons of a property with a constant
_EXCERPT = 40  # characters shown on either side of an error


class Sql92Error(CosmodromeError):
    """An expression that cannot be used: `position` counts from 0, `text` says why."""

    def __init__(self, position: int, text: str, expression: str) -> None:
        begin = max(0, position - _EXCERPT)
        shown = re.sub(r"\s", " ", expression[begin : position + _EXCERPT])
        lead = "... " if begin else ""
        caret = " " * (len(lead) + position - begin) + "^"
        super().__init__(f"character {position + 1}: {text}\n{lead}{shown}\n{caret}")
        self.position = position
        self.text = text


class Kind(enum.Enum):
    NAME = "a property"
    STRING = "a text"
    NUMBER = "a number"
    SYMBOL = "a symbol"
    WORD = "a keyword"
    END = "the end"


class Token(NamedTuple):
    kind: Kind
    text: str  # keywords in capitals
    at: int

    def __str__(self) -> str:
        return "the end of the expression" if self.kind is Kind.END else self.text[:32]


TEXT_WORDS = frozenset(("CONTAINS", "STARTSWITH", "ENDSWITH"))
_WORDS = TEXT_WORDS.union(("OR", "AND", "NOT", "IS", "NULL", "BETWEEN", "IN", "TRUE", "FALSE"))
_TOKEN = re.compile(
    r"""(?P<skip>[ \t\n\r\f]+|--[^\r\n]*|/\*.*?\*/)
      | (?P<number>(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?
                  |[0-9]+[eE][+-]?[0-9]+
                  |[0-9]+[lL]?)
      | (?P<string>'(?:[^']|'')*')
      | (?P<name>[A-Za-z_$][A-Za-z0-9_$]*)
      | (?P<symbol><>|>=|<=|[=<>(),+-])""",
    re.VERBOSE | re.DOTALL,
)
_NAME_CHARACTER = re.compile(r"[A-Za-z0-9_$]")
_HINTS = {
    "!": "use <> for 'not equal'",
    '"': "write texts in single quotes",
    "'": "the text has no closing quote; a quote inside a text is written twice",
    "/": "arithmetic is not part of the language, and a comment ends with */",
    "*": "arithmetic is not part of the language; compare properties with constants",
    "%": "arithmetic is not part of the language; compare properties with constants",
    ";": "write one expression without a semicolon",
    "&": "write AND",
    "|": "write OR",
}


def tokens_of(text: str) -> list[Token]:
    found: list[Token] = []
    at = 0
    while at < len(text):
        if len(found) >= WORDS_MAX:
            why = f"the expression has more than {WORDS_MAX} words and signs; test less in one"
            raise Sql92Error(at, why, text)
        match = _TOKEN.match(text, at)
        if match is None:
            sign = text[at]
            hint = _HINTS.get(sign, "names consist of the letters a to z, digits, _ and $")
            raise Sql92Error(at, f"unexpected {sign!r}; {hint}", text)
        kind, word, end = match.lastgroup, match.group(), match.end()
        if kind == "number":
            if _NAME_CHARACTER.match(text, end):
                raise Sql92Error(at, f"{text[at : end + 1][:32]!r} is not a number", text)
            found.append(Token(Kind.NUMBER, word, at))
        elif kind == "string":
            found.append(Token(Kind.STRING, word, at))
        elif kind == "symbol":
            found.append(Token(Kind.SYMBOL, word, at))
        elif kind == "name":
            capitals = word.upper()
            if capitals in _WORDS:
                # A property may bear the name of an operator of 5.x: its spelling is kept.
                kept = word if capitals in TEXT_WORDS else capitals
                found.append(Token(Kind.WORD, kept, at))
            else:
                found.append(Token(Kind.NAME, word, at))
        at = end
    found.append(Token(Kind.END, "", len(text)))
    return found
