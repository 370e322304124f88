"""One table over archive and live: the lake below a seam, the brokers above it.

The seam of a queue is its end in the newest progress of the archive. Rows of complete batches lie
below it, the live source starts at it, so nothing is missing and nothing is there twice, also while
the archive goes on: what it writes later belongs to batches that this table does not read. The
end of the live part is where the brokers are when an action runs.

    df = table(spark, "orders", archive="/lake/orders", namesrv="127.0.0.1:9876")
    create_view(spark, "orders", "orders", archive="/lake/orders")

Columns are the source's, then `date` (UTC, of the store time; partitions are skipped by it) and,
for an archive with parsed bodies, `value`.
"""

from __future__ import annotations

import datetime
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from cosmodrome.env.base import Env
from cosmodrome.env.real import real_env
from cosmodrome.errors import ConfigError, DirectoryInUse
from cosmodrome.spark import json_values
from cosmodrome.spark.cluster import Cluster
from cosmodrome.spark.lake.compaction import Compaction
from cosmodrome.spark.lake.layout import BATCH, DATE, LOCK, VALUE, Lake, utc_date
from cosmodrome.spark.lake.lock import LakeLock
from cosmodrome.spark.option_values import OptionValues, require_name
from cosmodrome.spark.read.offsets import Offsets, to_json
from cosmodrome.spark.read.options import READ_OPTIONS, Connection
from cosmodrome.spark.read.plan import clamp
from cosmodrome.spark.read.rows import COLUMNS, schema
from cosmodrome.spark.read.subscription import report_losses
from cosmodrome.spark.source import register
from cosmodrome.wire.names import check_topic

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

log = logging.getLogger(__name__)

Moment = str | datetime.datetime | int  # ISO 8601 (UTC unless it says otherwise), or epoch ms

_SWAP_WAIT_S = 30.0
_SWAP_POLL_S = 0.05
_LISTINGS_MAX = 20
_DECIDED_HERE = (
    "subscribe",
    "subscribePattern",
    "assign",
    "path",
    "storePath",
    "columns",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
)


def table(
    spark: SparkSession,
    topic: str | Sequence[str],
    *,
    archive: str | None = None,
    namesrv: str | None = None,
    since: Moment | None = None,
    until: Moment | None = None,
    options: Mapping[str, str] | None = None,
    env: Env | None = None,
) -> DataFrame:
    """The messages of a topic, or of several: from `archive`, from the brokers, or from both.

    `since` and `until` (exclusive) bound the store time; `options` are more options of the source.
    """
    topics = _topics(topic)
    options = dict(options or {})
    _check_options(options)
    if archive is None and namesrv is None:
        raise ConfigError("give archive=PATH, namesrv=HOST:PORT, or both")
    condition = _between(since, until)
    if archive is None:
        assert namesrv is not None
        return _live(spark, topics, namesrv, options, None).where(condition)
    lake = Lake.open(spark, archive)
    below, seam, values = stored(lake, topics, env or real_env())
    value = values.whole if values.whole.fields else None
    if value is not None and not values.exact:
        # The stored column does not say everything: the bodies are parsed anew.
        below = below.withColumn(VALUE, json_values.parsed(value))
    below = below.where(condition & _dates(since, until))
    if namesrv is None:
        return below
    filters = {name: text for name, text in lake.info.filters.items() if name not in options}
    above = _live(spark, topics, namesrv, {**filters, **options}, seam)
    if value is not None:
        above = above.withColumn(VALUE, json_values.parsed(value))
    return below.unionByName(above.where(condition))


def create_view(
    spark: SparkSession,
    name: str,
    topic: str | Sequence[str] | None = None,
    *,
    archive: str | None = None,
    namesrv: str | None = None,
    since: Moment | None = None,
    until: Moment | None = None,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """The same as a temporary view for SQL; its topic is its name unless another is given."""
    frame = table(
        spark,
        topic or name,
        archive=archive,
        namesrv=namesrv,
        since=since,
        until=until,
        options=options,
    )
    frame.createOrReplaceTempView(f"`{name}`" if not name.isidentifier() else name)
    return frame


def stored(
    lake: Lake, topics: Sequence[str], env: Env
) -> tuple[DataFrame, Offsets, json_values.ValueSchema]:
    """The complete batches of these topics, without `batch`; where each of their queues ends; and
    the schema of parsed bodies at that time, which a writer may widen at any moment.

    The table keeps its listing of files. When a merge changes the files meanwhile, they are listed
    again.
    """
    compaction = Compaction(lake)
    for _ in range(_LISTINGS_MAX):
        _finish_merge(lake, compaction, env)
        merge = compaction.newest()
        # First the progress, then the listing: it then has all that the progress promises.
        progress = lake.progress()
        values = json_values.load(lake) if lake.info.json else json_values.ValueSchema()
        found = lake.rows(values.column)
        if not compaction.pending() and compaction.newest() == merge:
            break
    else:
        raise DirectoryInUse(f"{lake.files.root} is being merged all the time; try again later")
    newest = progress.batch if progress is not None else -1
    ends = progress.ends if progress is not None else {}
    chosen = found.where(F.col("topic").isin(list(topics)) & (F.col(BATCH) <= newest)).drop(BATCH)
    names = set(topics)
    return chosen, {queue: end for queue, end in ends.items() if queue.topic in names}, values


def moment(value: Moment) -> datetime.datetime:
    """A point in time with a zone."""
    if isinstance(value, int):
        return datetime.datetime.fromtimestamp(value / 1000, datetime.UTC)
    if isinstance(value, str):
        ms = OptionValues({"time": value}, ("time",)).moment_ms("time")
        if ms is None:
            raise ConfigError("a time is empty; write ISO 8601, e.g. 2026-01-31T12:00:00Z")
        return datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC)
    return value if value.tzinfo is not None else value.replace(tzinfo=datetime.UTC)


def _finish_merge(lake: Lake, compaction: Compaction, env: Env) -> None:
    """Wait until no merge is half done: a live writer finishes its own, we finish a dead one's."""
    lock = LakeLock(lake.files, LOCK, env)
    deadline_s = time.monotonic() + _SWAP_WAIT_S
    while compaction.pending():
        if lock.holder() is None:
            try:
                lock.acquire("cosmodrome.spark.lake.table")
            except DirectoryInUse:
                continue
            try:
                compaction.finish_interrupted()
            finally:
                lock.release()
        elif time.monotonic() > deadline_s:
            raise DirectoryInUse(
                f"{lake.files.root}: a merge has not ended for {_SWAP_WAIT_S:.0f} s; look at the"
                " job that writes this archive"
            )
        else:
            time.sleep(_SWAP_POLL_S)


def _live(
    spark: SparkSession,
    topics: Sequence[str],
    namesrv: str,
    options: Mapping[str, str],
    seam: Offsets | None,
) -> DataFrame:
    register(spark)
    reading = {**options, "namesrv": namesrv, "subscribe": ",".join(topics)}
    if seam is not None:
        starts = _starts(topics, reading, seam)
        if not starts:
            return spark.createDataFrame([], schema()).withColumn(DATE, utc_date())
        reading["startingOffsets"] = json.dumps(to_json(starts))
    return spark.read.format("rocketmq").options(**reading).load().withColumn(DATE, utc_date())


def _starts(topics: Sequence[str], options: Mapping[str, str], seam: Offsets) -> Offsets:
    """Where the live part of every queue begins; the archive's end, or its first message."""
    values = OptionValues(options, READ_OPTIONS)
    with Cluster(Connection.parse(options)) as cluster:
        queues = list(cluster.queues(topics))
        bounds = cluster.bounds(queues) if queues else {}
    starts, losses = clamp(seam, bounds)
    # Between the archive and the first message of a broker lies what expired in between.
    report_losses(losses, values.flag("failOnDataLoss", True))
    return {queue: starts.get(queue, low) for queue, (low, _) in bounds.items()}


def _between(since: Moment | None, until: Moment | None) -> Column:
    condition = F.lit(True)
    if since is not None:
        condition = condition & (F.col("store_time") >= _instant(since))
    if until is not None:
        condition = condition & (F.col("store_time") < _instant(until))
    return condition


def _instant(value: Moment) -> Column:
    """A literal that does not depend on the time zone of the session or of this process."""
    return F.lit(moment(value))


def _dates(since: Moment | None, until: Moment | None) -> Column:
    """Partitions that can hold the span; the store time decides within them."""
    condition = F.lit(True)
    if since is not None:
        condition = condition & (F.col(DATE) >= moment(since).astimezone(datetime.UTC).date())
    if until is not None:
        condition = condition & (F.col(DATE) <= moment(until).astimezone(datetime.UTC).date())
    return condition


def _topics(topic: str | Sequence[str]) -> list[str]:
    topics = [topic] if isinstance(topic, str) else list(topic)
    if not topics:
        raise ConfigError("name a topic")
    for name in topics:
        require_name(check_topic, name)
    return topics


def _check_options(options: Mapping[str, str]) -> None:
    taken = {name.lower(): name for name in _DECIDED_HERE}
    for name in options:
        if name.lower() in taken:
            raise ConfigError(
                f"option {name} is decided by the table; use topic, since and until,"
                " and select columns from it"
            )


__all__ = ["COLUMNS", "create_view", "moment", "stored", "table"]
