"""Access control of 4.x: accounts and white lists kept by a broker."""

from __future__ import annotations

from cosmodrome.wire.needs import ADMIN
from cosmodrome.wire.table import BROKER, Command, Reply, command


@command(50, "UPDATE_AND_CREATE_ACL_CONFIG", served_by=BROKER, needs=ADMIN)
class UpdateAndCreateAclConfig(Command[Reply]):
    """Create or change an account."""

    access_key: str
    secret_key: str | None = None
    white_remote_address: str | None = None
    admin: bool | None = None
    peer: bool | None = None  # ours: a broker, slave or filter server
    default_topic_perm: str | None = None
    default_group_perm: str | None = None
    topic_perms: str | None = None
    group_perms: str | None = None


@command(51, "DELETE_ACL_CONFIG", served_by=BROKER, needs=ADMIN)
class DeleteAclConfig(Command[Reply]):
    """Remove an account."""

    access_key: str


class AclInfoReply(Reply):
    """Versions of the account files."""

    version: str
    broker_name: str
    broker_addr: str
    cluster_name: str
    all_acl_file_version: str | None = None


@command(52, "GET_BROKER_CLUSTER_ACL_INFO", served_by=BROKER, needs=ADMIN)
class GetBrokerClusterAclInfo(Command[AclInfoReply]):
    """Which accounts file a broker runs with."""


@command(53, "UPDATE_GLOBAL_WHITE_ADDRS_CONFIG", served_by=BROKER, needs=ADMIN)
class UpdateGlobalWhiteAddrsConfig(Command[Reply]):
    """Replace the addresses that need no signature."""

    global_white_addrs: str
    acl_file_full_path: str | None = None


# Ours: upstream's request for this gives the secrets away.
@command(31010, "LIST_ACCOUNTS", served_by=BROKER, needs=ADMIN)
class ListAccounts(Command[Reply]):
    """All accounts without their secrets (ours); answers AccountList."""


@command(
    54,
    "GET_BROKER_CLUSTER_ACL_CONFIG",
    served_by=BROKER,
    planned="removed upstream in 4.9.8 because it leaks secrets",
)
class GetBrokerClusterAclConfig(Command[Reply]):
    """Unused."""
