"""How far long work has come, on stderr, and only when somebody looks."""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType

import click

EVERY_S = 0.5


class Progress:
    """Counts; while it is entered and stderr is a terminal, the count is shown twice a second."""

    def __init__(self, verb: str, *, total: int | None = None, quiet: bool = False) -> None:
        self.done = 0
        self._verb = verb
        self._total = total
        self._shown = not quiet and sys.stderr.isatty()
        self._started = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def elapsed_s(self) -> float:
        return max(asyncio.get_running_loop().time() - self._started, 1e-9)

    def summary(self) -> str:
        rate = self.done / self.elapsed_s
        noun = "message" if self.done == 1 else "messages"
        return f"{self._verb} {self.done:,} {noun} in {self.elapsed_s:.2f} s ({rate:,.0f}/s)"

    async def __aenter__(self) -> Progress:
        self._started = asyncio.get_running_loop().time()
        if self._shown:
            self._task = asyncio.get_running_loop().create_task(self._show())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
            click.echo("\r\x1b[K", nl=False, err=True)

    async def _show(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            share = ""
            if self._total:
                share = f" of {self._total:,} ({100 * self.done / self._total:.0f} %)"
            rate = self.done / self.elapsed_s
            click.echo(
                f"\r\x1b[K{self._verb} {self.done:,}{share}, {rate:,.0f}/s", nl=False, err=True
            )
