"""Records as Arrow columns, by the twin that runs: `native`, else `pure`."""

from __future__ import annotations

from cosmodrome.layout import (
    STOP_BLANK,
    STOP_CORRUPT,
    STOP_EMPTY,
    STOP_END,
    STOP_FULL,
    STOP_PARTIAL,
)
from cosmodrome.speed.arrow.pure import (
    KINDS,
    Buffer,
    Buffers,
    ColumnBuilder,
    Taken,
)
from cosmodrome.speed.choice import prefer_compiled

__all__ = [
    "KINDS",
    "STOP_BLANK",
    "STOP_CORRUPT",
    "STOP_EMPTY",
    "STOP_END",
    "STOP_FULL",
    "STOP_PARTIAL",
    "Buffer",
    "Buffers",
    "ColumnBuilder",
    "Taken",
]

prefer_compiled(__name__, globals())
