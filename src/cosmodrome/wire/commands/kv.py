"""What the name server keeps for operators: the KV table and its own settings."""

from __future__ import annotations

from cosmodrome.wire.needs import ADMIN
from cosmodrome.wire.table import NAMESERVER, SETTINGS_BYTES_MAX, Command, Reply, command


@command(100, "PUT_KV_CONFIG", served_by=NAMESERVER, needs=ADMIN)
class PutKvConfig(Command[Reply]):
    """Set one value of a namespace."""

    namespace: str
    key: str
    value: str


class GetKvConfigReply(Reply):
    """The value."""

    value: str | None = None


@command(101, "GET_KV_CONFIG", served_by=NAMESERVER, needs=ADMIN)
class GetKvConfig(Command[GetKvConfigReply]):
    """One value of a namespace."""

    namespace: str
    key: str


@command(102, "DELETE_KV_CONFIG", served_by=NAMESERVER, needs=ADMIN)
class DeleteKvConfig(Command[Reply]):
    """Remove one value of a namespace."""

    namespace: str
    key: str


@command(219, "GET_KVLIST_BY_NAMESPACE", served_by=NAMESERVER, needs=ADMIN)
class GetKvlistByNamespace(Command[Reply]):
    """All values of a namespace; answers KVTable."""

    namespace: str


@command(
    318,
    "UPDATE_NAMESRV_CONFIG",
    served_by=NAMESERVER,
    needs=ADMIN,
    body_bytes_max=SETTINGS_BYTES_MAX,
)
class UpdateNamesrvConfig(Command[Reply]):
    """Change settings; the body is properties text."""


@command(319, "GET_NAMESRV_CONFIG", served_by=NAMESERVER, needs=ADMIN)
class GetNamesrvConfig(Command[Reply]):
    """All settings as properties text."""
