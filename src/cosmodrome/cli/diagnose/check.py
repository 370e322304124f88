"""`cosmo check`: is the cluster in order, for monitors: tables, JSON, Nagios, Prometheus.

Nagios and its kin take the exit code: 0 ok, 1 warning, 2 critical, 3 unknown. All other forms end
with 0, also with warnings, or with 6 when something is critical or not known.
"""

from __future__ import annotations

import re

import click

from cosmodrome.cli.diagnose.doctor import DONE, row
from cosmodrome.cli.support.arguments import GROUP
from cosmodrome.cli.support.context import namesrv_option
from cosmodrome.cli.support.exits import EXIT_PROBLEMS
from cosmodrome.cli.support.operating import finish, note, opened, timeout_option
from cosmodrome.cli.support.output import FOR_PEOPLE, FORMATS, show
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.diagnosis.checkup import (
    Thresholds,
    cluster_checks,
    group_check,
    worst,
)
from cosmodrome.client.operate.fleet import attempt
from cosmodrome.client.operate.flows import at_once
from cosmodrome.env.real import WallClock
from cosmodrome.errors import CosmodromeError
from cosmodrome.findings import Finding, Severity
from cosmodrome.wire.names import is_system_group

NAGIOS = {
    Severity.OK: ("OK", 0),
    Severity.WARNING: ("WARNING", 1),
    Severity.ERROR: ("CRITICAL", 2),
    Severity.UNKNOWN: ("UNKNOWN", 3),
}
BAD = (Severity.ERROR, Severity.UNKNOWN)
GROUPS_AT_ONCE = 8


@click.command()
@click.option(
    "-g",
    "--group",
    "groups",
    multiple=True,
    type=GROUP,
    help="Check the lag of this group, too; may be repeated.",
)
@click.option("--all-groups", is_flag=True, help="Check the lag of every group.")
@click.option(
    "--lag-warning", type=click.IntRange(0), metavar="N", help="Warn when the lag reaches N."
)
@click.option(
    "--lag-critical",
    type=click.IntRange(0),
    metavar="N",
    help="Report a critical problem when the lag reaches N.",
)
@click.option(
    "--age-warning",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="Warn when the oldest waiting message is this old.",
)
@click.option(
    "--age-critical",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="Report a critical problem when the oldest waiting message is this old.",
)
@namesrv_option
@timeout_option
@click.option(
    "-o",
    "--output",
    type=click.Choice([*FORMATS, "nagios", "prometheus"]),
    default="table",
    show_default=True,
    help="Form of the result on stdout; nagios sets the exit code as well.",
)
def check(
    groups: tuple[str, ...],
    all_groups: bool,
    lag_warning: int | None,
    lag_critical: int | None,
    age_warning: float | None,
    age_critical: float | None,
    namesrv: str,
    timeout: float,
    output: str,
) -> None:
    """Check name servers, brokers, disks, clocks, and the lag of groups.

    The exit code is 6 when something is critical or unknown. With -o nagios it is 0 ok, 1 warning,
    2 critical, 3 unknown.
    """
    limits = Thresholds(lag_warning, lag_critical, age_warning, age_critical)
    checks = finish(_checked(namesrv, timeout, groups, limits, all_groups=all_groups))
    severity = worst(checks)
    if output == "nagios":
        click.echo(nagios(checks))
        raise click.exceptions.Exit(NAGIOS[severity][1])
    if output == "prometheus":
        click.echo(prometheus(checks), nl=False)
    else:
        show(output, DONE, (row(one, loud=output in FOR_PEOPLE) for one in checks))
    if severity in BAD:
        bad = sum(one.severity in BAD for one in checks)
        note(f"{bad} of {len(checks)} checks are critical or unknown")
        raise click.exceptions.Exit(EXIT_PROBLEMS)


async def _checked(
    namesrv: str, timeout: float, groups: tuple[str, ...], limits: Thresholds, *, all_groups: bool
) -> list[Finding]:
    async with opened(namesrv, timeout) as admin:
        checks = await cluster_checks(admin.fleet, WallClock())
        names = list(groups)
        if all_groups:
            known = await attempt(admin.groups.names())
            if isinstance(known, CosmodromeError):
                checks.append(Finding("groups", "cluster", Severity.UNKNOWN, str(known)))
            else:
                names += [one for one in known if not is_system_group(one) and one not in names]
        checks += await at_once(lambda name: _group(admin, name, limits), names, GROUPS_AT_ONCE)
    return checks


async def _group(admin: Admin, group: str, limits: Thresholds) -> Finding:
    return await group_check(admin.fleet, group, limits)


def nagios(checks: list[Finding]) -> str:
    """One line: the worst status, what is wrong, and the figures behind a bar."""
    wrong = [one for one in checks if one.severity is not Severity.OK]
    text = "; ".join(f"{one.code} {one.subject}: {one.sentence}" for one in wrong[:5])
    if len(wrong) > 5:
        text += f"; and {len(wrong) - 5} more"
    text = re.sub(r"[|\s]+", " ", text or f"{len(checks)} checks")
    figures = " ".join(
        f"'{_label(one, name)}'={value:g}" for one in checks for name, value in one.evidence.items()
    )
    return f"COSMO {NAGIOS[worst(checks)][0]} - {text}" + (f" | {figures}" if figures else "")


def _label(one: Finding, name: str) -> str:
    return re.sub(r"[='|\s]+", "_", f"{one.code}_{one.subject}_{name}")


def prometheus(checks: list[Finding]) -> str:
    """The text format, for a file that a node exporter collects."""
    lines = [
        "# HELP cosmo_check_status 0 ok, 1 warning, 2 critical, 3 unknown.",
        "# TYPE cosmo_check_status gauge",
    ]
    for one in checks:
        lines.append(f"cosmo_check_status{_labels(one)} {NAGIOS[one.severity][1]}")
    figures: dict[str, list[str]] = {}
    for one in checks:
        for name, value in one.evidence.items():
            metric = f"cosmo_check_{re.sub(r'[^a-z0-9]+', '_', one.code)}_{name}"
            figures.setdefault(metric, []).append(f"{metric}{_labels(one)} {value:g}")
    for metric, rows in sorted(figures.items()):
        lines += [f"# HELP {metric} As checked.", f"# TYPE {metric} gauge", *rows]
    return "\n".join(lines) + "\n"


def _labels(one: Finding) -> str:
    quoted = {"check": one.code, "subject": one.subject}
    pairs = []
    for name, value in quoted.items():
        safe = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        pairs.append(f'{name}="{safe}"')
    return "{" + ",".join(pairs) + "}"
