"""Every option of the source, parsed once into one frozen value that travels to the tasks.

Parsing needs neither pyspark nor a cluster. A value that is wrong in itself, or makes no sense with
another option, is refused here, with the option's name. `check_batch` and `check_stream` refuse
what a batch or a stream cannot have.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Self

from cosmodrome.client.options import name_servers
from cosmodrome.errors import ConfigError
from cosmodrome.spark.option_values import OptionValues, require_name
from cosmodrome.spark.read.offsets import EARLIEST, LATEST, Offsets, from_json, queues_from_json
from cosmodrome.spark.read.rows import COLUMNS, CORRUPT, NEVER_NULL, NONE, check_columns
from cosmodrome.wire.bodies import MessageQueue
from cosmodrome.wire.message import join_address
from cosmodrome.wire.names import check_group, check_topic

CONNECTION_OPTIONS = (
    "namesrv",
    "accessKey",
    "secretKey",
    "securityToken",
    "namespace",
    "vipChannel",
    "tls",
    "tlsCa",
    "tlsCert",
    "tlsKey",
    "tlsVerify",
    "timeoutMs",
    "retries",
)
_LIVE_OPTIONS = (
    *CONNECTION_OPTIONS,
    "startingOffsets",
    "endingOffsets",
    "failOnDataLoss",
    "minPartitions",
    "sql",
    "dedupe",
    "maxOffsetsPerTrigger",
    "maxBytesPerTrigger",
    "pullBytes",
    "pullsAhead",
    "consumerGroup",
)
_STORE_OPTIONS = ("brokerName", "mode", "splitBytes", "checkCrc", "includeSystem")
_COMMON_OPTIONS = (
    "path",
    "storePath",
    "subscribe",
    "subscribePattern",
    "assign",
    "includeRetry",
    "startingTimestamp",
    "endingTimestamp",
    "tags",
    "columns",
)
READ_OPTIONS = (*_LIVE_OPTIONS, *_STORE_OPTIONS, *_COMMON_OPTIONS)

PERMISSIVE, DROP_MALFORMED, FAIL_FAST = "permissive", "dropMalformed", "failFast"

# What startingOffsets and endingOffsets may say: a word for every queue, or a map.
OffsetsOption = str | Offsets
EARLIEST_WORD, LATEST_WORD = "earliest", "latest"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How to reach the cluster and be let in; the same for source and sink."""

    namesrv: str  # host:port;host:port
    access_key: str | None = None
    secret_key: str | None = dataclasses.field(default=None, repr=False)
    security_token: str | None = dataclasses.field(default=None, repr=False)
    tls: bool = False
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_verify: bool = True
    namespace: str = ""
    vip: bool = False
    timeout_ms: int = 10_000
    retries: int = 5

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Self:
        """From options that may hold others too; the caller knows which those are."""
        names = {name.lower() for name in CONNECTION_OPTIONS}
        ours = {key: value for key, value in options.items() if key.lower() in names}
        values = OptionValues(ours, CONNECTION_OPTIONS)
        servers = name_servers(values.text("namesrv"))
        _check_pairs(values)
        tls_files = [name for name in ("tlsCa", "tlsCert", "tlsKey", "tlsVerify") if name in values]
        tls = values.flag("tls", bool(tls_files))
        if tls_files and not tls:
            raise ConfigError(f"{tls_files[0]} makes no sense with tls=false; leave one out")
        namespace = values.text("namespace") or ""
        if namespace:
            require_name(check_topic, namespace, "namespace")
        return cls(
            namesrv=";".join(join_address(host, port) for host, port in servers),
            access_key=values.text("accessKey"),
            secret_key=values.text("secretKey"),
            security_token=values.text("securityToken"),
            tls=tls,
            tls_ca=values.text("tlsCa"),
            tls_cert=values.text("tlsCert"),
            tls_key=values.text("tlsKey"),
            tls_verify=values.flag("tlsVerify", True),
            namespace=namespace,
            vip=values.flag("vipChannel", False),
            timeout_ms=values.whole("timeoutMs", 10_000, least=100, most=600_000),
            retries=values.whole("retries", 5, least=0, most=1_000),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """All of the source's options. Exactly one of topics, pattern, assign says what is read;
    with `store_path` none of them means every topic of the store."""

    connection: Connection
    topics: tuple[str, ...] = ()
    pattern: str | None = None  # a topic name must match all of it
    assign: tuple[MessageQueue, ...] = ()
    include_retry: bool = False  # %RETRY% and %DLQ% topics may match the pattern
    starting: OffsetsOption | None = None  # None: by default
    ending: OffsetsOption | None = None
    starting_ms: int | None = None  # wins over `starting`
    ending_ms: int | None = None  # wins over `ending`; exclusive
    fail_on_data_loss: bool = True
    rows_per_trigger: int | None = None
    bytes_per_trigger: int | None = None
    min_partitions: int | None = None
    tags: tuple[str, ...] = ()  # empty: all
    sql: str | None = None
    columns: tuple[str, ...] = COLUMNS  # without the corrupt column
    corrupt: bool = False  # the corrupt column comes last
    required: frozenset[str] = NONE  # columns that Spark is told to be never null
    pull_bytes: int = 4 << 20
    pulls_ahead: int = 8
    consumer_group: str | None = None
    dedupe: bool = False
    store_path: str | None = None
    broker_name: str | None = None
    mode: str = PERMISSIVE
    split_bytes: int = 64 << 20
    check_crc: bool = True
    include_system: bool = False

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Self:
        values = OptionValues(options, READ_OPTIONS)
        offline = "storePath" in values
        _check_side(values, offline)
        topics, pattern, assign = _subjects(values, offline)
        group = values.text("consumerGroup")
        if group is not None:
            require_name(check_group, group, "consumerGroup")
        sql = values.text("sql")
        tags = _tags(values.text("tags"))
        if sql is not None and tags:
            raise ConfigError("tags and sql exclude each other; say the tags in sql as TAGS IN (…)")
        include_retry = values.flag("includeRetry", False)
        if include_retry and (topics or assign):
            raise ConfigError(
                "includeRetry is for subscribePattern; name the %RETRY% and %DLQ% topics instead"
            )
        mode = values.choice("mode", (PERMISSIVE, DROP_MALFORMED, FAIL_FAST), PERMISSIVE)
        columns, corrupt = _columns(values, offline and mode == PERMISSIVE)
        parsed = cls(
            connection=Connection(namesrv="") if offline else Connection.parse(options),
            topics=topics,
            pattern=pattern,
            assign=assign,
            include_retry=include_retry,
            starting=_offsets_option(values, "startingOffsets"),
            ending=_offsets_option(values, "endingOffsets"),
            starting_ms=values.moment_ms("startingTimestamp"),
            ending_ms=values.moment_ms("endingTimestamp"),
            fail_on_data_loss=values.flag("failOnDataLoss", True),
            rows_per_trigger=values.optional_whole("maxOffsetsPerTrigger"),
            bytes_per_trigger=values.optional_size("maxBytesPerTrigger"),
            min_partitions=values.optional_whole("minPartitions", most=1_000_000),
            tags=tags,
            sql=sql,
            columns=columns,
            required=NONE if offline else NEVER_NULL.intersection(columns),
            corrupt=corrupt,
            pull_bytes=values.size("pullBytes", 4 << 20, least=1 << 10, most=1 << 30),
            pulls_ahead=values.whole("pullsAhead", 8, most=256),
            consumer_group=group,
            dedupe=values.flag("dedupe", False),
            store_path=values.text("storePath"),
            broker_name=values.text("brokerName"),
            mode=mode,
            split_bytes=values.size("splitBytes", 64 << 20, least=1 << 10),
            check_crc=values.flag("checkCrc", True),
            include_system=values.flag("includeSystem", False),
        )
        parsed._check_span()
        return parsed

    def with_columns(
        self, columns: tuple[str, ...], corrupt: bool, required: frozenset[str]
    ) -> Self:
        return dataclasses.replace(self, columns=columns, corrupt=corrupt, required=required)

    def check_batch(self) -> None:
        """Refuses what a batch cannot have."""
        if self.rows_per_trigger is not None or self.bytes_per_trigger is not None:
            name = "maxOffsetsPerTrigger" if self.rows_per_trigger else "maxBytesPerTrigger"
            raise ConfigError(
                f"{name} is for streams; bound a batch with endingOffsets or endingTimestamp"
            )
        _refuse_offsets(self.starting, LATEST_WORD, LATEST, "startingOffsets of a batch")

    def check_stream(self) -> None:
        """Refuses what a stream cannot have."""
        if self.store_path is not None:
            raise ConfigError(
                "storePath cannot be streamed; read it as a batch, or stream the topic from"
                " its broker"
            )
        if self.ending is not None or self.ending_ms is not None:
            name = "endingTimestamp" if self.ending is None else "endingOffsets"
            raise ConfigError(f"{name} is for batches; a stream has no end: use trigger or stop it")

    def _check_span(self) -> None:
        _refuse_offsets(self.ending, EARLIEST_WORD, EARLIEST, "endingOffsets")
        if (
            self.starting_ms is not None
            and self.ending_ms is not None
            and self.starting_ms > self.ending_ms
        ):
            raise ConfigError(
                f"startingTimestamp {self.starting_ms} lies after endingTimestamp {self.ending_ms}"
            )


def _check_side(values: OptionValues, offline: bool) -> None:
    for name in _LIVE_OPTIONS if offline else _STORE_OPTIONS:
        if name in values:
            raise ConfigError(
                f"{name} asks a broker and makes no sense with storePath; leave one out"
                if offline
                else f"{name} is for reading files; give storePath too or leave it out"
            )


def _subjects(
    values: OptionValues, offline: bool
) -> tuple[tuple[str, ...], str | None, tuple[MessageQueue, ...]]:
    names = [n for n in ("path", "subscribe", "subscribePattern", "assign") if n in values]
    if len(names) > 1:
        raise ConfigError(f"{names[0]} and {names[1]} exclude each other; give one of them")
    if not names and not offline:
        raise ConfigError(
            "which topic? give subscribe, subscribePattern, assign, .load(topic), or storePath"
        )
    topics = values.words("path") or values.words("subscribe")
    for topic in topics:
        require_name(check_topic, topic, "subscribe")
    pattern = values.text("subscribePattern")
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"subscribePattern={pattern!r} is not a regular expression: {error}"
            ) from None
    assigned = values.text("assign")
    return topics, pattern, queues_from_json(assigned) if assigned is not None else ()


def _columns(values: OptionValues, permissive_store: bool) -> tuple[tuple[str, ...], bool]:
    words = values.words("columns")
    if not words:
        return COLUMNS, permissive_store
    return choose_columns(words, permissive_store)


def choose_columns(names: tuple[str, ...], corrupt_known: bool) -> tuple[tuple[str, ...], bool]:
    """Splits the corrupt column off a list of columns and checks the rest."""
    corrupt = CORRUPT in names
    if corrupt and not corrupt_known:
        raise ConfigError(f"{CORRUPT} exists only with storePath and mode={PERMISSIVE}")
    if corrupt and names[-1] != CORRUPT:
        raise ConfigError(f"{CORRUPT} must be the last column")
    rest = names[:-1] if corrupt else names
    if not rest:
        raise ConfigError(f"{CORRUPT} needs another column beside it, e.g. topic")
    return check_columns(rest), corrupt


def _tags(text: str | None) -> tuple[str, ...]:
    """`A || B` as consumers subscribe; `*` is everything."""
    if text is None or text == "*":
        return ()
    tags = tuple(dict.fromkeys(part.strip() for part in text.split("||") if part.strip()))
    if not tags or "*" in tags:
        raise ConfigError(f"tags={text!r}: write them as A || B, or leave the option out for all")
    return tags


def _offsets_option(values: OptionValues, name: str) -> OffsetsOption | None:
    text = values.text(name)
    if text is None:
        return None
    word = text.lower()
    if word in (EARLIEST_WORD, LATEST_WORD):
        return word
    if not text.startswith("{"):
        raise ConfigError(f"{name}={text[:80]!r}: write earliest, latest or JSON offsets")
    return from_json(text, what=name)


def _refuse_offsets(option: OffsetsOption | None, word: str, number: int, what: str) -> None:
    if option == word or (isinstance(option, dict) and number in option.values()):
        raise ConfigError(f"{what}: {word} ({number}) would read nothing; give other offsets")


def _check_pairs(values: OptionValues) -> None:
    if ("accessKey" in values) != ("secretKey" in values):
        raise ConfigError("accessKey and secretKey belong together; give both or none")
    if "securityToken" in values and "accessKey" not in values:
        raise ConfigError("securityToken needs accessKey and secretKey")
    if "tlsKey" in values and "tlsCert" not in values:
        raise ConfigError("tlsKey needs tlsCert")
