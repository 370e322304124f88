"""What a look at a store found: problems, which need someone, and notes, which do not.

Findings are many when a file is lost, so the list is bounded and the count goes on.
"""

from __future__ import annotations

import dataclasses

FINDINGS_MAX = 100

RUN_REBUILD = "run `cosmo store rebuild`, which builds it again from the log"
RUN_REPAIR = "run `cosmo store repair --dry-run` to see what can be done"
START_CURES = "nothing: the next start puts it right"
UNFINISHED = (
    "nothing: this broker's next start removes it; a Java broker wants `cosmo store repair` first"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    kind: str  # what it is about: log, queue, index, checkpoint, config, files
    file: str
    position: int | None  # byte in the file
    what: str
    next: str


class Findings:
    """Problems and notes, each at most `limit` of them, all counted."""

    def __init__(self, limit: int = FINDINGS_MAX) -> None:
        self.limit = limit
        self.problems: list[Finding] = []
        self.notes: list[Finding] = []
        self.problem_count = 0
        self.note_count = 0

    def problem(self, finding: Finding) -> None:
        self.problem_count += 1
        if len(self.problems) < self.limit:
            self.problems.append(finding)

    def note(self, finding: Finding) -> None:
        self.note_count += 1
        if len(self.notes) < self.limit:
            self.notes.append(finding)

    def say(self, finding: Finding, *, cured: bool) -> None:
        """A problem, unless the next start of a broker cures it."""
        if cured:
            self.note(dataclasses.replace(finding, next=START_CURES))
        else:
            self.problem(finding)

    def take(self, other: Findings) -> None:
        self.problem_count += other.problem_count
        self.note_count += other.note_count
        self.problems += other.problems[: self.limit - len(self.problems)]
        self.notes += other.notes[: self.limit - len(self.notes)]
