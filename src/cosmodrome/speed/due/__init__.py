"""Messages whose time has come, by the twin that runs: `native`, else `pure`."""

from __future__ import annotations

from cosmodrome.speed.choice import prefer_compiled
from cosmodrome.speed.due.pure import DueMessages

__all__ = ["DueMessages"]

prefer_compiled(__name__, globals())
