"""Threads call into one event loop that runs in the background.

The loop's thread starts with the first user and ends with the last. A thread that is interrupted
while it waits (Ctrl-C) cancels what it waited for. After a fork the child has no such thread:
objects from before the fork say so, new ones work. This module and `env/real.py` are the only
ones that know threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from cosmodrome.errors import ConfigError

T = TypeVar("T")

Future = concurrent.futures.Future  # what a thread waits for

STOP_TIMEOUT_S = 30.0


class Portal:
    """An event loop in a thread of its own."""

    def __init__(self, name: str = "cosmodrome") -> None:
        self._name = name
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is not None:
            return
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name=self._name, daemon=True
        )
        self._thread.start()
        started.wait()

    def stop(self) -> None:
        """What still runs in the loop is cancelled."""
        thread, self._thread = self._thread, None
        if thread is None or self._pid != os.getpid():
            return
        assert self._loop is not None and self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        thread.join(STOP_TIMEOUT_S)

    @property
    def is_here(self) -> bool:
        """Whether the caller is in the loop's own thread, which must not wait."""
        return threading.current_thread() is self._thread

    def spawn(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run it in the loop; cancelling the future cancels it."""
        try:
            loop = self._checked()
        except ConfigError:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(work, loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it in the loop and wait for it."""
        if self.is_here:
            work.close()
            raise ConfigError(
                "a blocking call inside of the event loop would wait for itself;"
                " use the async client there"
            )
        future = self.spawn(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def do(self, work: Callable[[], T]) -> T:
        """Call a plain function in the loop."""

        async def called() -> T:
            return work()

        return self.call(called())

    def _checked(self) -> asyncio.AbstractEventLoop:
        if self._pid != os.getpid():
            raise ConfigError(
                "this client was made before the process forked; make a new one in the child"
            )
        if self._thread is None or self._loop is None:
            raise ConfigError("this client is not started, or closed; use `with`")
        return self._loop

    def _run(self, started: threading.Event) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._stop = asyncio.Event()
            started.set()
            await self._stop.wait()

        asyncio.run(serve())


class SharedPortal:
    """One portal for all blocking clients of the process, as long as there is any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._portal: Portal | None = None
        self._users = 0

    def acquire(self) -> Portal:
        with self._lock:
            if self._portal is None:
                self._portal = Portal()
                self._portal.start()
            self._users += 1
            return self._portal

    def release(self, portal: Portal) -> None:
        with self._lock:
            if portal is not self._portal:
                return  # from before a fork
            self._users -= 1
            if self._users:
                return
            self._portal = None
        portal.stop()

    def forget(self) -> None:
        """In a child process: neither thread nor lock can be trusted."""
        self._lock = threading.Lock()
        self._portal = None
        self._users = 0


shared = SharedPortal()
os.register_at_fork(after_in_child=shared.forget)


class Workers:
    """Threads for functions that block, as many as are needed up to a bound."""

    def __init__(self, count_max: int) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(
            count_max, thread_name_prefix="cosmodrome-handler"
        )

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def close(self) -> None:
        """Functions that run go on; those that wait for a thread do not begin."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Slots:
    """Bounds what is under way; taking one waits for room."""

    def __init__(self, count: int) -> None:
        self._semaphore = threading.BoundedSemaphore(count)

    def take(self) -> None:
        self._semaphore.acquire()

    def take_now(self) -> bool:
        """False when there is no room."""
        return self._semaphore.acquire(blocking=False)

    def give_back(self, _: object = None) -> None:
        self._semaphore.release()
