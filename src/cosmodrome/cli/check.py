"""`cosmo check`: is the cluster in order, for monitors: tables, JSON, Nagios, Prometheus.

Nagios and its kin take the exit code: 0 ok, 1 warning, 2 critical, 3 unknown. All other forms end
with 0, also with warnings, or with 6 when something is critical or not known.
"""

from __future__ import annotations

import re

import click

from cosmodrome.cli.arguments import GROUP
from cosmodrome.cli.context import namesrv_option
from cosmodrome.cli.doctor import DONE, row
from cosmodrome.cli.group import is_system_group
from cosmodrome.cli.operating import EXIT_PROBLEMS, finish, note, opened, timeout_option
from cosmodrome.cli.output import FOR_PEOPLE, FORMATS, show
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.checkup import (
    FAIL,
    OK,
    UNKNOWN,
    WARN,
    Check,
    Thresholds,
    cluster_checks,
    group_check,
    worst,
)
from cosmodrome.client.operate.fleet import attempt
from cosmodrome.client.operate.flows import at_once
from cosmodrome.env.real import WallClock
from cosmodrome.errors import CosmodromeError

NAGIOS = {OK: ("OK", 0), WARN: ("WARNING", 1), FAIL: ("CRITICAL", 2), UNKNOWN: ("UNKNOWN", 3)}
GROUPS_AT_ONCE = 8


@click.command()
@click.option("-g", "--group", "groups", multiple=True, type=GROUP, help="Its lag, too; repeat it.")
@click.option("--all-groups", is_flag=True, help="The lag of every group.")
@click.option("--lag-warning", type=click.IntRange(0), metavar="N", help="Messages.")
@click.option("--lag-critical", type=click.IntRange(0), metavar="N", help="Messages.")
@click.option("--age-warning", type=click.FloatRange(0), metavar="SECONDS", help="Of the oldest.")
@click.option("--age-critical", type=click.FloatRange(0), metavar="SECONDS", help="Of the oldest.")
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

    Exit code 6: something is critical or not known. With -o nagios: 0 ok, 1 warning, 2 critical,
    3 unknown.
    """
    limits = Thresholds(lag_warning, lag_critical, age_warning, age_critical)
    checks = finish(_checked(namesrv, timeout, groups, limits, all_groups=all_groups))
    status = worst(checks)
    if output == "nagios":
        click.echo(nagios(checks))
        raise click.exceptions.Exit(NAGIOS[status][1])
    if output == "prometheus":
        click.echo(prometheus(checks), nl=False)
    else:
        show(output, DONE, (row(one, loud=output in FOR_PEOPLE) for one in checks))
    if status in (FAIL, UNKNOWN):
        bad = sum(one.status in (FAIL, UNKNOWN) for one in checks)
        note(f"{bad} of {len(checks)} checks are critical or not known")
        raise click.exceptions.Exit(EXIT_PROBLEMS)


async def _checked(
    namesrv: str, timeout: float, groups: tuple[str, ...], limits: Thresholds, *, all_groups: bool
) -> list[Check]:
    async with opened(namesrv, timeout) as admin:
        checks = await cluster_checks(admin.fleet, WallClock())
        names = list(groups)
        if all_groups:
            known = await attempt(admin.groups.names())
            if isinstance(known, CosmodromeError):
                checks.append(Check("groups", "cluster", UNKNOWN, str(known)))
            else:
                names += [one for one in known if not is_system_group(one) and one not in names]
        checks += await at_once(lambda name: _group(admin, name, limits), names, GROUPS_AT_ONCE)
    return checks


async def _group(admin: Admin, group: str, limits: Thresholds) -> Check:
    return await group_check(admin.fleet, group, limits)


def nagios(checks: list[Check]) -> str:
    """One line: the worst status, what is wrong, and the figures behind a bar."""
    status = worst(checks)
    wrong = [one for one in checks if one.status != OK]
    said = "; ".join(f"{one.check} {one.subject}: {one.says}" for one in wrong[:5])
    if len(wrong) > 5:
        said += f"; and {len(wrong) - 5} more"
    text = re.sub(r"[|\s]+", " ", said or f"{len(checks)} checks")
    figures = " ".join(
        f"'{_label(one, name)}'={value:g}" for one in checks for name, value in one.figures.items()
    )
    return f"COSMO {NAGIOS[status][0]} - {text}" + (f" | {figures}" if figures else "")


def _label(one: Check, name: str) -> str:
    return re.sub(r"[='|\s]+", "_", f"{one.check}_{one.subject}_{name}")


def prometheus(checks: list[Check]) -> str:
    """The text format, for a file that a node exporter collects."""
    lines = [
        "# HELP cosmo_check_status 0 ok, 1 warning, 2 critical, 3 unknown.",
        "# TYPE cosmo_check_status gauge",
    ]
    for one in checks:
        lines.append(f"cosmo_check_status{_labels(one)} {NAGIOS[one.status][1]}")
    figures: dict[str, list[str]] = {}
    for one in checks:
        for name, value in one.figures.items():
            metric = f"cosmo_check_{re.sub(r'[^a-z0-9]+', '_', one.check)}_{name}"
            figures.setdefault(metric, []).append(f"{metric}{_labels(one)} {value:g}")
    for metric, rows in sorted(figures.items()):
        lines += [f"# HELP {metric} As checked.", f"# TYPE {metric} gauge", *rows]
    return "\n".join(lines) + "\n"


def _labels(one: Check) -> str:
    quoted = {"check": one.check, "subject": one.subject}
    pairs = []
    for name, value in quoted.items():
        safe = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        pairs.append(f'{name}="{safe}"')
    return "{" + ",".join(pairs) + "}"
