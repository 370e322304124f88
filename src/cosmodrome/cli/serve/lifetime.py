"""Runs servers until they are told to stop: loop, logging, signals, ports that are taken.

SIGTERM and SIGINT drain and stop cleanly; a second one ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from cosmodrome.cli.serve import log_format
from cosmodrome.cli.support.running import loop_factory
from cosmodrome.errors import ConfigError, StoreUnwritable
from cosmodrome.speed import lane
from cosmodrome.transport.admission import raise_file_limit
from cosmodrome.transport.certificates import Tls
from cosmodrome.transport.http.health import HealthServer

log = logging.getLogger("cosmo")

EXIT_SECOND_SIGNAL = 130
# A supervisor may signal the process and its group: that is one wish, not impatience.
SAME_SIGNAL_SECONDS = 1.0
# What a server is made of lives as long as it does. A full pass of the garbage collector over it
# would stop the loop for about 30 ms, again and again.
MADE_SECONDS = 1.0
SWITCH_SECONDS = 0.0005


class Logs(NamedTuple):
    """What is logged, and in which form."""

    level: str
    form: str = log_format.TEXT


class Part(Protocol):
    async def start(self) -> None: ...
    async def stop(self) -> None: ...


class running:
    """Start a part, stop it on the way out, and explain a port that is taken."""

    def __init__(self, part: Part, *, flag: str) -> None:
        self._part = part
        self._flag = flag

    async def __aenter__(self) -> None:
        try:
            await self._part.start()
        except BaseException as error:
            await self._part.stop()
            if isinstance(error, OSError | ConfigError):
                raise _explained(error, self._flag) from None
            raise

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._part.stop()
        except OSError as error:
            raise StoreUnwritable(
                f"stopped, but not everything could be saved ({error}); no message is lost,"
                " consumers may get some again: free disk space or mend the permissions before the"
                " next start"
            ) from None


async def listen(work: Awaitable[int], flag: str) -> int:
    try:
        return await work
    except (OSError, ConfigError) as error:
        raise _explained(error, flag) from None


async def health_port(
    stack: contextlib.AsyncExitStack, health: HealthServer, host: str, port: int
) -> str:
    """Serve probes until the stack ends; where, as HOST:PORT."""
    stack.push_async_callback(health.stop)
    return f"{dialled(host)}:{await listen(health.listen(host, port), '--http-port')}"


def probe_url(http: str, tls: Tls) -> str:
    """What to ask at HOST:PORT whether the server is ready."""
    return f"{'https' if tls.enforces else 'http'}://{http}/readyz"


def _core_missing() -> tuple[str, str]:
    """Why the compiled core does not run, and what to do about it."""
    if os.environ.get("COSMODROME_PURE", "") not in ("", "0"):
        return "COSMODROME_PURE is set", "unset COSMODROME_PURE"
    return (
        "it is not built for this Python",
        "install a C compiler and Python's headers, then this package again",
    )


def run_until_stopped(
    serve: Callable[[asyncio.Event], Awaitable[None]],
    logs: Logs,
    *,
    at_once: Callable[[], None] = lambda: None,
) -> None:
    """Run `serve`, whose event is set by the first signal; `at_once` comes before a hard exit."""
    log_format.set_up(logs.level, logs.form)
    log.info("open files: files_max=%d", raise_file_limit())
    if not lane.HAS_LANE:
        log.warning(
            "the compiled core is not loaded (%s): the same behaviour at several times the"
            " CPU per message; to get it, %s",
            *_core_missing(),
        )

    async def guarded() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        first_at = 0.0

        def asked() -> None:
            nonlocal first_at
            if not stop.is_set():
                first_at = loop.time()
                stop.set()
            elif loop.time() - first_at > SAME_SIGNAL_SECONDS:
                at_once()
                os._exit(EXIT_SECOND_SIGNAL)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, asked)
        loop.call_later(MADE_SECONDS, gc.freeze)
        # Threads that write tables or read large bodies give way to the loop within this time.
        sys.setswitchinterval(SWITCH_SECONDS)
        await serve(stop)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(guarded())


def dialled(host: str) -> str:
    """Where to reach a server that listens on `host`, from this machine."""
    return "127.0.0.1" if host in ("", "0.0.0.0", "::") else host


def _explained(error: OSError | ConfigError, flag: str) -> ConfigError:
    """Say which flag of this command moves a port that is taken."""
    text = str(error)
    if "address already in use" in text.lower():
        text = (
            f"{text.split('; ')[0]}; stop what uses it or choose a port with {flag} (0 picks one)"
        )
    return ConfigError(text)
