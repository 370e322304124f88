"""`cosmo top`: brokers, topics and groups of a cluster, drawn again and again on a terminal.

Elsewhere it is one snapshot in any form. The terminal is left as it was found, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import shutil
import sys
from collections.abc import Iterator, Sequence

import click

from cosmodrome.cli.operate.cluster import figures
from cosmodrome.cli.support.context import namesrv_option
from cosmodrome.cli.support.operating import finish, opened, timeout_option
from cosmodrome.cli.support.output import (
    FOR_PEOPLE,
    UNKNOWN,
    Column,
    output_option,
    paint,
    show,
    show_one,
    table_lines,
    text_width,
)
from cosmodrome.cli.support.running import EXIT_INTERRUPTED
from cosmodrome.client.operate.overview import BrokerLine, Overview, overview
from cosmodrome.env.real import WallClock
from cosmodrome.errors import CosmodromeError
from cosmodrome.wire.bodies import MASTER_ID

BROKERS = (
    Column("broker"),
    Column("role"),
    Column("address"),
    Column("state"),
    Column("in_per_s", "IN/S", right=True),
    Column("out_per_s", "OUT/S", right=True),
    Column("disk_used_percent", "DISK %", right=True),
    Column("version"),
    Column("cluster", wide=True),
)
TOPICS = (
    Column("topic"),
    Column("in_per_s", "IN/S", right=True),
    Column("out_per_s", "OUT/S", right=True),
    Column("groups", right=True),
)
GROUPS = (
    Column("group"),
    Column("members", right=True),
    Column("out_per_s", "OUT/S", right=True),
    Column("lag", right=True),
    Column("lag_s", "LAG S", right=True),
)
PARTS = (("broker", BROKERS), ("topic", TOPICS), ("group", GROUPS))
_NAMES = dict.fromkeys(column.name for _, columns in PARTS for column in columns)

ENTER_SCREEN = "\x1b[?1049h\x1b[?25l"
LEAVE_SCREEN = "\x1b[?25h\x1b[?1049l"
HOME, LINE_END, BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
QUIT_KEYS = frozenset(b"qQ\x03\x04\x1b")

Rows = dict[str, list[dict[str, object]]]


@click.command()
@click.option(
    "--every",
    type=click.FloatRange(min=0.2),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two drawings.",
)
@click.option(
    "--once", is_flag=True, help="Print one snapshot. Without a terminal this is always so."
)
@output_option
@timeout_option
@namesrv_option
def top(every: float, once: bool, output: str, timeout: float, namesrv: str) -> None:
    """Watch the cluster live: brokers, the busiest topics, the groups farthest behind.

    Rates of brokers are means of ten seconds, those of topics and groups of a minute. q ends it.
    """
    live = sys.stdin.isatty() and sys.stdout.isatty() and not once and output in FOR_PEOPLE
    if not live:
        finish(_snapshot(namesrv, timeout, output))
        return
    try:
        finish(_live(namesrv, timeout, every))
    except click.exceptions.Exit as ended:
        code = 0 if ended.exit_code == EXIT_INTERRUPTED else ended.exit_code
        raise click.exceptions.Exit(code) from None


async def _snapshot(namesrv: str, timeout: float, output: str) -> None:
    async with opened(namesrv, timeout) as admin:
        seen = await overview(admin)
    rows = _rows(seen)
    if output in FOR_PEOPLE:
        for number, (kind, columns) in enumerate(PARTS):
            click.echo("" if number == 0 else "\n", nl=False)
            show(output, columns, rows[kind])
    elif output in ("json", "yaml"):
        named = {
            f"{kind}s": [{column.name: row.get(column.name) for column in columns} for row in found]
            for (kind, columns), found in zip(PARTS, rows.values(), strict=True)
        }
        show_one(output, named)
    else:
        columns = (Column("kind"), *map(Column, _NAMES))
        show(output, columns, ({"kind": kind, **row} for kind, _ in PARTS for row in rows[kind]))


async def _live(namesrv: str, timeout: float, every: float) -> None:
    """Until a key says so. What goes wrong is shown in place, and tried again."""
    quitting = asyncio.Event()
    async with opened(namesrv, timeout) as admin:
        with _screen(quitting):
            while not quitting.is_set():
                problem, seen = "", None
                looking = asyncio.ensure_future(overview(admin))
                waiting = asyncio.ensure_future(quitting.wait())
                try:
                    await asyncio.wait((looking, waiting), return_when=asyncio.FIRST_COMPLETED)
                    if not looking.done():
                        return
                    seen = looking.result()
                except CosmodromeError as error:
                    problem = str(error)
                finally:
                    for task in (looking, waiting):
                        task.cancel()
                    await asyncio.gather(looking, waiting, return_exceptions=True)
                _draw(namesrv, every, seen, problem)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(every):
                        await quitting.wait()


@contextlib.contextmanager
def _screen(quitting: asyncio.Event) -> Iterator[None]:
    """The other screen of the terminal, with keys that arrive at once."""
    import os
    import termios
    import tty

    keys = sys.stdin.fileno()
    loop = asyncio.get_running_loop()

    def pressed() -> None:
        typed = os.read(keys, 64)
        # Nothing at all is the end of the terminal. An escape alone is a key, more is an arrow.
        if not typed or (typed[0] in QUIT_KEYS and (typed[0] != 0x1B or len(typed) == 1)):
            quitting.set()

    before = termios.tcgetattr(keys)
    tty.setcbreak(keys)
    loop.add_reader(keys, pressed)
    _write(ENTER_SCREEN)
    try:
        yield
    finally:
        loop.remove_reader(keys)
        termios.tcsetattr(keys, termios.TCSADRAIN, before)
        _write(LEAVE_SCREEN)


def _draw(namesrv: str, every: float, seen: Overview | None, problem: str) -> None:
    width, height = shutil.get_terminal_size()
    now = datetime.datetime.fromtimestamp(WallClock().now_ms() / 1000).strftime("%H:%M:%S")
    lines = [paint(fit(f"cosmo top  {namesrv}  {now}  every {every:g} s  q ends", width), dim=True)]
    if problem:
        lines += ["", paint(fit(problem, width), fg="red")]
    if seen is not None:
        lines += screen_lines(seen, width, height - len(lines) - 1)
    _write(HOME + "".join(f"{line}{LINE_END}\n" for line in lines[: height - 1]) + BELOW)


def screen_lines(seen: Overview, width: int, height: int) -> list[str]:
    """The three tables in `height` lines: brokers whole, then topics and groups share the rest."""
    rows = _rows(seen)
    room = max(0, height - len(rows["broker"]) - 6)  # three headings and the gaps before them
    groups = min(len(rows["group"]), max(room // 2, room - len(rows["topic"])))
    shown = {"broker": len(rows["broker"]), "topic": room - groups, "group": groups}
    lines: list[str] = []
    for kind, columns in PARTS:
        head, *table = table_lines(columns, rows[kind][: shown[kind]])
        more = len(rows[kind]) - shown[kind]
        note = f"  (+{more} more)" if more > 0 else ""
        lines += ["", paint(fit(head + note, width), bold=True)]
        lines += [fit(line, width) for line in table]
    if seen.left_out:
        lines.append(fit(f"{seen.left_out} topics and groups are not looked at", width))
    return lines


def fit(text: str, width: int) -> str:
    """As much of a line as a terminal of this width shows."""
    while text_width(text) > width:
        text = text[: max(0, len(text) - max(1, (text_width(text) - width) // 2))]
    return text


# --- rows ------------------------------------------------------------------------------------


def _rows(seen: Overview) -> Rows:
    return {
        "broker": [_broker(line) for line in seen.brokers],
        "topic": [
            {
                "topic": line.topic,
                "in_per_s": _known(line.in_per_s),
                "out_per_s": _known(line.out_per_s),
                "groups": line.groups,
            }
            for line in seen.topics
        ],
        "group": [
            {
                "group": line.group,
                "members": _known(line.members),
                "out_per_s": _known(line.out_per_s),
                "lag": _known(line.lag),
                "lag_s": UNKNOWN if line.age_ms is None else round(line.age_ms / 1000, 1),
            }
            for line in seen.groups
        ],
    }


def _broker(line: BrokerLine) -> dict[str, object]:
    row: dict[str, object] = {
        "cluster": line.cluster,
        "broker": line.broker,
        "role": "master" if line.number == MASTER_ID else "slave",
        "address": line.address,
    }
    if line.runtime is None:
        unknown: Sequence[str] = ("in_per_s", "out_per_s", "disk_used_percent", "version")
        return {**row, "state": line.state, **dict.fromkeys(unknown, UNKNOWN)}
    values = figures(line.runtime)
    return {**row, "state": line.state, **{name: values[name] for name in values if name in _NAMES}}


def _known(value: float | None) -> object:
    return UNKNOWN if value is None else value


def _write(text: str) -> None:
    click.echo(text, nl=False, color=True)
