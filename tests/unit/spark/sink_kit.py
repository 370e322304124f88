"""Writers without Spark: rows as Arrow batches, a context as a task has it, and reading back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import types
from pyspark.sql.pandas.types import to_arrow_schema

from cosmodrome import ReceivedMessage
from cosmodrome.blocking import Node, PullConsumer
from cosmodrome.spark.write.repeats import BATCH_ID, MARK, QUERY_ID, RUN_ID
from cosmodrome.spark.write.writer import Sent, make_stream_writer, make_writer
from cosmodrome.wire.bodies import MessageQueue


@dataclasses.dataclass
class Context:
    """What pyspark's TaskContext says."""

    partition: int = 0
    attempt: int = 0
    task: int = 0
    properties: dict[str, str] = dataclasses.field(default_factory=dict)

    def partitionId(self) -> int:
        return self.partition

    def attemptNumber(self) -> int:
        return self.attempt

    def taskAttemptId(self) -> int:
        return self.task

    def getLocalProperty(self, key: str) -> str | None:
        return self.properties.get(key)


_TYPES: dict[str, types.DataType] = {
    "binary": types.BinaryType(),
    "string": types.StringType(),
    "int": types.IntegerType(),
    "bigint": types.LongType(),
    "timestamp": types.TimestampType(),
    "timestamp_ntz": types.TimestampNTZType(),
    "array<string>": types.ArrayType(types.StringType()),
    "array<int>": types.ArrayType(types.IntegerType()),
    "map<string,string>": types.MapType(types.StringType(), types.StringType()),
    "map<string,int>": types.MapType(types.StringType(), types.IntegerType()),
}


def schema_of(text: str) -> types.StructType:
    """`name type, name type`; pyspark's own parser needs a JVM."""
    fields = [part.split() for part in text.split(", ")]
    return types.StructType([types.StructField(name, _TYPES[kind]) for name, kind in fields])


def in_stream(batch: int, *, run: str = "run-1", query: str = "query-1", **more: int) -> Context:
    return Context(
        properties={QUERY_ID: query, RUN_ID: run, BATCH_ID: str(batch)},
        **more,
    )


def arrow(schema: str, rows: Sequence[Sequence[Any]], size: int = 10_000) -> list[pa.RecordBatch]:
    """Rows as Spark hands them over, `size` at a time."""
    kinds = to_arrow_schema(schema_of(schema), timezone="UTC")
    columns = list(zip(*rows, strict=True)) if rows else [() for _ in kinds]
    table = pa.table([list(column) for column in columns], schema=kinds)
    return table.to_batches(max_chunksize=size)


def write(
    namesrv: str,
    schema: str,
    rows: Sequence[Sequence[Any]] | Iterable[pa.RecordBatch],
    context: Context | None = None,
    *,
    stream: bool = False,
    **options: object,
) -> Sent:
    """One task of one write."""
    texts = {"namesrv": namesrv, "timeoutMs": "60000"}
    texts |= {name: str(value) for name, value in options.items()}
    make = make_stream_writer if stream else make_writer
    writer = make(texts, schema_of(schema), False)
    batches = arrow(schema, rows) if isinstance(rows, list) else rows
    return writer._task.send(batches, context or Context())


def numbered(count: int, key: str | None = None) -> list[list[Any]]:
    return [
        [b"%06d" % number] if key is None else [b"%06d" % number, key] for number in range(count)
    ]


def read(namesrv: str, topic: str) -> dict[MessageQueue, list[ReceivedMessage]]:
    """Every message of a topic, queue by queue."""
    found: dict[MessageQueue, list[ReceivedMessage]] = {}
    with PullConsumer(namesrv, group="readers") as consumer:
        for queue in consumer.queues(topic):
            messages = found[queue] = []
            while True:
                pulled = consumer.pull(queue, len(messages), max_count=1_000)
                messages += pulled.messages
                if len(messages) >= pulled.max_offset:
                    break
    return found


def bodies(namesrv: str, topic: str) -> list[bytes]:
    return sorted(message.body for queue in read(namesrv, topic).values() for message in queue)


def marks(node: Node, topic: str) -> list[str | None]:
    found = [m for queue in read(node.namesrv, topic).values() for m in queue]
    return [m.properties.get(MARK) for m in sorted(found, key=lambda m: m.body)]
