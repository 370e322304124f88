"""One thing that is wrong, or worth knowing, about a consumer group."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

ERROR, WARNING, INFO = "error", "warning", "info"
SEVERITIES = (ERROR, WARNING, INFO)


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """`command` can be typed as it stands; where no command can mend it, it shows more of it."""

    code: str
    severity: str  # error: nothing or not all is consumed; warning: it may be; info: by design
    says: str
    remedy: str
    command: str
    evidence: Mapping[str, Any]


def listed(names: Iterable[str], most: int = 5) -> str:
    """A few names and how many more there are."""
    every = sorted(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def nearest(name: str, known: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)
