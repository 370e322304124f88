"""The inner loops of the broker's fast lane, by the twin that runs: `native`, else `pure`.

`HAS_LANE` tells whether these are the compiled ones.
"""

from __future__ import annotations

from cosmodrome.speed.choice import compiled, prefer_compiled
from cosmodrome.speed.lane.pure import (
    GetCounts,
    Intake,
    Plan,
    PutCounts,
    Template,
    Ticket,
    answer,
)

__all__ = [
    "HAS_LANE",
    "GetCounts",
    "Intake",
    "Plan",
    "PutCounts",
    "Template",
    "Ticket",
    "answer",
]

HAS_LANE = compiled("cosmodrome.speed.lane.native") is not None
prefer_compiled(__name__, globals())
