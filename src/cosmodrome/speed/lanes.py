"""The inner loops of the broker's fast lane, chosen once: compiled `lane`, else `lane_pure`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cosmodrome.speed import HAS_LANE
from cosmodrome.speed.lane_pure import COMMIT, FULL, NOTHING, OTHER, PULL

if TYPE_CHECKING:
    from cosmodrome.speed.lane_heads import read_commit, read_pull
    from cosmodrome.speed.lane_messages import Plan
    from cosmodrome.speed.lane_pure import Intake
    from cosmodrome.speed.lane_replies import Template, Ticket, answer
else:
    if HAS_LANE:
        from cosmodrome.speed import lane as _chosen
    else:
        from cosmodrome.speed import lane_pure as _chosen

    Intake = _chosen.Intake
    Plan = _chosen.Plan
    Template = _chosen.Template
    Ticket = _chosen.Ticket
    answer = _chosen.answer
    read_commit = _chosen.read_commit
    read_pull = _chosen.read_pull

__all__ = [
    "COMMIT",
    "FULL",
    "NOTHING",
    "OTHER",
    "PULL",
    "Intake",
    "Plan",
    "Template",
    "Ticket",
    "answer",
    "read_commit",
    "read_pull",
]
