"""The client's hot functions, by the twin that runs: `native`, else `pure`."""

from __future__ import annotations

from cosmodrome.speed.choice import prefer_compiled
from cosmodrome.speed.client.pure import Item, Outline, batch_body, outline, send_frame

__all__ = ["Item", "Outline", "batch_body", "outline", "send_frame"]

prefer_compiled(__name__, globals())
