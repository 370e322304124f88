"""Values as YAML text: maps, lists and scalars in block style, enough for what commands print.

Invariant: any YAML reader, of 1.1 as well as 1.2, gives the same values back. So text is written
plainly only when neither would take it for something else, and in double quotes otherwise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./%@+-]*(?:[ ;,][A-Za-z0-9_./%@+-]+)*")
# What readers of 1.1 or 1.2 take for a boolean, nothing, or a number, in any case of letters.
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"})
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def dumps(value: object) -> str:
    """The whole document, with a line end."""
    return "\n".join(_block(value, "")) + "\n"


def _block(value: object, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _entry(f"{indent}{_scalar(str(key))}:", item, indent)
    elif isinstance(value, list | tuple) and value:
        for item in value:
            if isinstance(item, Mapping | list | tuple) and item:
                first, *rest = _block(item, indent + "  ")
                yield f"{indent}- {first.lstrip(' ')}"
                yield from rest
            else:
                yield f"{indent}- {_scalar(item)}"
    else:
        yield f"{indent}{_scalar(value)}"


def _entry(head: str, item: object, indent: str) -> Iterator[str]:
    if isinstance(item, Mapping | list | tuple) and item:
        yield head
        yield from _block(item, indent + "  ")
    else:
        yield f"{head} {_scalar(item)}"


def _scalar(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        if math.isfinite(value):
            # 1e+20 is text to a reader of 1.1; with a point it is a number to all.
            text = repr(value)
            mantissa, e, exponent = text.partition("e")
            return text if not e or "." in mantissa else f"{mantissa}.0e{exponent}"
        return ".nan" if math.isnan(value) else (".inf" if value > 0 else "-.inf")
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, list | tuple):
        return "[]"
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return '"' + "".join(map(_quoted, text)) + '"'


def _quoted(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character.isprintable():
        return character
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
