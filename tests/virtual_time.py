"""Async tests in which sleeping takes no time, for code that waits for nothing but timers."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from cosmodrome.sim.loop import JumpLoop

P = ParamSpec("P")


def virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run the test on a loop whose clock jumps to the next timer, so no machine is too slow.

    Sockets, threads and async fixtures do not work there.
    """

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=JumpLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
