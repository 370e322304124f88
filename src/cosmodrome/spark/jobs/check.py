"""The job `check`: gaps, duplicates, order and damage in a topic, an archive or a store directory.

    from cosmodrome.spark.jobs.check import check

    report = check(spark, topics=["orders"], options={"namesrv": "127.0.0.1:9876"})
    assert report.ok, report.findings

`spark/lake/checking.py` does the checking; this module says where the messages come from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from cosmodrome.errors import ConfigError
from cosmodrome.spark.jobs import output
from cosmodrome.spark.jobs.job import EXIT_FOUND, JobContext, job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cosmodrome.spark.lake.checking import Bounds, Report, Scan

TOLERANCE_MS = 1000
FINDINGS = 100
QUEUES_SHOWN = 200
_SOURCE = "rocketmq"


def check(
    spark: SparkSession,
    *,
    topics: Sequence[str] = (),
    pattern: str | None = None,
    options: Mapping[str, str] | None = None,
    archive: str | None = None,
    store: str | None = None,
    system: bool = False,
    ids: bool = True,
    tolerance_ms: int = TOLERANCE_MS,
    limit: int = FINDINGS,
) -> Report:
    """Check one source: a cluster (`options` of format("rocketmq")), an archive or a store.

    `topics` or `pattern` choose among its topics; an archive and a store are read whole without
    them. A live topic is checked between the first and last offsets that its brokers have now.
    """
    from cosmodrome.spark.lake.checking import examine

    sources = [one for one in (options, archive, store) if one is not None]
    if len(sources) != 1:
        raise ConfigError("check one source: a cluster, an archive or a store directory")
    if topics and pattern is not None:
        raise ConfigError("topics and a pattern exclude each other; give one of them")
    chosen = {"subscribe": ",".join(topics)} if topics else {}
    if pattern is not None:
        chosen = {"subscribePattern": pattern}
    if store is not None:
        scan = _scan_store(spark, store, {**chosen, "includeSystem": str(system)})
    elif archive is not None:
        scan = _scan_archive(spark, archive, topics, pattern)
    else:
        assert options is not None
        if not chosen:
            raise ConfigError("which topic? name it, or give a pattern")
        scan = _scan_cluster(spark, ", ".join(topics) or f"{pattern}", {**options, **chosen})
    return examine(scan, ids=ids, tolerance_ms=tolerance_ms, limit=limit)


def _scan_store(spark: SparkSession, path: str, options: Mapping[str, str]) -> Scan:
    from cosmodrome.spark.lake.checking import COLUMNS, Scan
    from cosmodrome.spark.read.rows import CORRUPT

    reader = spark.read.format(_SOURCE).options(storePath=path, **options)
    frame = reader.option("columns", ",".join((*COLUMNS, CORRUPT))).load()
    return Scan(f"store {path}", frame)


def _scan_archive(
    spark: SparkSession, path: str, topics: Sequence[str], pattern: str | None
) -> Scan:
    from pyspark.sql import functions as F

    from cosmodrome.spark.lake.checking import COLUMNS, Scan
    from cosmodrome.spark.lake.layout import BATCH, Lake

    lake = Lake.open(spark, path)
    progress = lake.progress()
    if progress is None:
        raise ConfigError(f"{path} holds nothing yet; run `cosmo pipeline archive` first")
    bounds: Bounds = {
        (queue.topic, queue.broker_name, queue.queue_id): (None, end)
        for queue, end in progress.ends.items()
        if (not topics or queue.topic in topics)
        and (pattern is None or re.fullmatch(pattern, queue.topic))
    }
    names = sorted({topic for topic, _, _ in bounds})
    absent = [topic for topic in topics if topic not in names]
    if absent:
        raise ConfigError(f"{path} holds no topic {absent[0]}")
    # Batches behind the progress may be half written.
    rows = lake.rows().where(F.col(BATCH) <= progress.batch).where(F.col("topic").isin(*names))
    filters = ", ".join(f"{name}={value}" for name, value in lake.info.filters.items())
    notes = (f"gaps were not looked for: the archive holds only messages with {filters}",)
    return Scan(
        f"archive {path}", rows.select(*COLUMNS), bounds, not filters, notes if filters else ()
    )


def _scan_cluster(spark: SparkSession, what: str, options: Mapping[str, str]) -> Scan:
    from cosmodrome.spark.lake.checking import COLUMNS, Scan

    reading = {**options, "columns": ",".join(COLUMNS)}
    bounds, span = _bounds_now(reading)
    frame = spark.read.format(_SOURCE).options(**reading, **span).load()
    return Scan(f"{what} of {options.get('namesrv')}", frame, bounds)


def _bounds_now(reading: Mapping[str, str]) -> tuple[Bounds, dict[str, str]]:
    """What the brokers have, and the options that read exactly this."""
    from cosmodrome.spark.cluster import Cluster
    from cosmodrome.spark.read.offsets import to_json
    from cosmodrome.spark.read.options import ReadOptions
    from cosmodrome.spark.read.subscription import Subscription

    parsed = ReadOptions.parse(reading)
    with Cluster(parsed.connection) as cluster:
        queues = Subscription(parsed, cluster).queues()
        found = cluster.bounds(queues) if queues else {}
    bounds = {
        (queue.topic, queue.broker_name, queue.queue_id): (low, high)
        for queue, (low, high) in found.items()
    }
    starts = to_json({queue: low for queue, (low, _) in found.items()})
    ends = to_json({queue: high for queue, (_, high) in found.items()})
    # What expires during the scan is a gap like any other: it is reported, not an error.
    return bounds, {
        "startingOffsets": json.dumps(starts),
        "endingOffsets": json.dumps(ends),
        "failOnDataLoss": "false",
    }


def report_lines(report: Report) -> Iterator[str]:
    """The report for people."""
    names = ("topic", "broker", "queue", "first", "last", "messages", "missing", "twice", "order")
    bad_first = sorted(report.queues, key=lambda queue: queue.ok)
    shown = bad_first[:QUEUES_SHOWN]
    cells = [
        [
            queue.topic,
            queue.broker,
            str(queue.queue_id),
            "" if queue.first is None else str(queue.first),
            "" if queue.last is None else str(queue.last),
            str(queue.messages),
            str(queue.missing),
            str(queue.duplicates),
            str(queue.time_steps + queue.log_steps),
        ]
        for queue in sorted(shown, key=lambda q: (q.topic, q.broker, q.queue_id))
    ]
    yield from output.table_lines(names, cells)
    if len(report.queues) > len(shown):
        yield f"… and {len(report.queues) - len(shown)} queues more\n"
    yield "\n"
    for finding in report.findings:
        at, position = finding.evidence, ""
        if at["topic"] is not None:
            broker = "" if at["broker"] is None else f" {at['broker']}"
            position = f" {at['topic']}{broker} queue {at['queue_id']} at {at['queue_offset']}"
        yield f"{finding.code.upper()}{position}: {finding.sentence}\n"
    for note in report.notes:
        yield f"note: {note}\n"
    problems = [f"{count} × {kind}" for kind, count in report.counts.items() if count]
    listed = len(report.findings)
    if sum(report.counts.values()) > listed:
        yield f"{listed} findings are listed; --limit lists more\n"
    verdict = "; ".join(problems) if problems else "no problems"
    yield f"{report.source}: {report.messages} messages in {len(report.queues)} queues: {verdict}\n"


@job("check")
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option("--pattern", metavar="REGEX", help="All topics whose whole name matches.")
@click.option("--archive", metavar="PATH", help="Check the archive at PATH.")
@click.option("--store", metavar="DIR", help="Check the log of a store directory.")
@click.option("--system", is_flag=True, help="With --store, also the broker's own topics.")
@click.option("--ids/--no-ids", default=True, help="Look for duplicate message ids.")
@click.option(
    "--tolerance-ms",
    type=click.IntRange(min=0),
    default=TOLERANCE_MS,
    show_default=True,
    help="How far store times may step back.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=FINDINGS,
    show_default=True,
    help="How many findings of each kind are listed.",
)
@click.option(
    "-o", "form", type=click.Choice(["table", "json"]), default="table", help="Output format."
)
def command(
    context: JobContext,
    topics: tuple[str, ...],
    pattern: str | None,
    archive: str | None,
    store: str | None,
    system: bool,
    ids: bool,
    tolerance_ms: int,
    limit: int,
    form: str,
) -> None:
    """Find gaps, duplicates, disorder and damage in topics, an archive or a store directory.

    \b
    cosmo pipeline check orders payments
    cosmo pipeline check --archive /lake/orders
    cosmo pipeline check --store ~/store -o json

    Exits with 6 when there are problems. A topic that was deleted and created again
    has its offsets twice in a store and in an archive. `cosmo store check` checks queue and index
    files.
    """
    if system and store is None:
        raise ConfigError("--system goes with --store")
    live = archive is None and store is None
    if not live and context.has_namesrv:
        raise ConfigError("-n asks a cluster and makes no sense with --archive or --store")
    if live and not topics and pattern is None:
        raise ConfigError("check what? name a topic, or give --pattern, --archive or --store")
    options = context.source_options() if live else None
    spark = context.spark
    context.note("checking …")
    report = check(
        spark,
        topics=topics,
        pattern=pattern,
        options=options,
        archive=archive,
        store=store,
        system=system,
        ids=ids,
        tolerance_ms=tolerance_ms,
        limit=limit,
    )
    context.clear_note()
    if form == "json":
        click.echo(json.dumps(report.document(), indent=2, ensure_ascii=False))
    else:
        for line in report_lines(report):
            click.echo(line, nl=False)
    if not report.ok:
        raise click.exceptions.Exit(EXIT_FOUND)
