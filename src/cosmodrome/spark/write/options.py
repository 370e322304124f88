"""Every option of the sink, parsed once on the driver into one frozen value for the tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Self, cast

from cosmodrome.client.options import ClientOptions
from cosmodrome.client.send.packing import Compression
from cosmodrome.errors import ConfigError
from cosmodrome.spark.links import credentials, tls_context
from cosmodrome.spark.option_values import OptionValues, require_name
from cosmodrome.spark.read.options import CONNECTION_OPTIONS, Connection
from cosmodrome.wire.names import check_group, check_topic

PRODUCER_GROUP = "cosmodrome_spark"
MESSAGE_BYTES_MAX = 4 << 20  # what brokers take by default, of a message and of a batch
WRITE_OPTIONS = (
    *CONNECTION_OPTIONS,
    "topic",
    "path",
    "producerGroup",
    "batchRows",
    "batchBytes",
    "inFlight",
    "compress",
    "compressAbove",
    "idempotenceId",
    "checkpointLocation",
)
NO_COMPRESSION = "none"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    connection: Connection
    topic: str | None = None  # of rows that name none
    producer_group: str = PRODUCER_GROUP
    batch_rows: int = 128
    batch_bytes: int = 256 << 10
    in_flight: int = 32  # batches of a task that are on their way
    compression: Compression | None = None
    compress_above_bytes: int = 4_096
    idempotence_id: str | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Self:
        values = OptionValues(options, WRITE_OPTIONS)
        if "topic" in values and "path" in values:
            raise ConfigError("path and topic exclude each other; give one of them")
        topic = values.text("topic") or values.text("path")
        group = values.text("producerGroup") or PRODUCER_GROUP
        require_name(check_group, group)
        if topic is not None:
            require_name(check_topic, topic)
        compress = values.choice(
            "compress", (NO_COMPRESSION, "zlib", "lz4", "zstd"), NO_COMPRESSION
        )
        if compress == NO_COMPRESSION and "compressAbove" in values:
            raise ConfigError("compressAbove needs compress=zlib, lz4 or zstd")
        return cls(
            connection=Connection.parse(options),
            topic=topic,
            producer_group=group,
            batch_rows=values.whole("batchRows", 128, most=100_000),
            batch_bytes=values.size("batchBytes", 256 << 10, least=1 << 10, most=MESSAGE_BYTES_MAX),
            in_flight=values.whole("inFlight", 32, most=4_096),
            compression=None if compress == NO_COMPRESSION else cast(Compression, compress),
            compress_above_bytes=values.size("compressAbove", 4_096),
            idempotence_id=values.text("idempotenceId"),
        )

    def client_options(self) -> ClientOptions:
        connection = self.connection
        return ClientOptions(
            namespace=connection.namespace,
            vip_channel=connection.vip,
            credentials=credentials(connection),
            tls=tls_context(connection),
            call_timeout_ms=connection.timeout_ms,
            connect_timeout_ms=min(connection.timeout_ms, 5_000),
        )
