"""The job `archive`: topics into a lake, exactly once, as a stream or up to now.

    from cosmodrome.spark.jobs.archive import archive

    archive(spark, ["orders"], "/lake/orders", namesrv="127.0.0.1:9876", once=True)

`spark/lake/archiving.py` puts rows into the lake; `spark/lake/layout.py` says what it looks like.
"""

from __future__ import annotations

import dataclasses
import json as json_codec
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from cosmodrome.env.base import Env
from cosmodrome.env.real import real_env
from cosmodrome.errors import ConfigError, CosmodromeError
from cosmodrome.spark.jobs.job import JobContext, job, stop_requests
from cosmodrome.spark.read.offsets import from_json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from cosmodrome.spark.lake.archiving import Archiver
    from cosmodrome.spark.lake.layout import Lake

ROWS_PER_BATCH = 1_000_000
COMPACT_AFTER = 32
TRIGGER = "10 seconds"
COMPRESSION = "zstd"
_POLL_S = 0.5
_SOURCE = "rocketmq"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How far an archive is."""

    rows: int  # written by this run
    rows_per_s: float
    batch: int  # the newest that is complete; -1: none yet
    total: int  # rows of the archive
    lag: int | None  # messages that wait at the brokers; None: not known yet
    lag_s: float | None  # age of the newest archived message while others wait
    merged: int = 0  # directories that compaction replaced

    def line(self) -> str:
        behind = "" if self.lag is None else f", lag {self.lag:,} messages"
        if self.lag and self.lag_s is not None:
            behind += f" ({self.lag_s:,.0f} s)"
        return f"archived {self.rows:,} rows ({self.rows_per_s:,.0f}/s), batch {self.batch}{behind}"


def archive(
    spark: SparkSession,
    topics: str | Sequence[str] | None,
    path: str,
    *,
    namesrv: str,
    pattern: str | None = None,
    once: bool = False,
    trigger: str = TRIGGER,
    starting: str = "earliest",
    format: str | None = None,
    json: bool = False,
    tags: str | None = None,
    sql: str | None = None,
    group: str | None = None,
    rows_per_batch: int = ROWS_PER_BATCH,
    compact_after: int = COMPACT_AFTER,
    compact: bool = False,
    compression: str = COMPRESSION,
    options: Mapping[str, str] | None = None,
    watch: Callable[[Status], None] | None = None,
    stop: Callable[[], object] | None = None,
    env: Env | None = None,
) -> Status:
    """Copy topics into the lake at `path` until `stop` says so, or with `once` up to now.

    `options` are further options of the source (access keys, TLS, pullBytes, ...). `watch` gets
    the newest status about twice a second; `stop` is asked as often, and ends the stream after its
    running batch. A call on the same path goes on where the one before ended."""
    from cosmodrome.spark.lake.archiving import Archiver
    from cosmodrome.spark.lake.layout import LOCK
    from cosmodrome.spark.lake.lock import LakeLock

    env = env or real_env()
    if rows_per_batch < 1 or compact_after < 1:
        raise ConfigError("rows_per_batch and compact_after must be 1 or more")
    filters = {name: value for name, value in (("tags", tags), ("sql", sql)) if value}
    subject = _subject(topics, pattern)
    lake = _lake(spark, path, subject=subject, filters=filters, format=format, json=json, env=env)
    lock = LakeLock(lake.files, LOCK, env)
    with lock.held("cosmo pipeline archive"):
        archiver = Archiver(lake, lock, env, compression=compression, compact_after=compact_after)
        archiver.check_checkpoint()
        archiver.recover()
        reading = {
            **(options or {}),
            **lake.info.subject,
            **lake.info.filters,
            "namesrv": namesrv,
            "consumerGroup": group or f"cosmodrome_archive_{lake.info.id}",
            "maxOffsetsPerTrigger": str(rows_per_batch),
            **_start(starting),
        }
        query = _start_query(spark, archiver, reading, None if once else trigger)
        status = _follow(query, archiver, beat=lock.beat, watch=watch, stop=stop, env=env)
        if compact:
            archiver.compact(everything=True)
            return dataclasses.replace(status, merged=archiver.merged.directories)
    return status


def compact_archive(
    spark: SparkSession, path: str, *, compression: str = COMPRESSION, env: Env | None = None
) -> int:
    """Merge the small directories of an archive that nobody writes; returns how many are gone."""
    from cosmodrome.spark.lake.archiving import Archiver
    from cosmodrome.spark.lake.layout import LOCK, Lake
    from cosmodrome.spark.lake.lock import LakeLock

    env = env or real_env()
    lake = Lake.open(spark, path)
    lock = LakeLock(lake.files, LOCK, env)
    with lock.held("cosmo pipeline archive --compact"):
        archiver = Archiver(lake, lock, env, compression=compression)
        archiver.recover()
        return archiver.compact(everything=True).directories


def _lake(
    spark: SparkSession,
    path: str,
    *,
    subject: dict[str, str],
    filters: dict[str, str],
    format: str | None,
    json: bool,
    env: Env,
) -> Lake:
    """The archive at `path`, made if there is none; settings unlike its own are refused."""
    from cosmodrome.spark.lake.layout import ArchiveInfo, Lake, find_lake

    lake = find_lake(spark, path)
    if lake is None:
        info = ArchiveInfo(
            id=f"{env.random.getrandbits(48):012x}",
            lake=_format(spark, format),
            subject=subject,
            filters=filters,
            json=json,
            created_ms=env.clock.now_ms(),
        )
        return Lake.create(spark, path, info)
    info = lake.info
    if format is not None and format != info.lake:
        raise ConfigError(f"{path} is a {info.lake} archive; leave the format out")
    if json != info.json:
        made = "with" if info.json else "without"
        raise ConfigError(
            f"{path} was begun {made} parsed JSON bodies (--json); use the same setting"
        )
    if filters != info.filters:
        raise ConfigError(
            f"{path} was begun with the filter {info.filters or 'none'}; a table that changes its"
            " filter has gaps: keep it, or use another path"
        )
    _format(spark, info.lake)
    if subject != info.subject:
        lake.save_info(dataclasses.replace(info, subject=subject))
    return lake


def _subject(topics: str | Sequence[str] | None, pattern: str | None) -> dict[str, str]:
    names = [topics] if isinstance(topics, str) else list(topics or ())
    if bool(names) == bool(pattern):
        raise ConfigError("name the topics to archive (-t), or a pattern, and not both")
    return {"subscribePattern": pattern} if pattern else {"subscribe": ",".join(names)}


def _format(spark: SparkSession, asked: str | None) -> str:
    from cosmodrome.spark.lake.layout import DELTA, PARQUET
    from cosmodrome.spark.runtime import delta

    if asked not in (None, DELTA, PARQUET):
        raise ConfigError(f"format {asked!r}: write {DELTA} or {PARQUET}")
    has_delta = delta.active(spark)
    if asked == DELTA and not has_delta:
        raise ConfigError(f"no Delta Lake here: {delta.why_inactive(spark)}; or use parquet")
    return asked or (DELTA if has_delta else PARQUET)


def _start(starting: str) -> dict[str, str]:
    if starting in ("earliest", "latest") or starting.lstrip().startswith("{"):
        return {"startingOffsets": starting}
    return {"startingTimestamp": starting}


def _start_query(
    spark: SparkSession, archiver: Archiver, reading: Mapping[str, str], trigger: str | None
) -> StreamingQuery:
    from cosmodrome.spark.lake.layout import CHECKPOINT
    from cosmodrome.spark.read import rows
    from cosmodrome.spark.source import register

    register(spark)
    writer = (
        spark.readStream.format(_SOURCE)
        # Every file of a lake says that its columns may be null, old or new, compacted or not:
        # there are readers that refuse a table of both kinds.
        .schema(rows.schema())
        .options(**reading)
        .load()
        .writeStream.foreachBatch(archiver)
        .option("checkpointLocation", archiver.lake.files.path(CHECKPOINT))
    )
    if trigger is None:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=trigger).start()


def _follow(
    query: StreamingQuery,
    archiver: Archiver,
    *,
    beat: Callable[[], None],
    watch: Callable[[Status], None] | None,
    stop: Callable[[], object] | None,
    env: Env,
) -> Status:
    started_s = time.monotonic()
    try:
        while not query.awaitTermination(_POLL_S):  # type: ignore[arg-type]
            beat()
            if watch is not None:
                watch(_status(query, archiver, started_s, env))
            if stop is not None and stop() and not archiver.busy:
                break
        return _status(query, archiver, started_s, env)
    finally:
        query.stop()


def _status(query: StreamingQuery, archiver: Archiver, started_s: float, env: Env) -> Status:
    progress = archiver.progress
    lag = _lag(query, archiver)
    lag_s = None
    if lag and progress is not None and progress.newest_ms:
        lag_s = max(0.0, (env.clock.now_ms() - progress.newest_ms) / 1000)
    elapsed_s = max(time.monotonic() - started_s, 1e-3)
    return Status(
        rows=archiver.rows,
        rows_per_s=archiver.rows / elapsed_s,
        batch=progress.batch if progress is not None else -1,
        total=progress.rows if progress is not None else 0,
        lag=lag,
        lag_s=lag_s,
        merged=archiver.merged.directories,
    )


def _lag(query: StreamingQuery, archiver: Archiver) -> int | None:
    """Messages between what the brokers had at the last look and what the lake holds."""
    progress: Any = query.lastProgress
    if progress is None or archiver.progress is None:
        return None
    try:
        latest = json_codec.loads(progress.json)["sources"][0]["latestOffset"]
        ends = from_json(latest) if latest else {}
    except (CosmodromeError, LookupError, TypeError, ValueError):
        return None
    have = archiver.progress.ends
    return sum(max(0, end - have.get(queue, 0)) for queue, end in ends.items())


@job("archive")
@click.argument("path")
@click.option("-t", "--topic", "topics", multiple=True, help="A topic to archive; may be repeated.")
@click.option("--pattern", metavar="REGEX", help="All topics whose whole name matches.")
@click.option("--once", is_flag=True, help="Archive what is there now, then end.")
@click.option("--trigger", default=TRIGGER, show_default=True, help="How often a batch is made.")
@click.option(
    "--from",
    "starting",
    default="earliest",
    show_default=True,
    metavar="earliest|latest|TIME|JSON",
    help="Where a new archive begins.",
)
@click.option(
    "--format",
    type=click.Choice(["delta", "parquet"]),
    help="The kind of lake.  [default: delta where its jars are]",
)
@click.option("--json", is_flag=True, help="Parse JSON bodies into the column `value`.")
@click.option("--tags", metavar="A||B", help="Only messages with these tags.")
@click.option("--sql", metavar="EXPR", help="Only messages that match this SQL92 filter.")
@click.option("--group", help="Consumer group under which brokers show the progress.")
@click.option(
    "--rows-per-batch",
    type=click.IntRange(1),
    default=ROWS_PER_BATCH,
    show_default=True,
    help="At most this many rows per batch.",
)
@click.option(
    "--compact-after",
    type=click.IntRange(1),
    default=COMPACT_AFTER,
    show_default=True,
    help="Merge the batches of a topic and date when there are more than this many.",
)
@click.option("--compact", is_flag=True, help="Merge at the end; without topics, only merge.")
@click.option(
    "--allow-loss", is_flag=True, help="Go on when messages expired before they were read."
)
def command(
    job: JobContext,
    path: str,
    topics: tuple[str, ...],
    pattern: str | None,
    compact: bool,
    allow_loss: bool,
    **values: Any,
) -> None:
    """Copy topics into the lake at PATH, exactly once, and keep it up to date.

    PATH becomes a Delta table or a directory of Parquet files, partitioned by topic and date. Run
    it again to go on. Ctrl-C ends it after the running batch.
    """
    if compact and not topics and not pattern:
        gone = compact_archive(job.spark, path)
        job.say(f"merged {gone} directories of {path}")
        return
    _subject(topics, pattern)  # report mistakes before Spark starts
    options = job.source_options()
    namesrv = options.pop("namesrv")
    if allow_loss:
        options["failOnDataLoss"] = "false"
    spark = job.spark
    with stop_requests() as stop:
        status = archive(
            spark,
            topics,
            path,
            namesrv=namesrv,
            pattern=pattern,
            compact=compact,
            options=options,
            watch=lambda status: job.note(status.line()),
            stop=stop,
            **values,
        )
    job.say(status.line())
    if status.merged:
        job.say(f"merged {status.merged} directories")
