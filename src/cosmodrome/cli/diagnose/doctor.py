"""`cosmo doctor`: this machine and the cluster, each thing ok, warn or fail, with the next step."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter

import click

from cosmodrome.cli.diagnose import machine
from cosmodrome.cli.support.connection import client_options
from cosmodrome.cli.support.context import namesrv_option
from cosmodrome.cli.support.exits import EXIT_PROBLEMS
from cosmodrome.cli.support.operating import finish, note, timeout_option
from cosmodrome.cli.support.output import FOR_PEOPLE, Column, output_option, show
from cosmodrome.cli.support.settings import UP_DATA
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.diagnosis.checkup import cluster_checks
from cosmodrome.client.operate.diagnosis.facts import is_loopback
from cosmodrome.client.operate.fleet import attempt
from cosmodrome.client.options import name_servers
from cosmodrome.env.ports import HEALTH_PORT
from cosmodrome.env.real import real_env
from cosmodrome.errors import CosmodromeError, Refused
from cosmodrome.findings import Finding, Severity
from cosmodrome.wire.commands.route import GetBrokerClusterInfo
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.releases import release

DONE = (
    Column("status"),
    Column("check"),
    Column("subject"),
    Column("says"),
    Column("next_step"),
    Column("figures", wide=True),
)
STATUS = {  # what users see of a severity
    Severity.OK: "ok",
    Severity.WARNING: "warn",
    Severity.UNKNOWN: "unknown",
    Severity.ERROR: "fail",
}
PORT_TIMEOUT_MS = 1_000


class Versions:
    """Sees the version in every answer, by the address that gave it."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def before_request(self, address: str, frame: Frame) -> None:
        """Requests say nothing about the other side."""

    def after_response(self, address: str, request: Frame, response: Frame) -> None:
        self.seen[address] = response.version


@click.command()
@click.option(
    "--data", metavar="DIR", help=f"Store root of a broker on this machine.  [default: ./{UP_DATA}]"
)
@click.option("--offline", is_flag=True, help="Check only this machine, and ask no server.")
@namesrv_option
@timeout_option
@output_option
def doctor(data: str | None, offline: bool, namesrv: str, timeout: float, output: str) -> None:
    """Check this machine and the cluster, and say how to solve each problem.

    The exit code is 6 when something fails, and 0 when there are only warnings.
    """
    checks = finish(diagnosed(namesrv, timeout, data or UP_DATA, offline=offline))
    show(output, DONE, (row(check, loud=output in FOR_PEOPLE) for check in checks))
    counts = Counter(check.severity for check in checks)
    note(
        f"{counts[Severity.OK]} ok, {counts[Severity.WARNING]} to look at,"
        f" {counts[Severity.ERROR]} failing"
    )
    if counts[Severity.ERROR]:
        raise click.exceptions.Exit(EXIT_PROBLEMS)


def row(check: Finding, *, loud: bool = False) -> dict[str, object]:
    status = STATUS[check.severity]
    return {
        "status": status.upper() if loud else status,
        "check": check.code,
        "subject": check.subject,
        "says": check.sentence,
        "next_step": check.remedy or None,
        "figures": dict(check.evidence) or None,
    }


async def diagnosed(namesrv: str, timeout: float, data: str, *, offline: bool) -> list[Finding]:
    env = real_env()
    checks = [*machine.software(), await env.offload(lambda: machine.java(os.environ))]
    checks += [machine.open_files(), *machine.memory(env), machine.disk_space(env.disk, data)]
    if offline:
        return checks
    versions = Versions()
    timeout_ms = max(1, round(timeout * 1000))
    options = client_options(
        namesrv, connect_timeout_ms=min(timeout_ms, 3_000), rpc_hooks=(versions,)
    )
    async with Admin(namesrv, client=options, timeout_ms=timeout_ms) as admin:
        found = await cluster_checks(admin.fleet, env.clock)
        checks += [_with_version(check, versions.seen) for check in found]
        if any(is_loopback(host) for host, _ in name_servers(namesrv)):
            checks += await machine.ports(_served(found), lambda port: _is_ours(admin, port))
    return checks


def _with_version(check: Finding, seen: dict[str, int]) -> Finding:
    """Name servers tell their version only in the frames of their answers."""
    if check.code != "name server" or check.severity is Severity.ERROR or check.subject not in seen:
        return check
    version = release(seen[check.subject])
    return dataclasses.replace(check, sentence=f"{check.sentence}, version {version}")


def _served(checks: list[Finding]) -> dict[int, str]:
    """Ports of servers that answered on this machine."""
    served = {}
    for check in checks:
        if check.code == "name server" and check.severity is not Severity.ERROR:
            host, _, port = check.subject.rpartition(":")
            if is_loopback(host):
                served[int(port)] = f"name server {check.subject}"
    return served


async def _is_ours(admin: Admin, port: int) -> bool:
    if port == HEALTH_PORT:
        return await machine.speaks_http(port)
    # Any answer will do: a broker refuses this request in words of the protocol.
    answer = await attempt(
        admin.fleet.call(f"127.0.0.1:{port}", GetBrokerClusterInfo(), PORT_TIMEOUT_MS)
    )
    return isinstance(answer, Refused) or not isinstance(answer, CosmodromeError)
