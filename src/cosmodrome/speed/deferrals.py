"""Messages that waited, by the twin that runs: compiled `deferred`, else `deferred_pure`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cosmodrome.speed import FLAVOUR

if TYPE_CHECKING:
    from cosmodrome.speed.deferred_pure import Deferred
else:
    from cosmodrome.speed import deferred_pure as _chosen

    if FLAVOUR == "native":
        try:
            from cosmodrome.speed import deferred as _chosen
        except ImportError:
            pass
    Deferred = _chosen.Deferred

__all__ = ["Deferred"]
