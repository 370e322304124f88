"""The job `query`: SQL over topics, an archive or a store directory.

from cosmodrome.spark.jobs.query import query
from cosmodrome.spark.views import TableSource

query(spark, "SELECT tags, count(*) FROM orders GROUP BY tags",
      TableSource(cluster={"namesrv": "127.0.0.1:9876"})).show()
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

import click

from cosmodrome.errors import ConfigError
from cosmodrome.spark.jobs import output
from cosmodrome.spark.jobs.job import JobContext, job
from cosmodrome.spark.views import TableSource, run_sql
from cosmodrome.speed.arrow import KINDS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARQUET = "parquet"
TABLE_ROWS = 100


def query(
    spark: SparkSession, sql: str, tables: TableSource, *, limit: int | None = None
) -> DataFrame:
    """The result of `sql`, whose tables are topics found in `tables`."""
    found = run_sql(spark, sql, tables.table)
    return found if limit is None else found.limit(limit)


@job("query")
@click.argument("sql")
@click.option(
    "--topic",
    "topics",
    multiple=True,
    metavar="NAME[=VIEW]",
    help="Use VIEW as the name of topic NAME in the SQL; may be repeated. Other names are topics.",
)
@click.option(
    "--archive",
    metavar="PATH",
    help="Read the archive at PATH; with -n also the newer messages of the brokers.",
)
@click.option("--store", metavar="DIR", help="Read a broker's store directory, without a broker.")
@click.option("--json-bodies", is_flag=True, help="Parse bodies as JSON into the column `value`.")
@click.option(
    "-o",
    "form",
    type=click.Choice([*output.FORMS, PARQUET]),
    default="table",
    show_default=True,
    help="Form of the result.",
)
@click.option("--out", metavar="PATH", help="Write there instead of to stdout; parquet needs it.")
@click.option(
    "--limit",
    type=click.IntRange(0),
    help=f"At most this many rows; 0 is all.  [default: {TABLE_ROWS} for a table, else all]",
)
@click.option("--full", is_flag=True, help="Do not shorten the cells of a table.")
def command(
    context: JobContext,
    sql: str,
    topics: tuple[str, ...],
    archive: str | None,
    store: str | None,
    json_bodies: bool,
    form: str,
    out: str | None,
    limit: int | None,
    full: bool,
) -> None:
    """Run SQL over topics, an archive or a store directory.

    \b
    cosmo pipeline query "SELECT tags, count(*) FROM orders GROUP BY tags"
    cosmo pipeline query "SELECT * FROM `%DLQ%billing`" -o jsonl
    cosmo pipeline query "SELECT topic, count(*) FROM store GROUP BY 1" --store ~/store

    A name in FROM is a topic; put it in backticks when it is not an SQL identifier. The tables
    `store` and `archive` hold all topics of --store and --archive. Columns: {columns}.
    """
    if form == PARQUET and out is None:
        raise ConfigError("-o parquet writes files; say where with --out PATH")
    tables = TableSource(
        cluster=_cluster(context, archive, store),
        archive=archive,
        store=store,
        names=dict(_topic_name(text) for text in topics),
        json_bodies=json_bodies,
    )
    asked = _limit(limit, form)
    frame = query(context.spark, sql, tables, limit=asked.fetched)
    context.note("running …")
    if form == PARQUET:
        assert out is not None
        frame.write.parquet(out)
        context.say(f"wrote {out}")
        return
    count = _write(context, frame, form, out, full=full, rows_max=asked.shown)
    if asked.shown is not None and count > asked.shown:
        context.say(f"the first {asked.shown} rows; --limit N shows N, --limit 0 all")


command.help = (command.help or "").format(columns=", ".join(KINDS))


@dataclasses.dataclass(frozen=True, slots=True)
class _Limit:
    fetched: int | None
    shown: int | None = (
        None  # without --limit: fewer than were fetched, so that it is known whether there are more
    )


def _limit(asked: int | None, form: str) -> _Limit:
    if asked is not None:
        return _Limit(asked or None)
    return _Limit(TABLE_ROWS + 1, TABLE_ROWS) if form == output.TABLE else _Limit(None)


def _write(
    context: JobContext,
    frame: DataFrame,
    form: str,
    out: str | None,
    *,
    full: bool,
    rows_max: int | None,
) -> int:
    cells = 0 if full else output.CELL_CHARACTERS
    if out is None:
        started = False

        def echo(text: str) -> None:
            nonlocal started
            if not started:
                context.clear_note()
                started = True
            sys.stdout.write(text)

        count = output.write(frame, form, echo, cell_characters=cells, rows_max=rows_max)
        sys.stdout.flush()
        return count
    with click.open_file(out, "w", encoding="utf-8", atomic=True) as file:
        count = output.write(frame, form, file.write, cell_characters=cells, rows_max=rows_max)
    context.say(f"wrote {count:,} {'row' if count == 1 else 'rows'} to {out}")
    return count


def _cluster(context: JobContext, archive: str | None, store: str | None) -> dict[str, str]:
    """A store is read alone. An archive is read together with a cluster only if -n names one."""
    if store is not None:
        if context.has_namesrv:
            raise ConfigError("--store reads files, not a cluster; leave out -n or --store")
        return {}
    if archive is not None and not context.has_namesrv:
        return {}
    return context.source_options()


def _topic_name(text: str) -> tuple[str, str]:
    """`NAME=VIEW` as (view, topic)."""
    topic, equals, view = text.partition("=")
    if not topic or (equals and not view):
        raise ConfigError(f"--topic {text!r}: write NAME or NAME=VIEW")
    return view or topic, topic
