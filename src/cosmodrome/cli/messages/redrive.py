"""`cosmo dlq redrive …`: dead letters, or messages of any topic, sent once more."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import click

from cosmodrome.cli.messages.dlq import source_arguments, source_topic
from cosmodrome.cli.messages.msg import moment
from cosmodrome.cli.messages.options import most_option, stored_options, tags_option
from cosmodrome.cli.support.arguments import GROUP, SETTING, TOPIC
from cosmodrome.cli.support.exits import PartlyDone
from cosmodrome.cli.support.lazy import DefaultGroup
from cosmodrome.cli.support.operating import (
    confirm,
    dry_run_option,
    note,
    watch_option,
    with_admin,
    yes_option,
)
from cosmodrome.cli.support.output import Column, output_option, show
from cosmodrome.cli.support.progress import Progress
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.redriving.audit import (
    ARRIVED,
    NOT_SENT,
    UNCERTAIN,
    UNKNOWN,
    Position,
    Run,
)
from cosmodrome.client.operate.redriving.audit import Outcome as Result
from cosmodrome.client.operate.redriving.plan import Filter, Plan, described
from cosmodrome.client.operate.redriving.redrive import Interrupted, Redrive, TakenOver
from cosmodrome.client.values import NoRoute
from cosmodrome.env.real import WallClock, real_env
from cosmodrome.wire.names import DLQ_PREFIX

RESULTS = (
    Column("broker", wide=True),
    Column("queue", right=True),
    Column("offset", right=True),
    Column("msg_id"),
    Column("outcome"),
    Column("target"),
    Column("new_msg_id"),
    Column("place"),
    Column("why"),
    Column("run", wide=True),
)
RUNS = (
    Column("run"),
    Column("source"),
    Column("target"),
    Column("state"),
    Column("arrived", right=True),
    Column("uncertain", right=True),
    Column("failed", right=True),
    Column("skipped", right=True),
    Column("left", right=True),
    Column("last_age_s", "LAST SIGN S", right=True),
    Column("filter", wide=True),
    Column("rate", wide=True, right=True),
    Column("most", wide=True, right=True),
    Column("under_way", wide=True, right=True),
    Column("begun_ms", wide=True, time=True),
    Column("last_ms", wide=True, time=True),
)
PREVIEW_MAX = 1_000


@click.group(cls=DefaultGroup, default="start")
def redrive() -> None:
    """Send dead letters once more: `cosmo dlq redrive GROUP`.

    Every step is written to the topic COSMO_REDRIVE_AUDIT, so a run that was stopped for any reason
    can be resumed. The messages stay where they are. Later runs skip what a run has redriven.
    """


@redrive.command()
@source_arguments
@click.option(
    "--to", "target", type=TOPIC, help="Send to this topic.  [default: where each came from]"
)
@click.option(
    "--to-group",
    "to_group",
    type=GROUP,
    help="Send only to this group, through its retry topic; other groups see nothing.",
)
@tags_option
@click.option("--key", "keys", multiple=True, help="Only messages with this key; may be repeated.")
@click.option(
    "--property",
    "properties",
    type=SETTING,
    multiple=True,
    metavar="NAME=VALUE",
    help="Only messages with this property; may be repeated.",
)
@stored_options
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    help="Messages per second.  [default: no limit]",
)
@most_option("--max", "most")
@click.option("--again", is_flag=True, help="Include what earlier runs have redriven.")
@dry_run_option
@yes_option
@output_option
@with_admin
async def start(
    admin: Admin,
    group: str | None,
    topic: str | None,
    target: str | None,
    to_group: str | None,
    tags: tuple[str, ...],
    keys: tuple[str, ...],
    properties: tuple[tuple[str, str], ...],
    since: str | None,
    until: str | None,
    rate: float | None,
    most: int | None,
    again: bool,
    dry_run: bool,
    yes: bool,
    output: str,
) -> None:
    """Redrive the dead letters of GROUP. A row on stdout says what became of each message."""
    work = Redrive(admin.fleet, real_env())
    source = await source_topic(admin, group, topic)
    plan = await work.planned(
        source,
        target=target,
        group=to_group,
        filter=Filter(tags, keys, dict(properties), moment(since), moment(until)),
        rate=rate,
        most=most,
        again=again,
    )
    if dry_run:
        found = await work.preview(plan, PREVIEW_MAX)
        _show_results(output, None, found)
        note(f"{len(found)} message(s) would be redriven; nothing was sent")
        return
    total = sum(part.end - part.begin for part in plan.parts)
    confirm(await _describe(admin, plan, total), yes=yes)
    note(f"run {plan.run}: `cosmo dlq redrive list` shows it, `cancel {plan.run}` ends it")
    await _watched(output, plan.run, work.start, plan, min(total, most or total))


@redrive.command()
@click.argument("run")
@output_option
@with_admin
async def resume(admin: Admin, run: str, output: str) -> None:
    """Continue a RUN that is not finished. If another command works on it, that one stops."""
    work = Redrive(admin.fleet, real_env())
    known = await work.run(run)
    left = _left(known)
    await _watched(output, run, work.resume, run, left, known)


@redrive.command()
@click.argument("run")
@output_option
@with_admin
async def cancel(admin: Admin, run: str, output: str) -> None:
    """End a RUN where it is. What it has sent stays sent."""
    done = await Redrive(admin.fleet, real_env()).cancel(run)
    show(output, RUNS, [_run_row(done)])


@redrive.command("list")
@output_option
@watch_option
@with_admin
async def list_runs(admin: Admin, output: str) -> None:
    """List runs, the latest last.

    LAST SIGN S is how many seconds ago a run last reported progress. If that is long ago and the
    run is still open, no command works on it any more.
    """
    show(output, RUNS, map(_run_row, await Redrive(admin.fleet, real_env()).runs()))


@redrive.command("show")
@click.argument("run")
@output_option
@with_admin
async def show_run(admin: Admin, run: str, output: str) -> None:
    """Show what became of each message of a RUN."""
    known = await Redrive(admin.fleet, real_env()).run(run)
    _show_run(output, known)
    note(_summary(known))


# --- parts -----------------------------------------------------------------------------------


async def _watched(
    output: str, run_id: str, work: object, what: object, total: int, before: Run | None = None
) -> None:
    """Run it with a progress bar; then what became of each message."""
    assert callable(work)
    try:
        async with Progress("redriven", total=total) as progress:

            def count(_: Result) -> None:
                progress.done += 1

            done: Run = await work(what, count)
    except asyncio.CancelledError:
        note(f"stopped; `cosmo dlq redrive resume {run_id}` goes on with it")
        raise
    except (Interrupted, TakenOver) as error:
        raise PartlyDone(str(error)) from None
    _show_run(output, done, before)
    note(_summary(done))
    failed = sum(done.counts.values()) - sum(done.counts[name] for name in ARRIVED)
    if failed:
        raise PartlyDone(
            f"{failed} message(s) were not redriven, see above; they are still in"
            f" {done.plan.source}, and the next run takes them"
        )


async def _describe(admin: Admin, plan: Plan, total: int) -> str:
    where = described(plan)["target"]
    seen = ""
    if plan.group is None:
        topics = {plan.target} if plan.target else set()
        if not topics and plan.source.startswith(DLQ_PREFIX):
            work = Redrive(admin.fleet, real_env())
            topics = {one.topic for _, one in await work.preview(plan, 1) if one.topic}
        for topic in topics:
            try:
                groups = await admin.topics.consumers(str(topic))
            except NoRoute:
                continue
            if groups:
                seen = f"; every group of {topic} gets them: {', '.join(groups[:5])}"
    few = f"at most {plan.most} of " if plan.most else "up to "
    return f"{few}{total} message(s) of {plan.source} go to the {where}{seen}"


def _show_run(output: str, run: Run, before: Run | None = None) -> None:
    known = before.results if before is not None else {}
    rows = (
        (position, outcome)
        for position, outcome in sorted(run.results.items())
        if known.get(position) != outcome
    )
    _show_results(output, run.plan.run, rows)


def _show_results(output: str, run: str | None, results: Iterable[tuple[Position, Result]]) -> None:
    show(
        output,
        RESULTS,
        (
            {
                "run": run,
                "broker": position.broker,
                "queue": position.queue,
                "offset": one.offset,
                "msg_id": one.msg_id,
                "outcome": one.outcome,
                "target": one.topic,
                "new_msg_id": one.new_id,
                "place": one.place,
                "why": one.why,
            }
            for position, one in results
        ),
    )


def _left(run: Run) -> int:
    """Messages of the plan that were not looked at yet."""
    left = 0
    for part in run.plan.parts:
        at = max(part.begin, run.position.get((part.broker, part.queue), 0))
        left += max(0, part.end - at)
    return left


def _run_row(run: Run) -> dict[str, object]:
    counts = run.counts
    arrived = sum(counts[name] for name in ARRIVED)
    open_still = run.state == "open"
    return {
        **described(run.plan),
        "run": run.plan.run,
        "state": run.state,
        "arrived": arrived,
        "uncertain": counts[UNCERTAIN] + counts[UNKNOWN],
        "failed": sum(counts.values()) - arrived - counts[UNKNOWN] - counts[NOT_SENT],
        "skipped": run.skipped,
        "left": _left(run) if open_still else 0,
        "under_way": run.unanswered if open_still else 0,
        "begun_ms": run.begun_ms,
        "last_ms": run.last_ms,
        "last_age_s": round(max(0, WallClock().now_ms() - run.last_ms) / 1000, 1),
    }


def _summary(run: Run) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in sorted(run.counts.items()))
    skipped = f", {run.skipped} skipped" if run.skipped else ""
    return f"run {run.plan.run} is {run.state}: {counts or 'nothing to do'}{skipped}"
