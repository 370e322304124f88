"""The client's hot functions, chosen once like those of the package itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cosmodrome.speed import FLAVOUR
from cosmodrome.speed.client_pure import Item, Outline

if TYPE_CHECKING:
    from cosmodrome.speed.client_pure import batch_body, outline, send_frame
else:
    from cosmodrome.speed import client_pure as _chosen

    if FLAVOUR == "native":
        try:
            from cosmodrome.speed import client as _chosen
        except ImportError:
            pass
    batch_body = _chosen.batch_body
    outline = _chosen.outline
    send_frame = _chosen.send_frame

__all__ = ["Item", "Outline", "batch_body", "outline", "send_frame"]
