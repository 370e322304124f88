"""`cosmo doctor`: this machine and the cluster, each thing ok, warn or fail, with the next step."""

from __future__ import annotations

import dataclasses
import os

import click

from cosmodrome.cli import machine
from cosmodrome.cli.context import namesrv_option
from cosmodrome.cli.operating import EXIT_PROBLEMS, finish, note, timeout_option
from cosmodrome.cli.output import FOR_PEOPLE, Column, output_option, show
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.checkup import FAIL, OK, WARN, Check, cluster_checks
from cosmodrome.client.operate.facts import is_loopback
from cosmodrome.client.operate.fleet import attempt
from cosmodrome.client.options import ClientOptions, name_servers
from cosmodrome.env.real import real_env
from cosmodrome.errors import CosmodromeError, Refused
from cosmodrome.wire.commands.route import GetBrokerClusterInfo
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.releases import release

DATA_DEFAULT = "cosmo-data"
DONE = (
    Column("status"),
    Column("check"),
    Column("subject"),
    Column("says"),
    Column("next_step"),
    Column("figures", wide=True),
)
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
    "--data", metavar="DIR", help=f"Store root of a broker here.  [default: ./{DATA_DEFAULT}]"
)
@click.option("--offline", is_flag=True, help="Only this machine; ask no server.")
@namesrv_option
@timeout_option
@output_option
def doctor(data: str | None, offline: bool, namesrv: str, timeout: float, output: str) -> None:
    """Look at this machine and at the cluster, and say what to do where something is wrong.

    Exit code 6: something fails. Warnings alone end with 0.
    """
    checks = finish(diagnosed(namesrv, timeout, data or DATA_DEFAULT, offline=offline))
    show(output, DONE, (row(check, loud=output in FOR_PEOPLE) for check in checks))
    counts = {one: sum(check.status == one for check in checks) for one in (OK, WARN, FAIL)}
    note(f"{counts[OK]} ok, {counts[WARN]} to look at, {counts[FAIL]} failing")
    if counts[FAIL]:
        raise click.exceptions.Exit(EXIT_PROBLEMS)


def row(check: Check, *, loud: bool = False) -> dict[str, object]:
    status = check.status.upper() if loud else check.status
    return {
        "status": status,
        "check": check.check,
        "subject": check.subject,
        "says": check.says,
        "next_step": check.next_step or None,
        "figures": dict(check.figures) or None,
    }


async def diagnosed(namesrv: str, timeout: float, data: str, *, offline: bool) -> list[Check]:
    env = real_env()
    checks = [*machine.software(), await env.offload(lambda: machine.java(os.environ))]
    checks += [machine.open_files(), *machine.memory(env), machine.disk_space(env.disk, data)]
    if offline:
        return checks
    versions = Versions()
    timeout_ms = max(1, round(timeout * 1000))
    options = ClientOptions(connect_timeout_ms=min(timeout_ms, 3_000), rpc_hooks=(versions,))
    async with Admin(namesrv, client=options, timeout_ms=timeout_ms) as admin:
        found = await cluster_checks(admin.fleet, env.clock)
        checks += [_with_version(check, versions.seen) for check in found]
        if any(is_loopback(host) for host, _ in name_servers(namesrv)):
            checks += await machine.ports(_served(found), lambda port: _is_ours(admin, port))
    return checks


def _with_version(check: Check, seen: dict[str, int]) -> Check:
    """Name servers tell their version only in the frames of their answers."""
    if check.check != "name server" or check.status == FAIL or check.subject not in seen:
        return check
    return dataclasses.replace(check, says=f"{check.says}, version {release(seen[check.subject])}")


def _served(checks: list[Check]) -> dict[int, str]:
    """Ports of servers that answered on this machine."""
    served = {}
    for check in checks:
        if check.check == "name server" and check.status != FAIL:
            host, _, port = check.subject.rpartition(":")
            if is_loopback(host):
                served[int(port)] = f"name server {check.subject}"
    return served


async def _is_ours(admin: Admin, port: int) -> bool:
    if port == 8080:
        return await machine.speaks_http(port)
    # Any answer will do: a broker refuses this request in words of the protocol.
    answer = await attempt(
        admin.fleet.call(f"127.0.0.1:{port}", GetBrokerClusterInfo(), PORT_TIMEOUT_MS)
    )
    return isinstance(answer, Refused) or not isinstance(answer, CosmodromeError)
