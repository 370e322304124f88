"""`cosmo group explain`: shows what `client/operate/explain.py` finds."""

from __future__ import annotations

import click

from cosmodrome.cli.arguments import GROUP, TOPIC
from cosmodrome.cli.operating import EXIT_PROBLEMS, note, with_admin
from cosmodrome.cli.output import FOR_PEOPLE, Column, output_option, paint, printable, show
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.explain import Explanation
from cosmodrome.client.operate.explain import explain as explained
from cosmodrome.client.operate.facts import Limits
from cosmodrome.client.operate.finding import ERROR, WARNING, Finding
from cosmodrome.env.real import WallClock

FOUND = (
    Column("severity"),
    Column("code"),
    Column("says"),
    Column("remedy"),
    Column("command"),
    Column("evidence"),
    Column("group"),
)
COLOURS = {ERROR: "red", WARNING: "yellow"}


@click.command()
@click.argument("group", type=GROUP)
@click.option("-t", "--topic", type=TOPIC, help="Only this topic.")
@click.option(
    "--sample",
    type=click.FloatRange(0.05, 60),
    default=1.5,
    show_default=True,
    metavar="SECONDS",
    help="Between the two looks that show what moves.",
)
@click.option(
    "--stuck-after",
    type=click.FloatRange(0, 86_400),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="A handler that finishes nothing for so long is stuck.",
)
@output_option
@with_admin
async def explain(
    admin: Admin, group: str, topic: str | None, sample: float, stuck_after: float, output: str
) -> None:
    """Say why GROUP is idle or slow, with the evidence and the command that helps.

    Exit code 6: something is wrong. With 0 everything that was checked is in order. Nothing is
    changed; a queue that nobody claims is locked for a moment to see whether somebody holds it.
    """
    limits = Limits(sample_ms=int(sample * 1000), stuck_after_ms=int(stuck_after * 1000))
    found = await explained(admin.fleet, group, topic, clock=WallClock(), limits=limits)
    if output in FOR_PEOPLE:
        click.echo(_text(found, wide=output == "wide"), nl=False, color=True)
    else:
        show(output, FOUND, (_row(found, finding) for finding in found.findings))
    if found.problems:
        note(f"{len(found.problems)} problem(s) found, {len(found.checked)} check(s) in order")
        raise click.exceptions.Exit(EXIT_PROBLEMS)


def _row(found: Explanation, finding: Finding) -> dict[str, object]:
    return {
        "group": found.facts.group,
        "code": finding.code,
        "severity": finding.severity,
        "says": finding.says,
        "remedy": finding.remedy,
        "command": finding.command,
        "evidence": finding.evidence,
    }


def _text(found: Explanation, *, wide: bool) -> str:
    lines = []
    for finding in found.findings:
        colour = COLOURS.get(finding.severity)
        word = paint(finding.severity.upper(), fg=colour, bold=True)
        lines.append(f"{word} {finding.code}: {printable(finding.says)}")
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
