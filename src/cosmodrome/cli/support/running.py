"""Run one command's coroutine: quickly, and to an orderly end on Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import click

T = TypeVar("T")

EXIT_INTERRUPTED = 130


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. A signal cancels it, so that it can close its connections."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_interruptible(work))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # it has no wheel for some platforms
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _interruptible(work: Coroutine[Any, Any, T]) -> T:
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise click.exceptions.Exit(EXIT_INTERRUPTED) from None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
