"""What a check of a store found: problems, which need someone, and notes, which do not.

The code of a finding says what it is about: log, queue, index, checkpoint, config or files. Its
subject is the file; `position` in its evidence is the byte in that file, None if there is none.

Findings are many when a file is lost, so the list is bounded and the count goes on.
"""

from __future__ import annotations

import dataclasses

from cosmodrome.findings import Finding, Severity

FINDINGS_MAX = 100

RUN_REBUILD = "run `cosmo store rebuild`, which builds it again from the log"
RUN_REPAIR = "run `cosmo store repair --dry-run` to see what can be done"
START_CURES = "nothing: the next start puts it right"
UNFINISHED = (
    "nothing: this broker's next start removes it; a Java broker wants `cosmo store repair` first"
)


class Findings:
    """Problems and notes, each at most `limit` of them, all counted."""

    def __init__(self, limit: int = FINDINGS_MAX) -> None:
        self.limit = limit
        self.problems: list[Finding] = []
        self.notes: list[Finding] = []
        self.problem_count = 0
        self.note_count = 0

    def add(self, finding: Finding, *, cured: bool = False) -> None:
        """Take a finding; a problem that the next start of a broker cures becomes a note."""
        if cured:
            finding = dataclasses.replace(finding, severity=Severity.INFO, remedy=START_CURES)
        if finding.severity is Severity.INFO:
            self.note_count += 1
            if len(self.notes) < self.limit:
                self.notes.append(finding)
        else:
            self.problem_count += 1
            if len(self.problems) < self.limit:
                self.problems.append(finding)

    def take(self, other: Findings) -> None:
        self.problem_count += other.problem_count
        self.note_count += other.note_count
        self.problems += other.problems[: self.limit - len(self.problems)]
        self.notes += other.notes[: self.limit - len(self.notes)]


def problem(
    code: str, file: str, sentence: str, remedy: str, position: int | None = None
) -> Finding:
    return Finding(code, file, Severity.ERROR, sentence, remedy, evidence={"position": position})


def note(code: str, file: str, sentence: str, remedy: str, position: int | None = None) -> Finding:
    return Finding(code, file, Severity.INFO, sentence, remedy, evidence={"position": position})
