"""Hides secrets in what commands print: values whose names sound like secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping

_WORDS = r"(?:secret|passw|token|credential|private|access[_-]?key|api[_-]?key|signature)"
SECRET = re.compile(_WORDS, re.IGNORECASE)
MASK = "***"
_PAIR = re.compile(
    rf"(?i)([\w.\-\"']*{_WORDS}[\w.\-]*[\"']?\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|[^\s,;&}}]+)"
)
_IN_ADDRESS = re.compile(r"(://[^\s:/@]*:)[^\s/@]+@")


def masked(value: object) -> object:
    """The same value without secrets, however deep they are."""
    if isinstance(value, Mapping):
        return {
            name: MASK if SECRET.search(str(name)) and _is_value(item) else masked(item)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [masked(item) for item in value]
    if isinstance(value, str):
        return masked_text(value)
    return value


def masked_text(text: str) -> str:
    """`secretKey=…`, `"password": "…"` and their like, in any text."""
    return _IN_ADDRESS.sub(rf"\1{MASK}@", _PAIR.sub(lambda found: found[1] + MASK, text))


def _is_value(item: object) -> bool:
    return item not in (None, "", True, False) and not isinstance(item, Mapping | list)
