"""Filter servers: processes beside a broker that filter for its consumers."""

from __future__ import annotations

from msgspec import field

from cosmodrome.wire.commands.fields import Int32, Int64
from cosmodrome.wire.needs import PEER
from cosmodrome.wire.table import ANY_BODY, BROKER, FILTERSERVER, Command, Reply, command


class RegisterFilterServerReply(Reply):
    """The broker's own name and id."""

    broker_name: str
    broker_id: Int64


@command(301, "REGISTER_FILTER_SERVER", served_by=BROKER, needs=PEER)
class RegisterFilterServer(Command[RegisterFilterServerReply]):
    """A filter server announces itself to its broker."""

    filter_server_addr: str


@command(302, "REGISTER_MESSAGE_FILTER_CLASS", served_by=FILTERSERVER, body_bytes_max=ANY_BODY)
class RegisterMessageFilterClass(Command[Reply]):
    """Choose the filter of a group by name. Code in the request is never run."""

    consumer_group: str
    topic: str
    class_name: str
    class_crc: Int32 = field(name="classCRC")
