"""Every option of the source, parsed once into one frozen value that travels to the tasks.

Parsing needs neither pyspark nor a cluster: whatever is wrong in itself, or makes no sense with
another option, is refused here, with the option's name. What only a batch or only a stream can
have is checked by `check_batch` and `check_stream`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Self

from cosmodrome.client.options import name_servers
from cosmodrome.errors import ConfigError, Refused
from cosmodrome.spark.given import Given
from cosmodrome.spark.offsets import EARLIEST, LATEST, Offsets, from_json, queues_from_json
from cosmodrome.spark.rows import COLUMNS, CORRUPT, NEVER_NULL, NONE, check_columns
from cosmodrome.wire.bodies import MessageQueue
from cosmodrome.wire.names import check_group, check_topic

CONNECTION_OPTIONS = (
    *("namesrv", "accessKey", "secretKey", "securityToken", "namespace", "vipChannel"),
    *("tls", "tlsCa", "tlsCert", "tlsKey", "tlsVerify", "timeoutMs", "retries"),
)
_LIVE_OPTIONS = (
    *CONNECTION_OPTIONS,
    *("startingOffsets", "endingOffsets", "failOnDataLoss", "minPartitions", "sql", "dedupe"),
    *("maxOffsetsPerTrigger", "maxBytesPerTrigger", "pullBytes", "pullsAhead", "consumerGroup"),
)
_STORE_OPTIONS = ("brokerName", "mode", "splitBytes", "checkCrc", "includeSystem")
_COMMON_OPTIONS = (
    *("path", "storePath", "subscribe", "subscribePattern", "assign", "includeRetry"),
    *("startingTimestamp", "endingTimestamp", "tags", "columns"),
)
READ_OPTIONS = (*_LIVE_OPTIONS, *_STORE_OPTIONS, *_COMMON_OPTIONS)

PERMISSIVE, DROP_MALFORMED, FAIL_FAST = "permissive", "dropMalformed", "failFast"

# What a place option may say: a word for every queue, or a map.
Place = str | Offsets
EARLIEST_WORD, LATEST_WORD = "earliest", "latest"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How to reach and convince the cluster; the same for source and sink."""

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
        given = Given(ours, CONNECTION_OPTIONS)
        servers = name_servers(given.text("namesrv"))
        _check_pairs(given)
        tls_files = [name for name in ("tlsCa", "tlsCert", "tlsKey", "tlsVerify") if name in given]
        tls = given.flag("tls", bool(tls_files))
        if tls_files and not tls:
            raise ConfigError(f"{tls_files[0]} makes no sense with tls=false; leave one out")
        namespace = given.text("namespace") or ""
        if namespace:
            _checked("namespace", check_topic, namespace)
        return cls(
            namesrv=";".join(_address(host, port) for host, port in servers),
            access_key=given.text("accessKey"),
            secret_key=given.text("secretKey"),
            security_token=given.text("securityToken"),
            tls=tls,
            tls_ca=given.text("tlsCa"),
            tls_cert=given.text("tlsCert"),
            tls_key=given.text("tlsKey"),
            tls_verify=given.flag("tlsVerify", True),
            namespace=namespace,
            vip=given.flag("vipChannel", False),
            timeout_ms=given.whole("timeoutMs", 10_000, least=100, most=600_000),
            retries=given.whole("retries", 5, least=0, most=1_000),
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
    starting: Place | None = None  # None: not given
    ending: Place | None = None
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
        given = Given(options, READ_OPTIONS)
        offline = "storePath" in given
        _check_side(given, offline)
        topics, pattern, assign = _subjects(given, offline)
        group = given.text("consumerGroup")
        if group is not None:
            _checked("consumerGroup", check_group, group)
        sql = given.text("sql")
        tags = _tags(given.text("tags"))
        if sql is not None and tags:
            raise ConfigError("tags and sql exclude each other; say the tags in sql as TAGS IN (…)")
        include_retry = given.flag("includeRetry", False)
        if include_retry and (topics or assign):
            raise ConfigError(
                "includeRetry is for subscribePattern; name the %RETRY% and %DLQ% topics instead"
            )
        mode = given.choice("mode", (PERMISSIVE, DROP_MALFORMED, FAIL_FAST), PERMISSIVE)
        columns, corrupt = _columns(given, offline and mode == PERMISSIVE)
        parsed = cls(
            connection=Connection(namesrv="") if offline else Connection.parse(options),
            topics=topics,
            pattern=pattern,
            assign=assign,
            include_retry=include_retry,
            starting=_place(given, "startingOffsets"),
            ending=_place(given, "endingOffsets"),
            starting_ms=given.moment_ms("startingTimestamp"),
            ending_ms=given.moment_ms("endingTimestamp"),
            fail_on_data_loss=given.flag("failOnDataLoss", True),
            rows_per_trigger=given.optional_whole("maxOffsetsPerTrigger"),
            bytes_per_trigger=given.optional_size("maxBytesPerTrigger"),
            min_partitions=given.optional_whole("minPartitions", most=1_000_000),
            tags=tags,
            sql=sql,
            columns=columns,
            required=NONE if offline else NEVER_NULL.intersection(columns),
            corrupt=corrupt,
            pull_bytes=given.size("pullBytes", 4 << 20, least=1 << 10, most=1 << 30),
            pulls_ahead=given.whole("pullsAhead", 8, most=256),
            consumer_group=group,
            dedupe=given.flag("dedupe", False),
            store_path=given.text("storePath"),
            broker_name=given.text("brokerName"),
            mode=mode,
            split_bytes=given.size("splitBytes", 64 << 20, least=1 << 10),
            check_crc=given.flag("checkCrc", True),
            include_system=given.flag("includeSystem", False),
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
        _refuse_place(self.starting, LATEST_WORD, LATEST, "startingOffsets of a batch")

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
        _refuse_place(self.ending, EARLIEST_WORD, EARLIEST, "endingOffsets")
        if (
            self.starting_ms is not None
            and self.ending_ms is not None
            and self.starting_ms > self.ending_ms
        ):
            raise ConfigError(
                f"startingTimestamp {self.starting_ms} lies after endingTimestamp {self.ending_ms}"
            )


def _check_side(given: Given, offline: bool) -> None:
    for name in _LIVE_OPTIONS if offline else _STORE_OPTIONS:
        if name in given:
            raise ConfigError(
                f"{name} asks a broker and makes no sense with storePath; leave one out"
                if offline
                else f"{name} is for reading files; give storePath too or leave it out"
            )


def _subjects(
    given: Given, offline: bool
) -> tuple[tuple[str, ...], str | None, tuple[MessageQueue, ...]]:
    names = [n for n in ("path", "subscribe", "subscribePattern", "assign") if n in given]
    if len(names) > 1:
        raise ConfigError(f"{names[0]} and {names[1]} exclude each other; give one of them")
    if not names and not offline:
        raise ConfigError(
            "which topic? give subscribe, subscribePattern, assign, .load(topic), or storePath"
        )
    topics = given.words("path") or given.words("subscribe")
    for topic in topics:
        _checked("subscribe", check_topic, topic)
    pattern = given.text("subscribePattern")
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"subscribePattern={pattern!r} is no regular expression: {error}"
            ) from None
    assigned = given.text("assign")
    return topics, pattern, queues_from_json(assigned) if assigned is not None else ()


def _columns(given: Given, permissive_store: bool) -> tuple[tuple[str, ...], bool]:
    words = given.words("columns")
    if not words:
        return COLUMNS, permissive_store
    return choose_columns(words, permissive_store)


def choose_columns(names: tuple[str, ...], corrupt_known: bool) -> tuple[tuple[str, ...], bool]:
    """Splits the corrupt column off a list of asked columns and checks the rest."""
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


def _place(given: Given, name: str) -> Place | None:
    text = given.text(name)
    if text is None:
        return None
    word = text.lower()
    if word in (EARLIEST_WORD, LATEST_WORD):
        return word
    if not text.startswith("{"):
        raise ConfigError(f"{name}={text[:80]!r}: write earliest, latest or JSON offsets")
    return from_json(text, what=name)


def _refuse_place(place: Place | None, word: str, number: int, what: str) -> None:
    if place == word or (isinstance(place, dict) and number in place.values()):
        raise ConfigError(f"{what}: {word} ({number}) would read nothing; give another place")


def _check_pairs(given: Given) -> None:
    if ("accessKey" in given) != ("secretKey" in given):
        raise ConfigError("accessKey and secretKey belong together; give both or none")
    if "securityToken" in given and "accessKey" not in given:
        raise ConfigError("securityToken needs accessKey and secretKey")
    if "tlsKey" in given and "tlsCert" not in given:
        raise ConfigError("tlsKey needs tlsCert")


def _checked(option: str, check: Callable[[str], None], name: str) -> None:
    try:
        check(name)
    except Refused as error:
        raise ConfigError(f"{option}: {error.remark}") from None


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
