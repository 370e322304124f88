"""The link between a supervisor and a worker, in the form of the worker's stdin and stdout.

The supervisor holds the other end of stdin and never writes to it. When the supervisor ends, in
whatever way, that end closes, and the worker stops cleanly: nothing serves that nobody watches.
On stdout the worker reports how it is, when that changes and once in a while in any case, so
that a worker whose loop hangs is noticed by its silence. Reports never wait: one that does not
fit is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

import msgspec

log = logging.getLogger("cosmo.worker")

MARK = b"@worker "
HTTP_HOST = "127.0.0.1"  # where workers tell their metrics, to their supervisor
LOOK_SECONDS_STARTING = 0.05
LOOK_SECONDS = 0.5
REPORT_SECONDS = 2.0
TEXT_MAX = 500  # a line shorter than PIPE_BUF is written whole or not at all
# A worker left alone gets this long for its clean stop.
ALONE_SECONDS = 30.0
EXIT_ALONE = 1
EXIT_SETTINGS = 78  # EX_CONFIG of sysexits.h: another start with the same words would end the same


class Report(msgspec.Struct, frozen=True):
    ready: bool
    text: str
    address: str = ""  # as clients are told
    http: int = 0  # port of its metrics, 0 when there is none


def encode(report: Report) -> bytes:
    short = msgspec.structs.replace(report, text=report.text[:TEXT_MAX])
    return MARK + msgspec.json.encode(short) + b"\n"


def decode(line: bytes) -> Report | None:
    """None for a line that is no report."""
    if not line.startswith(MARK):
        return None
    try:
        return msgspec.json.decode(line[len(MARK) :], type=Report)
    except msgspec.DecodeError:
        return None


class WorkerLink:
    """The worker's side. `look` says how it is, `alone` is called when the supervisor is gone."""

    def __init__(
        self,
        look: Callable[[], Report],
        alone: Callable[[], None],
        *,
        stdin: int = 0,
        stdout: int = 1,
    ) -> None:
        self._look = look
        self._alone = alone
        self._stdin = stdin
        self._stdout = stdout
        self._task: asyncio.Task[None] | None = None
        self._last_resort: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        if self._task is not None:
            return
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._stdout, False)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._stdin, self._on_stdin)
        self._task = loop.create_task(self._report())

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is None:
            return
        asyncio.get_running_loop().remove_reader(self._stdin)
        task.cancel()
        await asyncio.wait([task])
        if self._last_resort is not None:
            self._last_resort.cancel()

    def _on_stdin(self) -> None:
        try:
            if os.read(self._stdin, 4096):
                return
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("stdin_unreadable error=%s", error)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._stdin)
        log.warning("supervisor_gone; stopping")
        self._last_resort = loop.call_later(ALONE_SECONDS, os._exit, EXIT_ALONE)
        self._alone()

    async def _report(self) -> None:
        loop = asyncio.get_running_loop()
        sent: Report | None = None
        sent_at = 0.0
        was_ready = False
        while True:
            report = self._look()
            was_ready = was_ready or report.ready
            now = loop.time()
            if report != sent or now - sent_at >= REPORT_SECONDS:
                sent, sent_at = report, now
                self._write(encode(report))
            await asyncio.sleep(LOOK_SECONDS if was_ready else LOOK_SECONDS_STARTING)

    def _write(self, line: bytes) -> None:
        try:
            os.write(self._stdout, line)
        except BlockingIOError:
            pass
        except OSError as error:
            log.debug("report_unsent error=%s", error)  # stdin tells what it means
