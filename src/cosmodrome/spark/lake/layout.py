"""The layout of an archive, and writes into it that may be repeated.

    PATH/topic=T/date=D/batch=N/*.parquet   the rows; or a Delta table with the same columns
    PATH/_cosmodrome/archive.json           what this archive is
    PATH/_cosmodrome/checkpoint/            Spark's truth about the stream
    PATH/_cosmodrome/progress/N.json        end offset per queue after batch N
    PATH/_cosmodrome/schema.json            versions of the schema of JSON bodies
    PATH/_cosmodrome/compaction/            what is being merged
    PATH/_cosmodrome/lock.json              who writes

Spark does not list names that begin with `_`, so PATH itself is the table for any reader.

Every batch of the stream owns one partition value, so a batch that is run again replaces exactly
its own rows; with Delta its number is that of the transaction. Merged rows have a negative one. A
progress file is written when its batch is complete in the lake: rows with `batch <= N` are
exactly those below the offsets of `progress/N.json`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql import Observation
from pyspark.sql import functions as F
from pyspark.sql.types import DateType, LongType, StructField, StructType

from cosmodrome.errors import ConfigError, CosmodromeError, StoreCorrupt
from cosmodrome.spark.lake.files import LakeFiles
from cosmodrome.spark.read import offsets, rows
from cosmodrome.spark.read.offsets import Offsets
from cosmodrome.wire.bodies import MessageQueue

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

FORMAT_VERSION = 1
PARQUET, DELTA = "parquet", "delta"
OURS = "_cosmodrome"
CHECKPOINT = f"{OURS}/checkpoint"
LOCK = f"{OURS}/lock.json"
DATE, BATCH, VALUE = "date", "batch", "value"
PROGRESS_KEPT = 20

_INFO = f"{OURS}/archive.json"
_PROGRESS = f"{OURS}/progress"
_STAGING = ".spark-staging"
_DAY_S = 86_400
_PATTERNS = frozenset("*?[]{}\\")
_OBSERVED_WAIT_S = 3.0  # it comes a moment after the action, from another thread of Spark
_OBSERVED_POLL_S = 0.01
# INT96, Spark's default, has no statistics: nothing could be skipped by time.
_TIMESTAMPS = ("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveInfo:
    """What an archive is; the id never changes."""

    id: str
    lake: str
    subject: dict[str, str]  # subscribe or subscribePattern
    filters: dict[str, str]  # tags or sql: the archive holds no other messages
    json: bool = False
    created_ms: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What the lake holds: all rows of batches up to `batch`, every queue up to its end."""

    batch: int
    query: str  # id in Spark's checkpoint
    ends: Offsets
    rows: int  # since the beginning of the archive
    newest_ms: int  # store time of the newest row
    at_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    rows: int
    newest_ms: int


class Lake:
    """An archive that exists."""

    def __init__(self, spark: SparkSession, files: LakeFiles, info: ArchiveInfo) -> None:
        self.spark = spark
        self.files = files
        self.info = info

    @classmethod
    def open(cls, spark: SparkSession, path: str) -> Lake:
        found = find_lake(spark, path)
        if found is None:
            raise ConfigError(
                f"{path} is not an archive: {_INFO} is missing below it; name the directory that"
                " `cosmo pipeline archive` wrote"
            )
        return found

    @classmethod
    def create(cls, spark: SparkSession, path: str, info: ArchiveInfo) -> Lake:
        patterns = sorted(_PATTERNS & set(path))
        if patterns:
            raise ConfigError(
                f"{path} has the character {patterns[0]!r}, which Spark reads as a pattern: rows"
                " could be written there and not be read; choose another directory"
            )
        files = LakeFiles(spark, path)
        strangers = [e.name for e in files.list() if not e.name.startswith(("_", "."))]
        if strangers:
            raise ConfigError(
                f"{path} holds {strangers[0]!r} and no archive; choose an empty directory"
            )
        lake = cls(spark, files, info)
        lake.save_info(info)
        return lake

    def save_info(self, info: ArchiveInfo) -> None:
        document = {"version": FORMAT_VERSION, **dataclasses.asdict(info)}
        self.files.write_json(_INFO, document)
        self.info = info

    # Progress

    def progress(self) -> Progress | None:
        """The newest one."""
        names = self._progress_names()
        if not names:
            return None
        name = f"{_PROGRESS}/{names[-1]}"
        document = self.files.read_json(name)
        try:
            return Progress(
                batch=int(document["batch"]),
                query=str(document["query"]),
                ends=offsets.from_json(document["ends"], what=self.files.path(name)),
                rows=int(document["rows"]),
                newest_ms=int(document["newest_ms"]),
                at_ms=int(document["at_ms"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StoreCorrupt(f"{self.files.path(name)} is damaged: {error!r}") from None

    def record(self, progress: Progress) -> None:
        document = {
            "batch": progress.batch,
            "query": progress.query,
            "ends": offsets.to_json(progress.ends),
            "rows": progress.rows,
            "newest_ms": progress.newest_ms,
            "at_ms": progress.at_ms,
        }
        self.files.write_json(f"{_PROGRESS}/{progress.batch:020d}.json", document)
        for name in self._progress_names()[:-PROGRESS_KEPT]:
            self.files.remove(f"{_PROGRESS}/{name}")

    def _progress_names(self) -> list[str]:
        found = (entry.name for entry in self.files.list(_PROGRESS))
        return [name for name in found if name.endswith(".json")]

    def checkpoint_id(self) -> str | None:
        """The query that the checkpoint belongs to."""
        document = self.files.read_json(f"{CHECKPOINT}/metadata")
        return str(document["id"]) if isinstance(document, dict) and "id" in document else None

    def planned_ends(self, batch: int) -> Offsets | None:
        """End offsets of a batch as Spark's own log has them; None when it is not as expected."""
        text = self.files.read(f"{CHECKPOINT}/offsets/{batch}")
        if text is None:
            return None
        lines = text.splitlines()
        if len(lines) != 3 or lines[0] != "v1":
            return None
        with contextlib.suppress(CosmodromeError, ValueError):
            ends, _ = offsets.without_starts(json.loads(lines[2]))
            return ends if all(end >= 0 for end in ends.values()) else None
        return None

    def written_ends(self, batch: int) -> Offsets:
        """End offsets of a batch from its rows in the lake."""
        found = (
            self.rows()
            .where(F.col(BATCH) == batch)
            .groupBy("topic", "broker", "queue_id")
            .agg((F.max("queue_offset") + 1).alias("end"))
            .collect()
        )
        return {
            MessageQueue(topic=row.topic, broker_name=row.broker, queue_id=row.queue_id): row.end
            for row in found
        }

    # Rows

    def write(
        self, frame: DataFrame, batch: int, *, compression: str, merge_schema: bool = False
    ) -> Written:
        """Make the rows of `frame` the rows of this batch, and no others."""
        observed = Observation()
        stamped = frame.observe(observed, *_measures()).withColumns(
            {DATE: utc_date(), BATCH: F.lit(batch).cast("long")}
        )
        if self.info.lake == DELTA:
            (
                stamped.write.format(DELTA)
                .mode("append")
                .option("txnAppId", self.info.id)
                .option("txnVersion", batch)
                .option("mergeSchema", merge_schema)
                .option("compression", compression)
                .partitionBy("topic", DATE)
                .save(self.files.root)
            )
        else:
            with exact_timestamps(frame.sparkSession):
                (
                    stamped.write.mode("overwrite")
                    .option("partitionOverwriteMode", "dynamic")
                    .option("compression", compression)
                    .partitionBy("topic", DATE, BATCH)
                    .parquet(self.files.root)
                )
        seen = measured(observed)
        if seen is None:
            # Delta does not run a transaction that it has already; empty plans may be left out.
            counted = self.rows().where(F.col(BATCH) == batch).agg(*_measures()).first()
            seen = counted.asDict() if counted is not None else {"rows": 0, "newest_ms": 0}
        return Written(rows=int(seen["rows"]), newest_ms=int(seen["newest_ms"]))

    def rows(self, value: StructType | None = None) -> DataFrame:
        """All rows: the source's columns, date, batch, and `value` when its type is given."""
        expected = lake_schema(value)
        if self.info.lake == PARQUET:
            found = self.spark.read.schema(expected).parquet(self.files.root)
        elif self.files.exists("_delta_log"):
            found = self.spark.read.format(DELTA).load(self.files.root)
        else:
            return self.spark.createDataFrame([], expected)
        return found.select(*expected.names)

    def sweep(self) -> None:
        """Remove what a writer that was killed left; only the holder of the lock may."""
        for entry in self.files.list():
            if entry.name.startswith(_STAGING):
                self.files.remove(entry.name)


def find_lake(spark: SparkSession, path: str) -> Lake | None:
    """The archive at a path, if there is one."""
    files = LakeFiles(spark, path)
    document = files.read_json(_INFO)
    if document is None:
        return None
    try:
        version = int(document.pop("version"))
        if version > FORMAT_VERSION:
            raise ConfigError(
                f"{path} has format {version}, this program knows {FORMAT_VERSION};"
                " upgrade cosmodrome"
            )
        info = ArchiveInfo(**document)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise StoreCorrupt(f"{files.path(_INFO)} is damaged: {error!r}") from None
    return Lake(spark, files, info)


def lake_schema(value: StructType | None = None) -> StructType:
    """Columns of the lake in the order of the source, then date, batch and the parsed body."""
    fields = [*rows.schema().fields, StructField(DATE, DateType()), StructField(BATCH, LongType())]
    if value is not None:
        fields.append(StructField(VALUE, value))
    return StructType(fields)


def _measures() -> tuple[Column, Column]:
    return (
        F.count(F.lit(1)).alias("rows"),
        F.coalesce(F.unix_millis(F.max("store_time")), F.lit(0)).alias("newest_ms"),
    )


def measured(observed: Observation) -> dict[str, Any] | None:
    """What was observed by an action that has ended; None when Spark left the observation out.

    `Observation.get` would then wait for ever: Spark may find that there is nothing to run.
    """
    inner: Any = observed
    deadline_s = time.monotonic() + _OBSERVED_WAIT_S
    while not inner._jo.future().isCompleted():
        if time.monotonic() > deadline_s:
            return None
        time.sleep(_OBSERVED_POLL_S)
    return observed.get


def utc_date() -> Column:
    """The date of the store time, whatever the time zone of the session is."""
    return F.expr(f"date_from_unix_date(cast(floor(unix_seconds(store_time) / {_DAY_S}) as int))")


@contextlib.contextmanager
def exact_timestamps(spark: SparkSession) -> Iterator[None]:
    """Parquet written inside has timestamps that readers can skip by."""
    name, expected = _TIMESTAMPS
    before = spark.conf.get(name)
    spark.conf.set(name, expected)
    try:
        yield
    finally:
        spark.conf.set(name, str(before))


def later(ends: Mapping[Any, int], more: Mapping[Any, int]) -> dict[Any, int]:
    """Both maps in one; a queue in both has its larger end."""
    joined = dict(ends)
    for queue, end in more.items():
        joined[queue] = max(end, joined.get(queue, 0))
    return joined
