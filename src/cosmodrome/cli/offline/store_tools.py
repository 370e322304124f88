"""`cosmo store …`: look into a store directory, or mend it, while no broker runs on it.

Data goes to stdout, everything else to stderr. Exit codes: 0 in order, 1 could not be done,
2 wrong usage, 6 problems were found.
"""

from __future__ import annotations

import asyncio
import datetime
import itertools
import json
import logging
import os.path
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

import click

from cosmodrome.cli.support.exits import EXIT_PROBLEMS
from cosmodrome.errors import StoreError

if TYPE_CHECKING:
    from cosmodrome.env.options import StoreOptions
    from cosmodrome.store.offline.directory import Hints, Plan, Report, StoreFiles

_Command = Callable[..., Any]


@click.group()
def store() -> None:
    """Check, read or repair a store directory without a broker.

    DIR is the root of a store, the setting storePathRootDir. Cosmodrome or any RocketMQ 4.x broker
    may have written it.
    """


def _on_directory(command: _Command) -> _Command:
    """DIR and what the files cannot say themselves."""
    size = click.IntRange(min=1)
    for option in (
        click.option("--max-index-num", type=size, metavar="N", help="Entries per index file."),
        click.option("--max-hash-slot-num", type=size, metavar="N", help="Slots per index file."),
        click.option(
            "--mapped-file-size-consume-queue",
            type=click.IntRange(min=20),
            metavar="N",
            help="Bytes per new queue file.  [default: as the files are]",
        ),
        click.option(
            "--mapped-file-size-commit-log",
            type=click.IntRange(min=4096),
            metavar="N",
            help="Bytes per log file.  [default: as the files are]",
        ),
        click.option("--store-path-commit-log", metavar="DIR", help="Directory of the log."),
        click.argument("directory", metavar="DIR"),
    ):
        command = option(command)
    return command


def _progress_option(command: _Command) -> _Command:
    return click.option(
        "--no-progress", is_flag=True, help="Show no progress, not even on a terminal."
    )(command)


def _derived_options(command: _Command) -> _Command:
    from_broker = "As in the broker's settings; it decides when delayed messages are due."
    command = click.option("--message-delay-level", metavar="TEXT", help=from_broker)(command)
    return click.option(
        "--no-index", is_flag=True, help="Ignore the key index, as with messageIndexEnable=false."
    )(command)


_format_option = click.option(
    "-o",
    "--output-format",
    type=click.Choice(["table", "json"]),
    default="table",
    help="Form of the report.",
)
_yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask.")
_dry_run_option = click.option("--dry-run", is_flag=True, help="Only say what would be done.")


@store.command()
@click.option(
    "--read-only",
    is_flag=True,
    help="Take no lock, so a broker may run. Faults in its newest data are then only noted.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    help="List at most this many findings.",
)
@_format_option
@_derived_options
@_progress_option
@_on_directory
def check(read_only: bool, limit: int, output_format: str, **rest: Any) -> None:
    """Prove that log, queues, index and tables are intact and agree.

    It walks the whole log, verifies checksums, and compares queues and index with the log entry by
    entry. The exit code is 6 when there are problems. A fault that the next start
    of the broker repairs is only noted.
    """
    with _opened(rest, read_only=read_only) as files:
        report = _checked(files, rest, read_only=read_only, limit=limit)
    _say_report(report, output_format)
    if not report.ok:
        sys.exit(EXIT_PROBLEMS)


@store.command()
@click.option("--topic", help="Only this topic.")
@click.option("--queue", type=int, help="Only this queue id.")
@click.option("--from", "start", type=int, default=0, help="First log offset.")
@click.option("--to", "end", type=int, help="Log offset to stop before.")
@click.option("--limit", type=click.IntRange(min=0), help="At most this many lines.")
@click.option("--no-body", is_flag=True, help="Leave bodies out.")
@click.option("--queue-entries", is_flag=True, help="Print entries of the consume queues instead.")
@click.option(
    "--index", "index_entries", is_flag=True, help="Print entries of the key index instead."
)
@_on_directory
def dump(
    topic: str | None,
    queue: int | None,
    start: int,
    end: int | None,
    limit: int | None,
    no_body: bool,
    queue_entries: bool,
    index_entries: bool,
    **rest: Any,
) -> None:
    """Print records of the log as JSON lines, in log order.

    A broker may run meanwhile. Damaged records are skipped with a warning.
    """
    import cosmodrome.store.offline.directory as offline
    from cosmodrome.cli.offline import store_rows

    if queue_entries and index_entries:
        raise click.UsageError("choose one of --queue-entries and --index")
    if index_entries and (topic is not None or queue is not None):
        raise click.UsageError("the index holds hashes only: --topic and --queue do not apply")
    selection = offline.Selection(
        topic, queue, start, offline.Selection().end if end is None else end
    )
    with _opened(rest, read_only=True) as files:
        rows: Iterator[dict[str, Any]]
        if queue_entries:
            rows = map(store_rows.queue_row, offline.queue_rows(files, selection))
        elif index_entries:
            rows = (
                store_rows.index_row(entry, files.name(entry.file.path))
                for entry in offline.all_index_entries(files)
                if selection.start <= entry.log_offset < selection.end
            )
        else:
            rows = (
                store_rows.message_row(record, body=not no_body)
                for record in offline.records(files, selection, on_damage=_warn_damage)
            )
        for row in itertools.islice(rows, limit):
            click.echo(store_rows.json_line(row), nl=False)


@store.command()
@click.option("--topic", help="Only this topic.")
@click.option("--since", metavar="TIME", help="Stored at or after: ISO 8601 or milliseconds.")
@click.option("--until", metavar="TIME", help="Stored at or before: ISO 8601 or milliseconds.")
@click.option(
    "-f",
    "--format",
    "form",
    type=click.Choice(["jsonl", "csv"]),
    default="jsonl",
    show_default=True,
    help="Form of the lines.",
)
@click.option(
    "--output",
    type=click.File("w", encoding="utf-8", lazy=True, atomic=True),
    default="-",
    help="Write to this file instead of stdout; it appears when it is complete.",
)
@_progress_option
@_on_directory
def export(
    topic: str | None, since: str | None, until: str | None, form: str, output: TextIO, **rest: Any
) -> None:
    """Write the messages of one topic, or of all, as JSON lines or CSV.

    A broker may run meanwhile. Every readable message is written, also behind a damaged record.
    """
    import cosmodrome.store.offline.directory as offline
    from cosmodrome.cli.offline import store_rows

    selection = offline.Selection(
        topic,
        since_ms=_time_ms(since, "--since") if since else 0,
        until_ms=_time_ms(until, "--until") if until else offline.Selection().until_ms,
    )
    count = 0

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal count
        found = offline.records(
            files, selection, on_damage=_warn_damage, progress=_progress("exporting", rest)
        )
        for record in found:
            count += 1
            yield store_rows.message_row(record)

    with _opened(rest, read_only=True) as files:
        lines = store_rows.csv_lines(rows()) if form == "csv" else map(store_rows.json_line, rows())
        output.writelines(lines)
    click.echo(f"{count} messages", err=True)


@store.command()
@_dry_run_option
@_yes_option
@_derived_options
@_progress_option
@_on_directory
def rebuild(dry_run: bool, yes: bool, **rest: Any) -> None:
    """Delete consume queues and key index and build them again from the log.

    The log itself must be in order; it stays as it is.
    """
    import cosmodrome.store.offline.directory as offline

    index = not rest["no_index"]
    with _opened(rest) as files:
        count = offline.prove_log(files, _progress("reading the log", rest))
        paths = offline.derived_paths(files, index=index)
        options = _options(files, rest)
        click.echo(
            f"{len(paths)} queue and index files of {files.root} are deleted and built again from"
            f" {count} messages, with the sizes mappedFileSizeConsumeQueue="
            f"{options.mapped_file_size_consume_queue} maxHashSlotNum={options.max_hash_slot_num}"
            f" maxIndexNum={options.max_index_num}",
            err=True,
        )
        if dry_run:
            return
        if not yes:
            click.confirm("Go on?", abort=True, err=True)
        offline.drop_derived(files, index=index)
    _open_once(options)
    _verify(rest)


@store.command()
@click.option(
    "--cut-at",
    type=click.IntRange(min=0),
    metavar="OFFSET",
    help="End the log at this offset and give up everything behind it.",
)
@_dry_run_option
@_yes_option
@_format_option
@_derived_options
@_progress_option
@_on_directory
def repair(cut_at: int | None, dry_run: bool, yes: bool, output_format: str, **rest: Any) -> None:
    """Repair a store that a broker refuses to open.

    It corrects lengths of files, restores tables from their previous generation and removes
    leftovers. Each file is copied to DIR/repair-TIME before it is changed. Messages are given up
    only with --cut-at.
    """
    import cosmodrome.store.offline.directory as offline
    from cosmodrome.env.real import WallClock
    from cosmodrome.wire import fastjson

    with _opened(rest) as files:
        options = _options(files, rest)
        plan = offline.plan_repair(files, fastjson.loads, cut_at)
        _say_plan(plan, output_format)
        if dry_run or plan.blocked or not plan.steps:
            if plan.undecided:
                sys.exit(EXIT_PROBLEMS)
            if not plan.steps:
                click.echo("nothing to repair; `cosmo store check` looks deeper", err=True)
            return
        if not yes:
            click.confirm("Go on?", abort=True, err=True)
        copies = offline.run_plan(files, plan, WallClock().now_ms())
        click.echo(f"what was changed is kept in {copies}", err=True)
    if plan.reopens:
        _open_once(options)
    _verify(rest)
    if plan.undecided:
        sys.exit(EXIT_PROBLEMS)


@store.command("set-aside")
@_dry_run_option
@_yes_option
@_on_directory
def set_aside(dry_run: bool, yes: bool, **rest: Any) -> None:
    """Move log, queues and tables away, so that a slave makes a new copy.

    They go to DIR/aside-TIME, a log elsewhere to a directory beside it. Account files and settings
    that were changed at run time stay. The next start finds an empty store: a slave copies
    everything from its master, and a master has lost everything.
    """
    from cosmodrome.cli.offline.set_aside import carry_out, planned
    from cosmodrome.env.real import WallClock

    with _opened(rest) as files:
        moves = planned(files.root, files.log_directory, WallClock().now_ms())
        for move in moves:
            click.echo(f"{move.source} -> {move.target}")
        if dry_run:
            return
        click.echo(
            "the next start of the broker finds an empty store; do this to a slave only", err=True
        )
        if not yes:
            click.confirm("Go on?", abort=True, err=True)
        carry_out(moves)
    click.echo("done; start the slave, and delete what was moved when it is in step", err=True)


# --- inside ------------------------------------------------------------------------------------
@contextmanager
def _opened(rest: dict[str, Any], *, read_only: bool = False) -> Iterator[StoreFiles]:
    import cosmodrome.store.offline.directory as offline
    from cosmodrome.env.real import RealDisk

    root = os.path.abspath(rest["directory"])
    try:
        with offline.opened(root, RealDisk(), _hints(rest), read_only=read_only) as files:
            yield files
    except BrokenPipeError:
        raise
    except FileNotFoundError as error:
        raise StoreError(
            f"{error.filename} vanished while it was read: a broker runs here and removes expired"
            " files; run it again"
        ) from None
    except OSError as error:
        raise StoreError(f"{error.filename or root}: {error.strerror or error}") from None


def _hints(rest: dict[str, Any]) -> Hints:
    import cosmodrome.store.offline.directory as offline

    log_directory = rest["store_path_commit_log"]
    return offline.Hints(
        log_directory=os.path.abspath(log_directory) if log_directory else "",
        log_file_bytes=rest["mapped_file_size_commit_log"] or 0,
        queue_file_bytes=rest["mapped_file_size_consume_queue"] or 0,
        index_slots=rest["max_hash_slot_num"] or 0,
        index_entries=rest["max_index_num"] or 0,
    )


def _checked(
    files: StoreFiles, rest: dict[str, Any], *, read_only: bool = False, limit: int = 100
) -> Report:
    import cosmodrome.store.offline.directory as offline
    from cosmodrome.wire import fastjson

    return offline.check(
        files,
        read_json=fastjson.loads,
        delays=offline.DelayLevels(_delay_levels(rest)),
        index=not rest["no_index"],
        read_only=read_only,
        limit=limit,
        progress=_progress("checking", rest),
    )


def _delay_levels(rest: dict[str, Any]) -> str:
    from cosmodrome.env.options import StoreOptions

    return rest["message_delay_level"] or StoreOptions().message_delay_level


def _options(files: StoreFiles, rest: dict[str, Any]) -> StoreOptions:
    import cosmodrome.store.offline.directory as offline

    levels = _delay_levels(rest)
    offline.DelayLevels(levels)  # refuse a bad text before anything is touched
    return offline.store_options(files, index=not rest["no_index"], delay_levels=levels)


def _open_once(options: StoreOptions) -> None:
    import cosmodrome.store.offline.directory as offline
    from cosmodrome.env.log_lines import LineFormatter
    from cosmodrome.env.real import real_env

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter("%(levelname)s %(message)s"))
    logging.basicConfig(level="WARNING", handlers=[handler])
    click.echo("opening the store, which builds what is missing", err=True)
    asyncio.run(offline.open_once(options, real_env()))


def _verify(rest: dict[str, Any]) -> None:
    with _opened(rest) as files:
        report = _checked(files, rest)
    _say_report(report, "table", err=True)
    if not report.ok:
        sys.exit(EXIT_PROBLEMS)


def _say_report(report: Report, output_format: str, *, err: bool = False) -> None:
    from cosmodrome.cli.offline import store_rows

    if output_format == "json":
        click.echo(json.dumps(store_rows.report_document(report), indent=2, ensure_ascii=False))
    else:
        click.echo(store_rows.report_text(report), nl=False, err=err)


def _say_plan(plan: Plan, output_format: str) -> None:
    from cosmodrome.cli.offline import store_rows

    if output_format == "json":
        click.echo(json.dumps(store_rows.plan_document(plan), indent=2, ensure_ascii=False))
    else:
        click.echo(store_rows.plan_text(plan), nl=False)


def _warn_damage(end: int, resumed: int) -> None:
    click.echo(
        f"cosmo: no good record at log offset {end}; going on at {resumed}. See `cosmo store"
        " check`",
        err=True,
    )


def _progress(what: str, rest: dict[str, Any]) -> Callable[[int, int], None]:
    """One line on a terminal's stderr that counts percents; nothing elsewhere."""
    if rest["no_progress"] or not sys.stderr.isatty():
        return lambda done, total: None
    shown = -1

    def show(done: int, total: int) -> None:
        nonlocal shown
        percent = 100 if done >= total else 100 * done // total
        if percent != shown:
            shown = percent
            click.echo(f"\r{what} {percent:3d} %", err=True, nl=percent == 100)

    return show


def _time_ms(text: str, option: str) -> int:
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is no time; use 2026-01-31T12:00:00, with +00:00 for UTC, or milliseconds",
            param_hint=option,
        ) from None
    return int(moment.timestamp() * 1000)
