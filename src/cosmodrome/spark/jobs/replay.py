"""The job `replay`: messages of an archive into a topic, in order, at a given pace, resumable.

    from cosmodrome.spark.jobs.replay import replay

    replay(spark, "/lake/orders", "orders", "orders-again", namesrv="127.0.0.1:9876",
           since="2026-01-01", until="2026-01-02", where="tags = 'paid'", rate=1_000)

All messages of an original queue go to one queue of the target, in their order. User properties,
tags and keys (unless `keep_keys` is false) are kept; what brokers and clients set is not. A slice
that was interrupted is sent again by `resume`, with the same ids, so readers with
`dedupe` see it once.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from cosmodrome.env.base import Env
from cosmodrome.env.real import real_env
from cosmodrome.errors import ConfigError
from cosmodrome.spark.jobs.job import JobContext, job, stop_requests
from cosmodrome.spark.lake.replaying import (
    Bucket,
    Day,
    ReplayPlan,
    ReplayState,
    Slice,
    choose_run,
    cut,
    dated,
    replay_name,
)
from cosmodrome.spark.option_values import require_name
from cosmodrome.wire import message as names
from cosmodrome.wire.names import check_topic

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from cosmodrome.spark.lake.layout import Lake
    from cosmodrome.spark.lake.lock import LakeLock
    from cosmodrome.spark.lake.table import Moment

SLICE_ROWS = 50_000
SLICE_S = 5.0  # with a limited rate: a slice is sent at once, then the job rests
STEPS = 2_000
_SAMPLE_ROWS = 5
_REST_S = 0.2
# Set by brokers or clients for one delivery, beside those that no user may set.
_OF_ONE_DELIVERY = (
    names.TRANSACTION_PREPARED_QUEUE_OFFSET,
    names.TRANSACTION_CHECK_TIMES,
    names.CHECK_IMMUNITY_SECONDS,
    names.INNER_MULTI_DISPATCH,
    names.TIMER_DELAY_SECONDS,
    names.TIMER_DELAY_MS,
    names.TIMER_DELIVER_MS,
    names.TIMER_OUT_MS,
    names.TIMER_DEQUEUE_MS,
    names.TIMER_DELETE_UNIQ_KEY,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How far a replay is, or what a dry run would do."""

    rows: int  # sent, also before it was resumed
    rows_total: int
    slices: int
    slices_total: int
    rows_per_s: float = 0.0  # of this run
    sample: tuple[dict[str, Any], ...] = ()
    queues: tuple[tuple[str, int, int], ...] = ()  # broker, queue, rows; of a dry run

    @property
    def finished(self) -> bool:
        return self.slices >= self.slices_total

    def line(self) -> str:
        share = 100 * self.rows // self.rows_total if self.rows_total else 100
        return (
            f"replayed {self.rows:,} of {self.rows_total:,} messages ({share} %),"
            f" {self.rows_per_s:,.0f}/s"
        )


def replay(
    spark: SparkSession,
    archive: str,
    source_topic: str,
    target_topic: str,
    *,
    namesrv: str,
    since: Moment | None = None,
    until: Moment | None = None,
    where: str | None = None,
    rate: float | None = None,
    dry_run: bool = False,
    keep_keys: bool = True,
    state: str | None = None,
    resume: bool = False,
    slice_rows: int = SLICE_ROWS,
    options: Mapping[str, str] | None = None,
    watch: Callable[[Status], None] | None = None,
    stop: Callable[[], object] | None = None,
    before: Callable[[int], None] = lambda number: None,
    env: Env | None = None,
) -> Status:
    """Send messages of an archive to a topic. `rate` is in messages per second, of the whole job.

    `where` is a SQL condition over the columns of the table. `options` are further options of the
    sink. `stop` is asked between slices; `before` is called with the number of each slice.
    """
    from cosmodrome.spark.lake.layout import Lake
    from cosmodrome.spark.lake.lock import LakeLock
    from cosmodrome.spark.lake.table import table

    env = env or real_env()
    _check(target_topic, rate, slice_rows)
    lake = Lake.open(spark, archive)

    def rows() -> DataFrame:
        found = table(spark, source_topic, archive=archive, since=since, until=until, env=env)
        return found.where(where) if where else found

    frame = rows()
    rows_max = slice_rows if rate is None else max(1, min(slice_rows, int(rate * SLICE_S)))
    if dry_run:
        return _dry_run(frame, _plan(frame, "", source_topic, target_topic, rows_max))
    asked = [lake.info.id, source_topic, target_topic, str(since), str(until), str(where)]
    run, kept = _open_state(lake, state, replay_name(asked), resume)
    lock = LakeLock(kept.files, "lock.json", env)
    with lock.held("cosmo pipeline replay"):
        plan = kept.plan()
        if plan is None:
            plan = _plan(frame, f"{lake.info.id}-{run}", source_topic, target_topic, rows_max)
            kept.begin(plan)
        return _Sender(
            source=_Rows(lake, rows),
            plan=plan,
            kept=kept,
            options={**(options or {}), "namesrv": namesrv, "topic": target_topic},
            keep_keys=keep_keys,
            pace=_Pace(rate, lock, stop),
        ).run(watch, before)


def _open_state(lake: Lake, folder: str | None, name: str, resume: bool) -> tuple[str, ReplayState]:
    """The run to begin or to go on with, and what is known of it."""
    from cosmodrome.spark.lake.files import LakeFiles
    from cosmodrome.spark.lake.layout import OURS

    runs = LakeFiles(lake.spark, folder or lake.files.path(f"{OURS}/replay"))
    run = choose_run(runs, name, resume=resume)
    return run, ReplayState(LakeFiles(lake.spark, runs.path(run)))


class _Pace:
    """Lets a slice begin when the rate allows it."""

    def __init__(
        self, rate: float | None, lock: LakeLock, stop: Callable[[], object] | None
    ) -> None:
        self._rate = rate
        self._lock = lock
        self._stop = stop
        self._started_s = time.monotonic()
        self._rows = 0

    def sent(self, rows: int) -> None:
        self._rows += rows

    @property
    def rows_per_s(self) -> float:
        return self._rows / max(time.monotonic() - self._started_s, 1e-3)

    def ready(self) -> bool:
        """Waits; False when the job is to stop."""
        while True:
            if self._stop is not None and self._stop():
                return False
            self._lock.beat()
            early_s = 0.0
            if self._rate is not None:
                early_s = self._started_s + self._rows / self._rate - time.monotonic()
            if early_s <= 0:
                return True
            time.sleep(min(early_s, _REST_S))


class _Rows:
    """The rows of the archive, listed anew when files were merged meanwhile."""

    def __init__(self, lake: Lake, make: Callable[[], DataFrame]) -> None:
        from cosmodrome.spark.lake.compaction import Compaction

        self.spark = lake.spark
        self._compaction = Compaction(lake)
        self._make = make
        self._merge: str | None = None
        self._frame: DataFrame | None = None

    def frame(self) -> DataFrame:
        newest = self._compaction.newest()
        if self._frame is None or newest != self._merge:
            self._frame, self._merge = self._make(), newest
        return self._frame


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Sender:
    """Sends the slices of a plan that are not sent yet, one after the other."""

    source: _Rows
    plan: ReplayPlan
    kept: ReplayState
    options: Mapping[str, str]  # of the sink
    keep_keys: bool
    pace: _Pace

    def run(self, watch: Callable[[Status], None] | None, before: Callable[[int], None]) -> Status:
        from cosmodrome.spark.source import register

        register(self.source.spark)
        slices, rows = self.kept.done()
        while slices < len(self.plan.slices) and self.pace.ready():
            before(slices)
            sent = self._send(slices)
            self.pace.sent(sent)
            slices, rows = slices + 1, rows + sent
            self.kept.record(slices, rows)
            if watch is not None:
                watch(self._status(slices, rows))
        return self._status(slices, rows)

    def _status(self, slices: int, rows: int) -> Status:
        return Status(
            rows=rows,
            rows_total=self.plan.rows,
            slices=slices,
            slices_total=len(self.plan.slices),
            rows_per_s=self.pace.rows_per_s,
        )

    def _send(self, number: int) -> int:
        """Send one slice; returns its rows."""
        from pyspark.sql import Observation
        from pyspark.sql import functions as F

        from cosmodrome.spark.lake.layout import measured

        observed = Observation()
        chosen = self.source.frame().where(_within(self.plan.slices[number]))
        rows = (
            # A queue stays in one task, and rows lie the same way whenever the slice is run.
            chosen.repartition(self.plan.partitions, "broker", "queue_id")
            .sortWithinPartitions("queue_offset", "broker", "queue_id")
            .observe(observed, F.count(F.lit(1)).alias("rows"))
        )
        (
            rows.select(*_message_columns(self.keep_keys))
            .write.format("rocketmq")
            .mode("append")
            .options(**self.options)
            .option("idempotenceId", f"{self.plan.id}-{number}")
            .save()
        )
        seen = measured(observed)
        return int(seen["rows"]) if seen is not None else chosen.count()


def _message_columns(keep_keys: bool) -> Iterator[Column]:
    from pyspark.sql import functions as F

    from cosmodrome.spark.write.row_messages import user_properties

    def lasting(name: Column, _value: Column) -> Column:
        return ~name.isin(list(_OF_ONE_DELIVERY))

    yield F.col("body")
    yield F.col("tags")
    if keep_keys:
        yield F.col("keys")
    yield F.map_filter(user_properties(F.col("properties")), lasting).alias("properties")
    yield F.concat_ws("/", "broker", "queue_id").alias("queue_key")
    yield F.col("flag")


def _within(one: Slice) -> Column:
    from pyspark.sql import functions as F

    inside = F.lit(False)
    for span in one.spans:
        inside = inside | (
            (F.col("broker") == span.broker)
            & (F.col("queue_id") == span.queue_id)
            & (F.col("queue_offset") >= span.low)
            & (F.col("queue_offset") < span.end)
        )
    if not one.dates:
        return inside
    return F.col("date").between(F.lit(one.dates[0]), F.lit(one.dates[1])) & inside


def _plan(frame: DataFrame, id_: str, source: str, target: str, rows_max: int) -> ReplayPlan:
    """One pass over four columns: how many rows each queue has in each step of time."""
    from pyspark.sql import functions as F

    at_ms = F.unix_millis("store_time")
    first, last = frame.agg(F.min(at_ms), F.max(at_ms)).collect()[0]
    buckets: list[Bucket] = []
    if first is not None:
        width_ms = max(1, -(-(last - first + 1) // STEPS))
        found = (
            frame.groupBy("broker", "queue_id", F.floor((at_ms - first) / width_ms).alias("step"))
            .agg(
                F.min("queue_offset").alias("low"),
                (F.max("queue_offset") + 1).alias("end"),
                F.count(F.lit(1)).alias("rows"),
            )
            .collect()
        )
        buckets = [
            Bucket(
                row["step"], (row["broker"], row["queue_id"]), row["low"], row["end"], row["rows"]
            )
            for row in found
        ]
    days = [
        Day((row["broker"], row["queue_id"]), str(row["date"]), row["low"], row["high"])
        for row in frame.groupBy("broker", "queue_id", "date")
        .agg(F.min("queue_offset").alias("low"), F.max("queue_offset").alias("high"))
        .collect()
    ]
    queues = {bucket.queue for bucket in buckets}
    parallel = frame.sparkSession.sparkContext.defaultParallelism
    return ReplayPlan(
        id=id_,
        source=source,
        target=target,
        partitions=max(1, min(len(queues), parallel)),
        rows=sum(bucket.rows for bucket in buckets),
        slices=tuple(dated(cut(buckets, rows_max), days)),
    )


def _dry_run(frame: DataFrame, plan: ReplayPlan) -> Status:
    counts = frame.groupBy("broker", "queue_id").count().orderBy("broker", "queue_id").collect()
    shown = ("broker", "queue_id", "queue_offset", "store_time", "tags", "keys", "body")
    sample = frame.orderBy("store_time", "broker", "queue_id", "queue_offset").select(*shown)
    return Status(
        rows=0,
        rows_total=plan.rows,
        slices=0,
        slices_total=len(plan.slices),
        sample=tuple(row.asDict() for row in sample.limit(_SAMPLE_ROWS).collect()),
        queues=tuple((row[0], row[1], row[2]) for row in counts),
    )


def _check(target: str, rate: float | None, slice_rows: int) -> None:
    require_name(check_topic, target)
    if rate is not None and rate <= 0:
        raise ConfigError("rate must be above 0 messages per second")
    if slice_rows < 1:
        raise ConfigError("slice_rows must be 1 or more")


@job("replay")
@click.argument("archive")
@click.argument("source")
@click.argument("target")
@click.option("--since", metavar="TIME", help="From this store time on (ISO 8601 or epoch ms).")
@click.option("--until", metavar="TIME", help="Before this store time.")
@click.option("--where", metavar="SQL", help="Only rows for which this condition is true.")
@click.option("--rate", type=float, metavar="N", help="At most N messages per second.")
@click.option("--dry-run", is_flag=True, help="Show what would be sent, and send nothing.")
@click.option("--keep-keys/--drop-keys", default=True, help="Whether messages keep their keys.")
@click.option("--state", metavar="DIR", help="Where the progress is kept.  [default: in ARCHIVE]")
@click.option("--resume", is_flag=True, help="Go on with a replay that was interrupted.")
@click.option(
    "--slice-rows",
    type=click.IntRange(1),
    default=SLICE_ROWS,
    show_default=True,
    help="Messages sent between two saves of the progress.",
)
def command(job: JobContext, archive: str, source: str, target: str, **values: Any) -> None:
    """Send messages of topic SOURCE in ARCHIVE to topic TARGET.

    The messages of a queue stay in order. Ctrl-C ends it after the running slice; --resume goes on.
    """
    _check(target, values["rate"], values["slice_rows"])  # before Spark starts
    options = job.source_options()
    namesrv = options.pop("namesrv")
    spark = job.spark
    with stop_requests() as stop:
        status = replay(
            spark,
            archive,
            source,
            target,
            namesrv=namesrv,
            options=options,
            watch=lambda status: job.note(status.line()),
            stop=stop,
            **values,
        )
    if values["dry_run"]:
        _show_dry_run(job, status, values["rate"])
        return
    job.say(status.line())
    if not status.finished:
        job.say("interrupted; the same command with --resume goes on")


def _show_dry_run(job: JobContext, status: Status, rate: float | None) -> None:
    takes = f", at least {status.rows_total / rate:,.0f} s" if rate else ""
    job.say(f"would send {status.rows_total:,} messages, slices: {status.slices_total}{takes}")
    for broker, queue_id, rows in status.queues:
        job.say(f"  {broker} queue {queue_id}: {rows:,}")
    for row in status.sample:
        body = bytes(row["body"] or b"")
        click.echo(
            f"{row['store_time']} {row['broker']}/{row['queue_id']}/{row['queue_offset']}"
            f" tags={row['tags'] or ''} keys={row['keys'] or ''}"
            f" {body[:60].decode('utf-8', 'replace')}"
        )
