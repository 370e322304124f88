"""Several processes kept running: started, watched, started again when they end, stopped together.

Each child has a life of its own: one that keeps dying is started again after growing pauses, with
an error in the log each time, and the others never notice. A child is in a session of its own, so
that a signal from a terminal reaches only the supervisor, which then stops all in order. The end of
the supervisor reaches the children through their stdin (see `worker_link.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
from collections.abc import AsyncIterator, Callable, Sequence

from cosmodrome.cli.serve import worker_link
from cosmodrome.cli.serve.worker_link import Report
from cosmodrome.env.backoff import Backoff

log = logging.getLogger("cosmo.supervise")

READ_BYTES = 1 << 16
LINE_BYTES_MAX = 1 << 14
DEATHS_OF_A_LOOP = 3  # so many deaths in a row are called a crash loop
LAST_WORDS_SECONDS = 1.0  # for output that is still in the pipes of a child that ended

# The words that start a child. True when the last one started so never became ready.
Command = Callable[[bool], Sequence[str]]
Out = Callable[[str], None]
PREFIXED = "{} | {}".format  # the name of a child and a line that it wrote


@dataclasses.dataclass(frozen=True, slots=True)
class Pacing:
    first_pause_s: float = 1.0
    pause_s_max: float = 30.0
    healthy_s: float = 60.0  # ready this long, a child's earlier deaths are forgotten
    stop_s: float = 30.0
    silent_s: float = 10.0  # without a report, a child is no longer believed to be ready


class Child:
    """One process, started again whenever it ends, until `stop`."""

    def __init__(
        self,
        name: str,
        command: Command,
        out: Out,
        pacing: Pacing,
        mark: Callable[[str, str], str] = PREFIXED,
    ) -> None:
        """`mark` makes of its name and a line that it wrote what is passed to `out`."""
        self.name = name
        self.report: Report | None = None  # the last one of this life
        self.starts = 0
        self.was_ready = False  # in any life
        self.killed = False  # because it did not stop in time
        self.refuses_settings = False  # says its last life
        self._command = command
        self._out = out
        self._mark = mark
        self._pacing = pacing
        self._why = "not started"
        self._heard_at = 0.0
        self._ready_at: float | None = None
        self._backoff = Backoff(pacing.first_pause_s, pacing.pause_s_max)
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """None between two lives."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        if self._task is None:
            self._stopping.clear()
            self._task = asyncio.create_task(self._run(), name=f"child {self.name}")

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL to a child that takes longer than it may."""
        task, self._task = self._task, None
        if task is None:
            return
        self._stopping.set()
        self._signal(signal.SIGTERM)
        _, late = await asyncio.wait([task], timeout=self._pacing.stop_s)
        if late:
            self.killed = True
            log.error(
                "worker_killed name=%s pid=%s reason='no clean stop within %g s'",
                self.name,
                self.pid,
                self._pacing.stop_s,
            )
            self.kill()
        await task

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def ready(self) -> tuple[bool, str]:
        """Whether this child serves, and why not."""
        if self._stopping.is_set():
            return False, "stopping"
        if self._process is None or self.report is None:
            return False, self._why
        silent_s = asyncio.get_running_loop().time() - self._heard_at
        if self.report.ready and silent_s > self._pacing.silent_s:
            return False, f"no sign of life for {silent_s:.0f} s (pid {self.pid})"
        return self.report.ready, self.report.text

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        useless = False
        while not self._stopping.is_set():
            began = loop.time()
            ended = await self._live(useless)
            if self._stopping.is_set():
                break
            useless = self._ready_at is None
            if (
                self._ready_at is not None
                and loop.time() - self._ready_at >= self._pacing.healthy_s
            ):
                self._backoff.reset()
            pause_s = self._backoff.next_s()
            deaths = self._backoff.failures  # in a row
            self._why = f"{ended}; starts again within {pause_s:g} s"
            log.error(
                "worker_died name=%s ended=%r lived_s=%.1f deaths=%d restart_in_s=%g",
                self.name,
                ended,
                loop.time() - began,
                deaths,
                pause_s,
            )
            if deaths >= DEATHS_OF_A_LOOP:
                log.error(
                    "worker_crash_loop name=%s deaths=%d; its own lines above say why, the other"
                    " workers go on",
                    self.name,
                    deaths,
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()

    async def _live(self, useless: bool) -> str:
        """One life; how it ended."""
        self.report, self._ready_at, self._why = None, None, "starting"
        self.starts += 1
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command(useless),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except Exception as error:
            return f"cannot be started: {error}"
        assert process.stdout is not None and process.stderr is not None
        self._process = process
        log.info("worker_started name=%s pid=%d", self.name, process.pid)
        if self._stopping.is_set():
            self._signal(signal.SIGTERM)
        ears = [
            asyncio.create_task(self._hear(process.stdout)),
            asyncio.create_task(self._hear(process.stderr)),
        ]
        try:
            status = await process.wait()
            await asyncio.wait(ears, timeout=LAST_WORDS_SECONDS)
        except BaseException:
            self.kill()
            raise
        finally:
            for ear in ears:
                ear.cancel()
            self._process = None
        self.refuses_settings = status == worker_link.EXIT_SETTINGS
        return _ending(status)

    async def _hear(self, stream: asyncio.StreamReader) -> None:
        async for line in _lines(stream):
            report = worker_link.decode(line)
            if report is None:
                self._out(self._mark(self.name, line.decode(errors="replace")))
                continue
            now = asyncio.get_running_loop().time()
            self._heard_at = now
            if report.ready:
                self.was_ready = True
                self._ready_at = now if self._ready_at is None else self._ready_at
            self.report = report

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


class Supervisor:
    """All children."""

    def __init__(self, children: Sequence[Child]) -> None:
        self.children = tuple(children)

    async def start(self) -> None:
        for child in self.children:
            await child.start()

    async def stop(self) -> None:
        await asyncio.gather(*(child.stop() for child in self.children))

    def kill(self) -> None:
        for child in self.children:
            child.kill()

    @property
    def all_stopped_cleanly(self) -> bool:
        return not any(child.killed for child in self.children)

    @property
    def is_misconfigured(self) -> bool:
        """Nobody has ever been ready, and somebody says that starting again will not help."""
        return any(child.refuses_settings for child in self.children) and not any(
            child.was_ready for child in self.children
        )

    def ready(self) -> tuple[bool, str]:
        """Ready when all children are."""
        states = [(child.name, *child.ready()) for child in self.children]
        waiting = [f"{name}: {text}" for name, ready, text in states if not ready]
        count = len(states) - len(waiting)
        return not waiting, "; ".join([f"{count} of {len(states)} workers are ready", *waiting])

    def started(self) -> tuple[bool, str]:
        """Whether every child has been ready once."""
        waiting = [child.name for child in self.children if not child.was_ready]
        if not waiting:
            return True, "started"
        return False, f"starting: {', '.join(waiting)}"


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Lines without their ends; one that is too long comes in pieces."""
    rest = b""
    while data := await stream.read(READ_BYTES):
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line
        if len(rest) > LINE_BYTES_MAX:
            yield rest
            rest = b""
    if rest:
        yield rest


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
