"""`cosmo group explain`: shows what `client/operate/diagnosis/explain.py` finds."""

from __future__ import annotations

import click

from cosmodrome.cli.support.arguments import GROUP, TOPIC
from cosmodrome.cli.support.exits import EXIT_PROBLEMS
from cosmodrome.cli.support.operating import note, with_admin
from cosmodrome.cli.support.output import FOR_PEOPLE, Column, output_option, paint, printable, show
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.diagnosis.explain import Explanation
from cosmodrome.client.operate.diagnosis.explain import explain as explained
from cosmodrome.client.operate.diagnosis.facts import Limits
from cosmodrome.env.real import WallClock
from cosmodrome.findings import Finding, Severity

FOUND = (
    Column("severity"),
    Column("code"),
    Column("says"),
    Column("remedy"),
    Column("command"),
    Column("evidence"),
    Column("group"),
)
COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow"}


@click.command()
@click.argument("group", type=GROUP)
@click.option("-t", "--topic", type=TOPIC, help="Only this topic.")
@click.option(
    "--sample",
    type=click.FloatRange(0.05, 60),
    default=1.5,
    show_default=True,
    metavar="SECONDS",
    help="Time between two measurements. Comparing them shows which queues make progress.",
)
@click.option(
    "--stuck-after",
    type=click.FloatRange(0, 86_400),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="A handler that finishes nothing for this long is stuck.",
)
@output_option
@with_admin
async def explain(
    admin: Admin, group: str, topic: str | None, sample: float, stuck_after: float, output: str
) -> None:
    """Say why GROUP is idle or slow, with the evidence and the command that helps.

    The exit code is 6 when something is wrong, and 0 when all that was checked is in order. Nothing
    is changed. A queue that nobody claims is locked for a moment, to see whether somebody holds it.
    """
    limits = Limits(sample_ms=int(sample * 1000), stuck_after_ms=int(stuck_after * 1000))
    found = await explained(admin.fleet, group, topic, clock=WallClock(), limits=limits)
    if output in FOR_PEOPLE:
        click.echo(_text(found, wide=output == "wide"), nl=False, color=True)
    else:
        show(output, FOUND, map(_row, found.findings))
    if found.problems:
        note(f"{len(found.problems)} problem(s) found, {len(found.checked)} check(s) in order")
        raise click.exceptions.Exit(EXIT_PROBLEMS)


def _row(finding: Finding) -> dict[str, object]:
    return {
        "group": finding.subject,
        "code": finding.code,
        "severity": finding.severity.value,
        "says": finding.sentence,
        "remedy": finding.remedy,
        "command": finding.command,
        "evidence": finding.evidence,
    }


def _text(found: Explanation, *, wide: bool) -> str:
    lines = []
    for finding in found.findings:
        colour = COLOURS.get(finding.severity)
        word = paint(finding.severity.upper(), fg=colour, bold=True)
        lines.append(f"{word} {finding.code}: {printable(finding.sentence)}")
        for name, value in finding.evidence.items():
            lines += _evidence(name, value)
        lines.append(f"  do: {printable(finding.remedy)}")
        lines.append(f"  $ {printable(finding.command)}")
        lines.append("")
    if wide or not found.problems:
        lines.append("Checked and in order:")
        lines += (f"  {words}" for words in found.checked)
        if found.unchecked:
            lines.append("Not checked: it does not apply, or nobody could be asked:")
            lines += (f"  {words}" for words in found.unchecked)
    return "\n".join(lines).rstrip("\n") + "\n"


def _evidence(name: str, value: object) -> list[str]:
    if isinstance(value, list) and any(len(str(item)) > 40 for item in value):
        return [f"  {name}:", *(f"    {printable(str(item))}" for item in value)]
    if isinstance(value, list):
        value = ", ".join(map(str, value)) or "-"
    if isinstance(value, dict):
        value = ", ".join(f"{key}={item}" for key, item in value.items()) or "-"
    return [f"  {name}: {'unknown' if value is None else printable(str(value))}"]
