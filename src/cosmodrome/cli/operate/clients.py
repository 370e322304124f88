"""`cosmo client list|stack`: who is connected, and what a consumer is doing right now."""

from __future__ import annotations

import dataclasses
import re

import click

from cosmodrome.cli.support.arguments import GROUP
from cosmodrome.cli.support.exits import NotFound, PartlyDone
from cosmodrome.cli.support.operating import note, similar, watch_option, with_admin
from cosmodrome.cli.support.output import FOR_PEOPLE, Column, Time, output_option, show, show_one
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.fleet import PartlyFailed
from cosmodrome.client.operate.flows import at_once
from cosmodrome.errors import Code, CosmodromeError, Refused, TimedOut, Unreachable
from cosmodrome.wire.names import retry_topic
from cosmodrome.wire.releases import release

CLIENTS = (
    Column("client_id"),
    Column("role"),
    Column("group"),
    Column("language"),
    Column("version"),
    Column("address"),
    Column("topics"),
    Column("brokers", wide=True),
    Column("mode", wide=True),
    Column("last_seen_ms", wide=True, time=True),
    Column("version_code", wide=True, right=True),
)
ROLES = ("consumer", "producer")
_CONTROLS = re.compile(r"[^\S\n\t ]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclasses.dataclass(slots=True)
class _Client:
    """One member of one group, as all brokers together know it."""

    role: str
    group: str
    client_id: str
    language: str
    version: int
    address: str
    topics: set[str] = dataclasses.field(default_factory=set)
    brokers: set[str] = dataclasses.field(default_factory=set)
    mode: str | None = None
    last_seen_ms: int | None = None

    def row(self) -> dict[str, object]:
        return {
            "client_id": self.client_id,
            "role": self.role,
            "group": self.group,
            "language": self.language,
            "version": release(self.version),
            "version_code": self.version,
            "address": self.address,
            "topics": sorted(self.topics - {retry_topic(self.group)}) or None,
            "brokers": sorted(self.brokers) or None,
            "mode": self.mode,
            "last_seen_ms": self.last_seen_ms,
        }


@click.group()
def client() -> None:
    """Connected producers and consumers."""


@client.command("list")
@click.option("-g", "--group", type=GROUP, help="Only this group.")
@click.option("-t", "--topic", help="Only consumers of this topic.")
@click.option("--role", type=click.Choice(ROLES), help="Only consumers, or only producers.")
@output_option
@watch_option
@with_admin
async def list_clients(
    admin: Admin, group: str | None, topic: str | None, role: str | None, output: str
) -> None:
    """List clients that are connected to brokers, with one row for each group of a client."""
    found: list[_Client] = []
    silent = ""
    try:
        known = await admin.groups.names()
    except PartlyFailed as failure:
        if not failure.results:
            raise
        silent = ", ".join(failure.failures)
        known = await admin.groups.names(partial=True)
    if role != "producer":
        groups = known if group is None else [group]
        for members in await at_once(lambda name: _consumers(admin, name), groups):
            found += members
    if role != "consumer" and topic is None:
        found += await _producers(admin, group)
    if topic is not None:
        found = [one for one in found if topic in one.topics]
    found.sort(key=lambda one: (one.role, one.group, one.client_id))
    show(output, CLIENTS, (one.row() for one in found))
    if silent:
        raise PartlyDone(f"clients of other brokers only: no answer from {silent}")


@client.command()
@click.argument("group", type=GROUP)
@click.argument("client_id", required=False)
@output_option
@with_admin
async def stack(admin: Admin, group: str, client_id: str | None, output: str) -> None:
    """Show what a consumer of GROUP is doing: the stacks of its threads.

    Without CLIENT_ID the group must have one member.
    """
    try:
        members = await admin.groups.members(group)
    except (Refused, PartlyFailed) as error:
        known = await admin.groups.names()
        if group not in known:
            raise NotFound(
                f"there is no group {group}{similar(group, known) or ';'} `cosmo group list` shows"
                " all groups"
            ) from None
        raise NotFound(
            f"group {group} has no member online, so nobody can be asked; `cosmo group explain"
            f" {group}` says more ({error})"
        ) from None
    if client_id is None:
        if len(members) != 1:
            raise click.UsageError(
                f"name one of its members: group {group} has {', '.join(members)}"
            )
        client_id = members[0]
    elif client_id not in members:
        raise NotFound(f"group {group} has no member {client_id}; there is: {', '.join(members)}")
    info = await admin.groups.running_info(group, client_id, stacks=True)
    text = info.jstack if isinstance(info.jstack, str) else None
    started = str(info.properties.get("PROP_CONSUMER_START_TIMESTAMP", ""))
    if output not in FOR_PEOPLE:
        show_one(
            output,
            {
                "group": group,
                "client_id": client_id,
                "started_ms": Time(started) if started.isdecimal() else None,
                "properties": info.properties,
                "stack": text,
            },
        )
    if text is None:
        raise NotFound(
            f"{client_id} sends no stacks; clients in Java and Python do, those in other languages"
            " mostly not"
        )
    if output in FOR_PEOPLE:
        click.echo(_CONTROLS.sub("?", text.replace("\r\n", "\n")))
    note(f"{client_id} of group {group}")


async def _consumers(admin: Admin, group: str) -> list[_Client]:
    try:
        connections = await admin.groups.connections(group, partial=True)
    except Refused as refusal:
        if refusal.code not in (Code.CONSUMER_NOT_ONLINE, Code.SYSTEM_ERROR):
            raise
        return []
    except (Unreachable, TimedOut):
        return []  # the broker that was silent before
    members: dict[str, _Client] = {}
    for broker, connection in connections.items():
        for one in connection.connection_set:
            member = members.setdefault(
                one.client_id,
                _Client(
                    role="consumer",
                    group=group,
                    client_id=one.client_id,
                    language=one.language,
                    version=one.version,
                    address=one.client_addr,
                ),
            )
            member.brokers.add(broker)
            member.topics.update(connection.subscription_table)
            member.mode = connection.message_model.lower()
    return list(members.values())


async def _producers(admin: Admin, group: str | None) -> list[_Client]:
    try:
        table = await admin.groups.producers(partial=True)
    except PartlyFailed as failure:
        if not all(_unsupported(error) for error in failure.failures.values()):
            raise
        # Compat: brokers before 4.9.2 cannot list producers.
        note(f"producers are not listed: {', '.join(failure.failures)} cannot tell")
        return []
    found: dict[tuple[str, str], _Client] = {}
    for name, infos in table.items():
        if group not in (None, name):
            continue
        for one in infos:
            member = found.setdefault(
                (name, one.client_id),
                _Client(
                    role="producer",
                    group=name,
                    client_id=one.client_id,
                    language=one.language,
                    version=one.version,
                    address=one.remote_ip.removeprefix("/"),
                ),
            )
            member.last_seen_ms = max(member.last_seen_ms or 0, one.last_update_timestamp)
    return list(found.values())


def _unsupported(error: CosmodromeError) -> bool:
    return isinstance(error, Refused) and error.code == Code.REQUEST_CODE_NOT_SUPPORTED
