"""The job `check`: gaps, duplicates, order and damage in a topic, an archive or a store directory.

    from cosmodrome.spark.jobs.check import check

    report = check(spark, topics=["orders"], options={"namesrv": "127.0.0.1:9876"})
    assert report.ok, report.findings

What is looked for is in `spark/checking.py`; here is where the messages come from.
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

    from cosmodrome.spark.checking import Bounds, Report, Scan

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
    """Look through one place: a cluster (`options` of the source), an archive or a store.

    `topics` or `pattern` choose among its topics; an archive and a store are read whole without
    them. A live topic is checked between the first and last offsets that its brokers have now.
    """
    from cosmodrome.spark.checking import examine

    places = [place for place in (options, archive, store) if place is not None]
    if len(places) != 1:
        raise ConfigError("check one place: a cluster, an archive or a store directory")
    if topics and pattern is not None:
        raise ConfigError("topics and a pattern exclude each other; give one of them")
    chosen = {"subscribe": ",".join(topics)} if topics else {}
    if pattern is not None:
        chosen = {"subscribePattern": pattern}
    if store is not None:
        scan = _of_store(spark, store, {**chosen, "includeSystem": str(system)})
    elif archive is not None:
        scan = _of_archive(spark, archive, topics, pattern)
    else:
        assert options is not None
        if not chosen:
            raise ConfigError("which topic? name it, or give a pattern")
        scan = _of_cluster(spark, ", ".join(topics) or f"{pattern}", {**options, **chosen})
    return examine(scan, ids=ids, tolerance_ms=tolerance_ms, limit=limit)


def _of_store(spark: SparkSession, path: str, options: Mapping[str, str]) -> Scan:
    from cosmodrome.spark.checking import COLUMNS, Scan
    from cosmodrome.spark.rows import CORRUPT

    reader = spark.read.format(_SOURCE).options(storePath=path, **options)
    frame = reader.option("columns", ",".join((*COLUMNS, CORRUPT))).load()
    return Scan(f"store {path}", frame)


def _of_archive(spark: SparkSession, path: str, topics: Sequence[str], pattern: str | None) -> Scan:
    from pyspark.sql import functions as F

    from cosmodrome.spark.checking import COLUMNS, Scan
    from cosmodrome.spark.lake import BATCH, Lake

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


def _of_cluster(spark: SparkSession, what: str, options: Mapping[str, str]) -> Scan:
    from cosmodrome.spark.checking import COLUMNS, Scan

    given = {**options, "columns": ",".join(COLUMNS)}
    bounds, span = _bounds_now(given)
    frame = spark.read.format(_SOURCE).options(**given, **span).load()
    return Scan(f"{what} of {options.get('namesrv')}", frame, bounds)


def _bounds_now(given: Mapping[str, str]) -> tuple[Bounds, dict[str, str]]:
    """What the brokers have, and the options that read exactly this."""
    from cosmodrome.spark.cluster import Cluster
    from cosmodrome.spark.offsets import to_json
    from cosmodrome.spark.options import ReadOptions
    from cosmodrome.spark.subscription import Subscription

    parsed = ReadOptions.parse(given)
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
            *(queue.topic, queue.broker, str(queue.queue_id)),
            *("" if at is None else str(at) for at in (queue.first, queue.last)),
            *(str(queue.messages), str(queue.missing), str(queue.duplicates)),
            str(queue.time_steps + queue.log_steps),
        ]
        for queue in sorted(shown, key=lambda q: (q.topic, q.broker, q.queue_id))
    ]
    yield from output.table_lines(names, cells)
    if len(report.queues) > len(shown):
        yield f"… and {len(report.queues) - len(shown)} queues more\n"
    yield "\n"
    for finding in report.findings:
        place = ""
        if finding.topic is not None:
            broker = "" if finding.broker is None else f" {finding.broker}"
            place = f" {finding.topic}{broker} queue {finding.queue_id} at {finding.queue_offset}"
        yield f"{finding.kind.upper()}{place}: {finding.what}\n"
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
@click.option("--ids/--no-ids", default=True, help="Look for message ids that are there twice.")
@click.option(
    "--tolerance-ms",
    type=click.IntRange(min=0),
    default=TOLERANCE_MS,
    show_default=True,
    help="Store times may step back by so much.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=FINDINGS,
    show_default=True,
    help="Findings listed of each kind.",
)
@click.option("-o", "form", type=click.Choice(["table", "json"]), default="table", help="Form.")
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

    Exits with 6 when there are problems. A topic that was deleted and made again has its offsets
    twice in a store and in an archive. `cosmo store check` looks at queue and index files.
    """
    if system and store is None:
        raise ConfigError("--system goes with --store")
    live = archive is None and store is None
    if not live and context.namesrv_given:
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
