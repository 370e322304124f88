"""Signatures of requests, checked where the fast lane would take them, by the twin that runs."""

from __future__ import annotations

from cosmodrome.speed.choice import prefer_compiled
from cosmodrome.speed.signed.pure import Signatures

__all__ = ["Signatures"]

prefer_compiled(__name__, globals())
