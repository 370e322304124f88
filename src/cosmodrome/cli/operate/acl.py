"""`cosmo acl`: accounts of brokers with access control. Secrets go in and never come out."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import click
import msgspec

from cosmodrome.access.account_files import right_of, text_of_right
from cosmodrome.access.accounts import Account
from cosmodrome.cli.support.arguments import GROUP, TOPIC, broker_option, cluster_option
from cosmodrome.cli.support.exits import NotFound
from cosmodrome.cli.support.operating import confirm, similar, with_admin, yes_option
from cosmodrome.cli.support.output import Column, output_option, show
from cosmodrome.client.operate.admin import Admin
from cosmodrome.wire.bodies import DataVersion
from cosmodrome.wire.commands.acl import UpdateAndCreateAclConfig
from cosmodrome.wire.needs import Right
from cosmodrome.wire.report_bodies import AccountInfo

ACCOUNTS = (
    Column("broker"),
    Column("access_key"),
    Column("admin"),
    Column("peer"),
    Column("default_topic"),
    Column("default_group"),
    Column("topics"),
    Column("groups"),
    Column("white_addresses", wide=True),
)
DONE = (Column("broker"), Column("access_key"), Column("outcome"))
WHITE = (Column("broker"), Column("addresses"))
VERSIONS = (Column("broker"), Column("file"), Column("changes", right=True), Column("changed_ms"))
RIGHTS = (Column("broker"), Column("access_key"), Column("kind"), Column("name"), Column("right"))

_RIGHT = click.Choice(["DENY", "PUB", "SUB", "PUB|SUB", "SUB|PUB"])


@click.group()
def acl() -> None:
    """Accounts of brokers with access control (aclEnable). See docs/security.md."""


@acl.command("list")
@broker_option
@cluster_option
@output_option
@with_admin
async def list_accounts(admin: Admin, broker: str | None, cluster: str | None, output: str) -> None:
    """List accounts and their rights, without secrets."""
    found = await admin.accounts.all(broker=broker, cluster=cluster)
    show(
        output,
        ACCOUNTS,
        (_row(name, account) for name, one in found.items() for account in one.accounts),
    )


@acl.command("set")
@click.argument("access_key")
@click.option("--secret-key", help="Its secret; - reads it from stdin. New accounts need one.")
@click.option("--admin", "is_admin", type=bool, help="Whether it may change everything.")
@click.option("--peer", type=bool, help="Whether it is a broker, slave or filter server.")
@click.option("--default-topic", type=_RIGHT, help="Right to topics that are not listed.")
@click.option("--default-group", type=_RIGHT, help="Right to groups that are not listed.")
@click.option("--topics", help="Rights to topics, such as A=PUB,B=PUB|SUB; replaces the list.")
@click.option("--groups", help="Rights to groups, such as g=SUB; replaces the list.")
@click.option("--white", help="Addresses from which it need not sign requests about messages.")
@broker_option
@cluster_option
@output_option
@with_admin
async def set_account(
    admin: Admin,
    access_key: str,
    secret_key: str | None,
    is_admin: bool | None,
    peer: bool | None,
    default_topic: str | None,
    default_group: str | None,
    topics: str | None,
    groups: str | None,
    white: str | None,
    broker: str | None,
    cluster: str | None,
    output: str,
) -> None:
    """Create an account, or change the parts of it that options name."""
    account = UpdateAndCreateAclConfig(
        access_key=access_key,
        secret_key=sys.stdin.readline().strip() if secret_key == "-" else secret_key,
        white_remote_address=white,
        admin=is_admin,
        peer=peer,
        default_topic_perm=default_topic,
        default_group_perm=default_group,
        topic_perms=topics,
        group_perms=groups,
    )
    done = await admin.accounts.put(account, broker=broker, cluster=cluster)
    _show_done(output, done, access_key, "set")


@acl.command()
@click.argument("access_key")
@broker_option
@cluster_option
@yes_option
@output_option
@with_admin
async def delete(
    admin: Admin, access_key: str, broker: str | None, cluster: str | None, yes: bool, output: str
) -> None:
    """Delete an account."""
    confirm(f"account {access_key} will be deleted; its clients are refused at once", yes=yes)
    done = await admin.accounts.delete(access_key, broker=broker, cluster=cluster)
    _show_done(output, done, access_key, "deleted")


@acl.command()
@click.option("--set", "addresses", help="Replace them by these, separated by commas.")
@click.option("--file", help="The account file that has them.  [default: the main one]")
@broker_option
@cluster_option
@output_option
@with_admin
async def white(
    admin: Admin,
    addresses: str | None,
    file: str | None,
    broker: str | None,
    cluster: str | None,
    output: str,
) -> None:
    """Show or replace the addresses that need no account for requests about messages."""
    if addresses is not None:
        await admin.accounts.set_white(addresses, file=file, broker=broker, cluster=cluster)
    found = await admin.accounts.all(broker=broker, cluster=cluster)
    show(
        output,
        WHITE,
        (
            {"broker": name, "addresses": ",".join(one.global_white_remote_addresses)}
            for name, one in found.items()
        ),
    )


@acl.command()
@broker_option
@cluster_option
@output_option
@with_admin
async def versions(admin: Admin, broker: str | None, cluster: str | None, output: str) -> None:
    """Show the account files of each broker and how often requests changed them."""
    found = await admin.accounts.versions(broker=broker, cluster=cluster)
    show(
        output,
        VERSIONS,
        (
            {
                "broker": name,
                "file": file,
                "changes": version.counter,
                "changed_ms": version.timestamp,
            }
            for name, reply in found.items()
            for file, version in msgspec.json.decode(
                reply.all_acl_file_version or "{}", type=dict[str, DataVersion]
            ).items()
        ),
    )


@acl.command()
@click.argument("access_key")
@click.option("-t", "--topic", "topics", multiple=True, type=TOPIC, help="A topic; repeatable.")
@click.option("-g", "--group", "groups", multiple=True, type=GROUP, help="A group; repeatable.")
@broker_option
@cluster_option
@output_option
@with_admin
async def check(
    admin: Admin,
    access_key: str,
    topics: tuple[str, ...],
    groups: tuple[str, ...],
    broker: str | None,
    cluster: str | None,
    output: str,
) -> None:
    """Show which rights an account has to topics and groups, listed or not."""
    found = await admin.accounts.all(broker=broker, cluster=cluster)
    rows: list[dict[str, object]] = []
    known: set[str] = set()
    for name, one in found.items():
        known.update(info.access_key for info in one.accounts)
        for info in one.accounts:
            if info.access_key == access_key:
                rows += _rights(name, info, topics, groups)
    if access_key not in known:
        raise NotFound(f"there is no account {access_key}{similar(access_key, known)}")
    show(output, RIGHTS, rows)


def _rights(
    broker: str, info: AccountInfo, topics: Iterable[str], groups: Iterable[str]
) -> list[dict[str, object]]:
    account = Account(
        access_key=info.access_key,
        secret=b"",
        admin=info.admin,
        peer=info.peer,
        default_topic=right_of(info.default_topic_perm),
        default_group=right_of(info.default_group_perm),
        topics=_listed(info.topic_perms),
        groups=_listed(info.group_perms),
    )
    asked = [("topic", name, account.topic_right(name)) for name in topics]
    asked += [("group", name, account.group_right(name)) for name in groups]
    return [
        {
            "broker": broker,
            "access_key": info.access_key,
            "kind": kind,
            "name": name,
            "right": text_of_right(right),
        }
        for kind, name, right in asked
    ]


def _listed(items: Iterable[str]) -> dict[str, Right]:
    pairs = (item.partition("=") for item in items)
    return {name: right_of(right) for name, _, right in pairs}


def _row(broker: str, account: AccountInfo) -> dict[str, object]:
    return {
        "broker": broker,
        "access_key": account.access_key,
        "admin": account.admin,
        "peer": account.peer,
        "default_topic": account.default_topic_perm,
        "default_group": account.default_group_perm,
        "topics": ",".join(account.topic_perms),
        "groups": ",".join(account.group_perms),
        "white_addresses": account.white_remote_address,
    }


def _show_done(output: str, brokers: Iterable[str], access_key: str, outcome: str) -> None:
    show(
        output,
        DONE,
        ({"broker": name, "access_key": access_key, "outcome": outcome} for name in brokers),
    )
