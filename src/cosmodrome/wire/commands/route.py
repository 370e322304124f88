"""Routes: what brokers tell the name server and what everybody else asks it."""

from __future__ import annotations

from cosmodrome.wire.commands.fields import Int32, Int64
from cosmodrome.wire.needs import ADMIN, KNOWN, PEER
from cosmodrome.wire.table import ANY_BODY, NAMESERVER, Command, Reply, command


class RegisterBrokerReply(Reply):
    """For a slave: its master. The body is a KVTable of ordered topics, if there are any."""

    ha_server_addr: str | None = None
    master_addr: str | None = None


@command(103, "REGISTER_BROKER", served_by=NAMESERVER, needs=PEER, body_bytes_max=ANY_BODY)
class RegisterBroker(Command[RegisterBrokerReply]):
    """A broker announces itself and its topics; the body is a RegisterBrokerBody."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    ha_server_addr: str
    broker_id: Int64
    compressed: bool | None = None
    body_crc32: Int32 | None = None
    heartbeat_timeout_millis: Int64 | None = None  # Compat: 5.x
    enable_acting_master: bool | None = None  # Compat: 5.x


@command(104, "UNREGISTER_BROKER", served_by=NAMESERVER, needs=PEER)
class UnregisterBroker(Command[Reply]):
    """A broker leaves."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: Int64


class QueryDataVersionReply(Reply):
    """Whether the broker should register again; the body is the DataVersion known here."""

    changed: bool


@command(322, "QUERY_DATA_VERSION", served_by=NAMESERVER, needs=PEER)
class QueryDataVersion(Command[QueryDataVersionReply]):
    """Compare a broker's version of its topics with the one known; the body is a DataVersion."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: Int64


@command(105, "GET_ROUTEINFO_BY_TOPIC", served_by=NAMESERVER, needs=KNOWN)
class GetRouteinfoByTopic(Command[Reply]):
    """Brokers and queues of a topic; answers TopicRouteData."""

    topic: str
    accept_standard_json_only: bool | None = None


@command(106, "GET_BROKER_CLUSTER_INFO", served_by=NAMESERVER, needs=KNOWN)
class GetBrokerClusterInfo(Command[Reply]):
    """All clusters and brokers; answers ClusterInfo."""


class WipeWritePermReply(Reply):
    """How many topics lost the permission."""

    wipe_topic_count: Int32


@command(205, "WIPE_WRITE_PERM_OF_BROKER", served_by=NAMESERVER, needs=ADMIN)
class WipeWritePermOfBroker(Command[WipeWritePermReply]):
    """Take a broker out of the routes for writing."""

    broker_name: str


class AddWritePermReply(Reply):
    """How many topics got the permission back."""

    add_topic_count: Int32


@command(327, "ADD_WRITE_PERM_OF_BROKER", served_by=NAMESERVER, needs=ADMIN)
class AddWritePermOfBroker(Command[AddWritePermReply]):
    """Put a broker back into the routes for writing."""

    broker_name: str


@command(206, "GET_ALL_TOPIC_LIST_FROM_NAMESERVER", served_by=NAMESERVER, needs=KNOWN)
class GetAllTopicListFromNameserver(Command[Reply]):
    """Every topic; answers TopicList."""


@command(216, "DELETE_TOPIC_IN_NAMESRV", served_by=NAMESERVER, needs=ADMIN)
class DeleteTopicInNamesrv(Command[Reply]):
    """Drop a topic's route, everywhere or in one cluster."""

    topic: str
    cluster_name: str | None = None


@command(224, "GET_TOPICS_BY_CLUSTER", served_by=NAMESERVER, needs=KNOWN)
class GetTopicsByCluster(Command[Reply]):
    """Topics that the brokers of a cluster hold; answers TopicList."""

    cluster: str


@command(304, "GET_SYSTEM_TOPIC_LIST_FROM_NS", served_by=NAMESERVER, needs=KNOWN)
class GetSystemTopicListFromNs(Command[Reply]):
    """Topics named after clusters and brokers; answers TopicList."""


@command(311, "GET_UNIT_TOPIC_LIST", served_by=NAMESERVER, needs=KNOWN)
class GetUnitTopicList(Command[Reply]):
    """Topics with the unit flag; answers TopicList."""


@command(312, "GET_HAS_UNIT_SUB_TOPIC_LIST", served_by=NAMESERVER, needs=KNOWN)
class GetHasUnitSubTopicList(Command[Reply]):
    """Topics with the unit-subscription flag; answers TopicList."""


@command(313, "GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST", served_by=NAMESERVER, needs=KNOWN)
class GetHasUnitSubUnunitTopicList(Command[Reply]):
    """Topics with the unit-subscription flag but not the unit flag; answers TopicList."""
