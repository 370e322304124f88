"""Records as Arrow columns, by the twin that runs: compiled `arrow`, else `arrow_pure`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cosmodrome.speed import FLAVOUR
from cosmodrome.speed.arrow_pure import (
    KINDS,
    STOP_BLANK,
    STOP_CORRUPT,
    STOP_EMPTY,
    STOP_END,
    STOP_FULL,
    STOP_PARTIAL,
    Buffer,
    Buffers,
    Taken,
)

if TYPE_CHECKING:
    from cosmodrome.speed.arrow_pure import ColumnBuilder
else:
    from cosmodrome.speed import arrow_pure as _chosen

    if FLAVOUR == "native":
        try:
            from cosmodrome.speed import arrow as _chosen
        except ImportError:
            pass
    ColumnBuilder = _chosen.ColumnBuilder

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
