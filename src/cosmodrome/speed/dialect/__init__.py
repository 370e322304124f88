"""The reader of the JSON dialect, by the twin that runs: `native`, else `pure`."""

from __future__ import annotations

from cosmodrome.speed.choice import prefer_compiled
from cosmodrome.speed.dialect.pure import (
    DEPTH_MAX,
    ObjectKey,
    Reference,
    read,
    reference_path,
)

__all__ = ["DEPTH_MAX", "ObjectKey", "Reference", "read", "reference_path"]

prefer_compiled(__name__, globals())
