"""A finding: one thing that is wrong or worth knowing, in one form for everybody who looks.

Checks of a cluster or a machine, explanations of a group, and checks of a store or an archive all
make findings. Whoever shows them chooses the words and columns.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any


class Severity(enum.StrEnum):
    """From good to bad; what could not be found out is worse than what is only a warning."""

    OK = "ok"
    INFO = "info"  # by design, or cured by itself
    WARNING = "warning"
    UNKNOWN = "unknown"
    ERROR = "error"

    @property
    def rank(self) -> int:
        return _RANKS[self]


_RANKS = {severity: rank for rank, severity in enumerate(Severity)}


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """`command` can be typed as it stands; where no command can mend it, it shows more of it."""

    code: str  # what was looked at or what is wrong; programs may rely on it
    subject: str  # whom it is about: a broker, a group, a file
    severity: Severity
    sentence: str
    remedy: str = ""
    command: str = ""
    evidence: Mapping[str, Any] = dataclasses.field(default_factory=dict)
