"""The JSON bodies of requests and answers, as typed values.

`decode` takes what any client sends: unknown members, numbers as strings, missing or null
members, bare integer keys, objects as keys. `encode` writes what upstream writes: compact, members
in alphabetical order (the order of declaration here), and upstream's dialect where a map has
integer or object keys. Names of upstream's enumerations stay plain strings.
Members that only 5.x knows are UNSET, and so not written, unless they were read.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType, field

from cosmodrome import speed
from cosmodrome.errors import ProtocolError
from cosmodrome.wire import fastjson

B = TypeVar("B", bound="Body")

MASTER_ID = 0  # of a broker; its slaves have others
PERM_INHERIT, PERM_WRITE, PERM_READ = 1, 2, 4
QUEUES_MAX = 65_535  # of a topic on one broker
TOPICS_MAX = 100_000  # of one broker
TAG, SQL92 = "TAG", "SQL92"
EVERYTHING = "*"

CONSUME_TYPES = ("CONSUME_ACTIVELY", "CONSUME_PASSIVELY")
MESSAGE_MODELS = ("BROADCASTING", "CLUSTERING")
CONSUME_FROM_WHERE = (
    "CONSUME_FROM_LAST_OFFSET",
    "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST",
    "CONSUME_FROM_MIN_OFFSET",
    "CONSUME_FROM_MAX_OFFSET",
    "CONSUME_FROM_FIRST_OFFSET",
    "CONSUME_FROM_TIMESTAMP",
)
_ENUMERATIONS = frozenset({"consumeType", "messageModel", "consumeFromWhere"})


def _setting(text: str, least: int | None = None, most: int | None = None) -> Meta:
    """What a field means and may hold, for tools; nothing is refused while decoding."""
    return Meta(description=text, extra={"least": least, "most": most})


class Body(msgspec.Struct, rename="camel", kw_only=True, gc=False):
    """What all bodies share.

    Nothing in a body leads back to it, so the collector need not visit the hundreds of thousands
    that large tables keep.
    """

    # The body has maps whose keys upstream writes bare, or whose keys are whole objects.
    bare_keys: ClassVar[bool] = False
    object_keys: ClassVar[bool] = False


class MessageQueue(msgspec.Struct, rename="camel", kw_only=True, frozen=True, gc=False):
    """One queue of a topic on one broker; usable as a map key."""

    broker_name: str
    queue_id: int
    topic: str


class DataVersion(Body, kw_only=True):
    """Version of a persisted table: grows with every change."""

    counter: int = 0
    state_version: int | UnsetType = UNSET
    timestamp: int = 0


# --- topics and registration ---------------------------------------------------------------


class TopicConfig(Body, kw_only=True):
    attributes: dict[str, str] | UnsetType = UNSET
    order: Annotated[
        bool, _setting("Whether name servers fix its number of queues, for strict order.")
    ] = False
    perm: Annotated[int, _setting("RW, R, W or NONE.")] = PERM_READ | PERM_WRITE
    read_queue_nums: Annotated[
        int, _setting("Queues for consumers on each broker.", 1, QUEUES_MAX)
    ] = 16
    topic_filter_type: str = "SINGLE_TAG"
    topic_name: str
    topic_sys_flag: int = 0
    write_queue_nums: Annotated[
        int, _setting("Queues for producers on each broker.", 1, QUEUES_MAX)
    ] = 16


class TopicConfigSerializeWrapper(Body, kw_only=True):
    data_version: DataVersion = field(default_factory=DataVersion)
    topic_config_table: dict[str, TopicConfig] = {}


class RegisterBrokerBody(Body, kw_only=True):
    filter_server_list: list[str] = []
    topic_config_serialize_wrapper: TopicConfigSerializeWrapper = field(
        default_factory=TopicConfigSerializeWrapper
    )


class TopicList(Body, kw_only=True):
    broker_addr: str | UnsetType = UNSET
    topic_list: list[str] = []


class TopicOffset(Body, kw_only=True):
    last_update_timestamp: int = 0
    max_offset: int = 0
    min_offset: int = 0


class TopicStatsTable(Body, kw_only=True):
    object_keys = True

    offset_table: dict[MessageQueue, TopicOffset] = {}


# --- routes --------------------------------------------------------------------------------


class QueueData(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """A broker's queues of one topic. Frozen: the system flag has two names that must agree."""

    broker_name: str
    perm: int
    read_queue_nums: int
    topic_syn_flag: int = 0  # Compat: the name that 4.8 and the Go client read
    topic_sys_flag: int = 0
    write_queue_nums: int

    def __post_init__(self) -> None:
        flag = self.topic_sys_flag or self.topic_syn_flag
        msgspec.structs.force_setattr(self, "topic_sys_flag", flag)
        msgspec.structs.force_setattr(self, "topic_syn_flag", flag)


class BrokerData(Body, kw_only=True):
    bare_keys = True

    broker_addrs: dict[int, str] = {}
    broker_name: str
    cluster: str = ""


class TopicRouteData(Body, kw_only=True):
    bare_keys = True

    broker_datas: list[BrokerData] = []
    filter_server_table: dict[str, list[str]] = {}
    order_topic_conf: str | UnsetType = UNSET
    queue_datas: list[QueueData] = []


class ClusterInfo(Body, kw_only=True):
    bare_keys = True

    broker_addr_table: dict[str, BrokerData] = {}
    cluster_addr_table: dict[str, list[str]] = {}


class KVTable(Body, kw_only=True):
    table: dict[str, str] = {}


# --- groups and progress -------------------------------------------------------------------


class SubscriptionGroupConfig(Body, kw_only=True):
    attributes: dict[str, str] | UnsetType = UNSET
    broker_id: Annotated[int, _setting("Id of the broker to consume from; 0 is the master.", 0)] = 0
    consume_broadcast_enable: Annotated[bool, _setting("Whether it may consume as broadcast.")] = (
        True
    )
    consume_enable: Annotated[bool, _setting("Whether it may consume at all.")] = True
    consume_from_min_enable: bool = True
    consume_message_orderly: bool | UnsetType = UNSET
    consume_timeout_minute: int | UnsetType = UNSET
    group_name: str
    group_retry_policy: dict[str, Any] | UnsetType = UNSET
    group_sys_flag: int | UnsetType = UNSET
    notify_consumer_ids_changed_enable: bool = True
    retry_max_times: Annotated[
        int, _setting("Attempts for one message; -1: the client decides.", -1)
    ] = 16
    retry_queue_nums: Annotated[
        int, _setting("Queues of its retry topic; 0: no retries.", 0, QUEUES_MAX)
    ] = 1
    which_broker_when_consume_slowly: Annotated[
        int, _setting("Id of the broker to consume from when it falls behind.", 0)
    ] = 1


class SubscriptionGroupWrapper(Body, kw_only=True):
    data_version: DataVersion = field(default_factory=DataVersion)
    subscription_group_table: dict[str, SubscriptionGroupConfig] = {}


class GroupList(Body, kw_only=True):
    group_list: list[str] = []


class OffsetWrapper(Body, kw_only=True):
    broker_offset: int = 0
    consumer_offset: int = 0
    last_timestamp: int = 0


class ConsumeStats(Body, kw_only=True):
    object_keys = True

    consume_tps: float = 0.0
    offset_table: dict[MessageQueue, OffsetWrapper] = {}


class ConsumeStatsList(Body, kw_only=True):
    """Progress of every group of a broker: {group: one ConsumeStats per topic} in a list."""

    object_keys = True

    broker_addr: str = ""
    consume_stats_list: list[dict[str, list[ConsumeStats]]] = []
    total_diff: int = 0


class BrokerStatsItem(Body, kw_only=True):
    """One statistic over one span: per second in `tps`, per call in `avgpt`."""

    avgpt: float = 0.0
    sum: int = 0
    tps: float = 0.0


class BrokerStatsData(Body, kw_only=True):
    stats_day: BrokerStatsItem = field(default_factory=BrokerStatsItem)
    stats_hour: BrokerStatsItem = field(default_factory=BrokerStatsItem)
    stats_minute: BrokerStatsItem = field(default_factory=BrokerStatsItem)


class OffsetMovedEvent(Body, kw_only=True):
    """The body of a message in OFFSET_MOVED_EVENT: a consumer asked outside of a queue."""

    consumer_group: str
    message_queue: MessageQueue
    offset_new: int
    offset_request: int


class ConsumerOffsetSerializeWrapper(Body, kw_only=True):
    """Progress by "topic@group" and queue id."""

    bare_keys = True

    data_version: DataVersion | UnsetType = UNSET
    offset_table: dict[str, dict[int, int]] = {}


# --- clients -------------------------------------------------------------------------------


class SubscriptionData(Body, kw_only=True):
    """What a consumer wants of a topic.

    The hash codes of the tags are always computed here. Compat: the Go client sends hashes of
    UTF-8 bytes and the C++ client may send none.
    """

    class_filter_mode: bool = False
    code_set: list[int] = []
    expression_type: str = TAG
    sub_string: str = EVERYTHING
    sub_version: int = 0
    tags_set: list[str] = []
    topic: str

    def __post_init__(self) -> None:
        if not self.expression_type:
            self.expression_type = TAG
        if self.expression_type != TAG or self.class_filter_mode:
            return
        if not self.tags_set and self.sub_string == EVERYTHING:
            self.code_set = []
            return
        if not self.tags_set:
            tags = (tag.strip() for tag in self.sub_string.split("||"))
            self.tags_set = list(dict.fromkeys(tag for tag in tags if tag))
        self.code_set = list(dict.fromkeys(speed.java_hash(tag) for tag in self.tags_set))


class ConsumerData(Body, kw_only=True):
    consume_from_where: str = CONSUME_FROM_WHERE[0]
    consume_type: str = "CONSUME_PASSIVELY"
    group_name: str
    message_model: str = "CLUSTERING"
    subscription_data_set: list[SubscriptionData] = []
    unit_mode: bool = False

    def __post_init__(self) -> None:
        self.consume_from_where = _enumeration(self.consume_from_where, CONSUME_FROM_WHERE)
        self.consume_type = _enumeration(self.consume_type, CONSUME_TYPES)
        self.message_model = _enumeration(self.message_model, MESSAGE_MODELS)


class ProducerData(Body, kw_only=True):
    group_name: str


class HeartbeatData(Body, kw_only=True):
    client_id: str = field(name="clientID")
    consumer_data_set: list[ConsumerData] = []
    producer_data_set: list[ProducerData] = []


class CheckClientRequestBody(Body, kw_only=True):
    client_id: str = ""
    group: str = ""
    subscription_data: SubscriptionData


class LockBatchRequestBody(Body, kw_only=True):
    client_id: str
    consumer_group: str
    mq_set: list[MessageQueue] = []


class UnlockBatchRequestBody(LockBatchRequestBody, kw_only=True):
    pass


class LockBatchResponseBody(Body, kw_only=True):
    lock_ok_mq_set: list[MessageQueue] = field(default_factory=list, name="lockOKMQSet")


class GetConsumerListByGroupResponseBody(Body, kw_only=True):
    consumer_id_list: list[str] = []


class Connection(Body, kw_only=True):
    client_addr: str
    client_id: str
    language: str
    version: int


class ConsumerConnection(Body, kw_only=True):
    connection_set: list[Connection] = []
    consume_from_where: str = CONSUME_FROM_WHERE[0]
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = "CLUSTERING"
    subscription_table: dict[str, SubscriptionData] = {}


class ProducerConnection(Body, kw_only=True):
    connection_set: list[Connection] = []


class ProducerInfo(Body, kw_only=True):
    client_id: str
    language: str
    last_update_timestamp: int
    remote_ip: str = field(name="remoteIP")
    version: int


class ProducerTableInfo(Body, kw_only=True):
    data: dict[str, list[ProducerInfo]] = {}


# --- reading and writing -------------------------------------------------------------------


def decode(kind: type[B], data: bytes) -> B:
    """Read a body; ProtocolError names the type and the member or position at fault."""
    if not kind.object_keys and b'"$ref"' not in data:
        try:
            return msgspec.json.decode(data, type=kind, strict=False)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # read again below, more slowly and more leniently
    try:
        return msgspec.convert(_repair(fastjson.loads(data), kind), kind, strict=False)
    except (ProtocolError, msgspec.ValidationError) as error:
        raise ProtocolError(f"{kind.__name__}: {error}") from error
    except RecursionError:
        raise ProtocolError(f"{kind.__name__}: nested too deep") from None


def encode(body: Body, *, standard: bool = False, pretty: bool = False) -> bytes:
    """Write a body. `standard` quotes integer and object keys, as strict readers need it;
    `pretty` is the form of upstream's files."""
    if pretty or type(body).bare_keys or type(body).object_keys:
        return fastjson.dumps(_builtins(body), pretty=pretty, quote_keys=standard)
    return msgspec.json.encode(body)


def encode_rows(rows: dict[MessageQueue, Any]) -> bytes:
    """Rows of a table by queue as `encode` writes them, without the braces around the table."""
    return fastjson.dumps(_builtins(rows))[1:-1]


def _repair(value: Any, kind: type[Body]) -> Any:
    """Drop null members, turn object keys into MessageQueues and ordinals into text."""
    if isinstance(value, list):
        # A call per number of a long list would take longer than to read it.
        return [
            _repair(item, kind) if type(item) is dict or type(item) is list else item
            for item in value
            if item is not None
        ]
    if not isinstance(value, dict):
        return value
    out: dict[Any, Any] = {}
    for key, item in value.items():
        if item is None:
            continue
        if key in _ENUMERATIONS and type(item) is int:
            item = str(item)
        out[_queue(key) if kind.object_keys else key] = _repair(item, kind)
    return out


def _queue(key: Any) -> Any:
    if isinstance(key, fastjson.ObjectKey):
        return msgspec.convert(dict(key), MessageQueue, strict=False)
    if isinstance(key, str) and key.startswith("{"):
        # The object as text, which is how a writer of standard JSON has to put it.
        return msgspec.convert(fastjson.loads(key), MessageQueue, strict=False)
    return key


def _builtins(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        kind = type(value)
        pairs = zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
        members = ((wire_name, getattr(value, name)) for name, wire_name in pairs)
        return {name: _builtins(member) for name, member in members if member is not UNSET}
    if isinstance(value, dict):
        if value and all(isinstance(key, int) for key in value):
            return {key: _builtins(value[key]) for key in sorted(value)}
        return {
            fastjson.ObjectKey.of(_builtins(key)) if isinstance(key, MessageQueue) else key: (
                _builtins(item)
            )
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_builtins(item) for item in value]
    return value


def _enumeration(value: str, names: tuple[str, ...]) -> str:
    """A name in upper case. Compat: the C++ client sends the ordinal."""
    if value.isascii() and value.isdigit():
        return names[int(value)] if len(value) < 3 and int(value) < len(names) else names[0]
    return value.upper()
