"""What Spark calls: the data source `rocketmq` (also named `cosmodrome`) and its batch readers.

Spark pickles the source and the readers to its planning processes and tasks; they hold options and
open connections where they run. `register` is needed only where Spark does not find the packages
`pyspark_rocketmq` and `pyspark_cosmodrome` by itself.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    Filter,
    InputPartition,
)
from pyspark.sql.types import StructType

from cosmodrome.errors import ConfigError
from cosmodrome.spark.read.options import PERMISSIVE, ReadOptions, choose_columns
from cosmodrome.spark.read.pushdown import PushedFilters
from cosmodrome.spark.read.rows import COLUMNS, NEVER_NULL, NONE
from cosmodrome.spark.read.rows import schema as rows_schema
from cosmodrome.spark.read.stream import (
    RangePartition,
    TopicStreamReader,
    open_cluster,
    read_partition,
)
from cosmodrome.spark.read.subscription import batch_ranges
from cosmodrome.spark.runtime.memory import freeze_worker
from cosmodrome.wire.names import is_system_topic

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

PUSHDOWN_CONF = "spark.sql.python.filterPushdown.enabled"
_PUSHDOWN_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"


class RocketMQSource(DataSource):
    """`format("rocketmq")`: topics of a cluster, or a store directory, as a table."""

    @classmethod
    def name(cls) -> str:
        return "rocketmq"

    def schema(self) -> StructType:
        freeze_worker()
        options = ReadOptions.parse(self.options)
        return rows_schema(options.columns, corrupt=options.corrupt, required=options.required)

    def reader(self, schema: StructType) -> DataSourceReader:
        freeze_worker()
        options = fit_schema(schema, ReadOptions.parse(self.options))
        options.check_batch()
        pushing = filters_will_come()
        if options.store_path is not None:
            return PushingStoreReader(options) if pushing else StoreReader(options)
        return PushingTopicReader(options) if pushing else TopicReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        freeze_worker()
        options = fit_schema(schema, ReadOptions.parse(self.options))
        options.check_stream()
        return TopicStreamReader(options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from cosmodrome.spark.write.writer import make_writer

        return make_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from cosmodrome.spark.write.writer import make_stream_writer

        return make_stream_writer(self.options, schema, overwrite)


class CosmodromeSource(RocketMQSource):
    """The same under the name of this project."""

    @classmethod
    def name(cls) -> str:
        return "cosmodrome"


class TopicReader(DataSourceReader):
    """A batch of topics; planned when the query is, read by the tasks."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._filters = PushedFilters()

    def partitions(self) -> list[InputPartition]:
        cluster = open_cluster(self._options)
        try:
            spans = batch_ranges(self._options, cluster, self._filters)
        finally:
            cluster.close()
        return [RangePartition(span) for span in spans]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition, self._options)


class PushingTopicReader(TopicReader):
    """The same for a planning process that has filters; see `filters_will_come`."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        return self._filters.take(filters)


class SplitPartition(InputPartition):
    """A byte range of a log file."""

    def __init__(self, split: Any) -> None:
        super().__init__(None)
        self.split = split


class StoreReader(DataSourceReader):
    """A store directory, read without a broker."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        from cosmodrome.spark.read.splits import plan_splits

        return [SplitPartition(split) for split in plan_splits(self._options)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from cosmodrome.spark.read.splits import read_split

        if isinstance(partition, SplitPartition):
            yield from read_split(partition.split, self._options)


class PushingStoreReader(StoreReader):
    """Filters only narrow what is decoded; Spark applies all of them again."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        taken = PushedFilters()
        taken.take(filters)
        self._options = narrowed(self._options, taken)
        return filters


def narrowed(options: ReadOptions, filters: PushedFilters) -> ReadOptions:
    """Options of a store scan that skip what the filters leave out anyway."""
    # To name a system topic is to ask for it; a filter that names one is not.
    topics = [
        name
        for name in sorted(filters.sets.get("topic") or ())
        if options.include_system or not is_system_topic(name)
    ]
    if topics and not (options.topics or options.pattern or options.assign):
        options = dataclasses.replace(options, topics=tuple(topics))
    if filters.since_ms is not None:
        since = max(filters.since_ms, options.starting_ms or 0)
        options = dataclasses.replace(options, starting_ms=since)
    if filters.until_ms is not None:
        until = filters.until_ms if options.ending_ms is None else options.ending_ms
        options = dataclasses.replace(options, ending_ms=min(filters.until_ms, until))
    return options


def fit_schema(schema: StructType, options: ReadOptions) -> ReadOptions:
    """Options that read exactly the columns of a schema, which the user may have given."""
    permissive_store = options.store_path is not None and options.mode == PERMISSIVE
    columns, corrupt = choose_columns(tuple(schema.fieldNames()), permissive_store)
    ours = {field.name: field.dataType for field in rows_schema(columns, corrupt=corrupt)}
    never_null = NONE if options.store_path is not None else NEVER_NULL
    for field in schema:
        if field.dataType != ours[field.name]:
            raise ConfigError(
                f"schema: column {field.name} is {ours[field.name].simpleString()},"
                f" not {field.dataType.simpleString()}; cast it after reading"
            )
        if not field.nullable and field.name not in never_null:
            raise ConfigError(
                f"schema: column {field.name} may be null; leave NOT NULL out, and filter the"
                " rows after reading"
            )
    required = frozenset(field.name for field in schema if not field.nullable)
    if options.columns != COLUMNS and options.columns != columns:
        raise ConfigError("columns and the schema name different columns; give one of them")
    return options.with_columns(columns, corrupt, required)


def filters_will_come() -> bool:
    """Whether this process plans a read with filters.

    Spark has one kind of planning process for queries whose filters are offered and another for
    all others, which refuses a reader that takes filters while push-down is switched off. So a
    reader takes filters only in the former.
    """
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _PUSHDOWN_WORKER in sys.modules or getattr(main, "name", None) == _PUSHDOWN_WORKER


def register(spark: SparkSession) -> None:
    """Makes both names known to a session, and has filters pushed down where that is allowed."""
    for source in (RocketMQSource, CosmodromeSource):
        spark.dataSource.register(source)
    try:
        spark.conf.set(PUSHDOWN_CONF, "true")
    except Exception as error:  # pyspark raises several kinds, by version and kind of session
        log.info("filters stay with Spark: %s cannot be set: %s", PUSHDOWN_CONF, error)
