"""Java's properties text, the form of every settings body (25, 26, 318, 319).

Read as Java reads it: comments begin with # or !, a key ends at the first = : or blank, a
backslash escapes (n t r f uXXXX, or the next character itself), and one at the end of a line joins
the next line. Written as upstream writes it, `key=value` lines in UTF-8, escaping only what would
otherwise be read differently.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from cosmodrome.errors import ProtocolError

_BLANK = " \t\f"
_LINE_END = re.compile(r"\r\n|\n|\r")
_PAIR = re.compile(
    r"([^\\=: \t\f]*(?:\\.[^\\=: \t\f]*)*)[ \t\f]*[=:]?[ \t\f]*(.*)",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.?)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}

_KEY_SPECIAL = re.compile(r"[\\=:#! \t\f\r\n]")
_VALUE_SPECIAL = re.compile(r"[\\\r\n]|^[ \t\f]")
_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\f": "\\f"}


def loads(data: bytes | str) -> dict[str, str]:
    """Keys and values in the order of the text; a repeated key keeps its last value."""
    if isinstance(data, bytes):
        try:
            data = data.decode()
        except UnicodeDecodeError as error:
            raise ProtocolError(f"settings are not UTF-8 at byte {error.start}") from None
    values: dict[str, str] = {}
    for number, line in _logical_lines(data):
        pair = _PAIR.fullmatch(line)
        assert pair is not None
        key, value = pair.groups()
        values[_unescape(key, number)] = _unescape(value, number)
    return values


def dumps(values: Mapping[str, str]) -> bytes:
    lines = (
        f"{_KEY_SPECIAL.sub(_escape, key)}={_VALUE_SPECIAL.sub(_escape, value)}\n"
        for key, value in values.items()
    )
    return "".join(lines).encode()


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines without comments, joined where they continue, with the number of their first line."""
    parts: list[str] = []
    first = 0
    for number, natural in enumerate(_LINE_END.split(text), start=1):
        line = natural.lstrip(_BLANK)
        if not parts:
            first = number
            if not line or line[0] in "#!":
                continue
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2:
            parts.append(line[:-1])
            continue
        parts.append(line)
        yield first, "".join(parts)
        parts = []
    if parts:
        yield first, "".join(parts)


def _unescape(text: str, line: int) -> str:
    if "\\" not in text:
        return text

    def replace(match: re.Match[str]) -> str:
        what = match.group(1)
        if what == "u":
            raise ProtocolError(f"settings line {line}: \\u needs four hexadecimal digits")
        if len(what) == 5:
            return chr(int(what[1:], 16))
        return _ESCAPED.get(what, what)

    plain = _ESCAPE.sub(replace, text)
    try:
        # Characters beyond 16 bits are escaped as two halves.
        return plain.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise ProtocolError(f"settings line {line}: \\u leaves half a character") from None


def _escape(match: re.Match[str]) -> str:
    char = match.group()
    return _ESCAPES.get(char, "\\" + char)
