"""The worker's side of the link: it reports, it never waits, it notices that it is alone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from cosmodrome.cli.serve import worker_link
from cosmodrome.cli.serve.worker_link import MARK, Report, WorkerLink, decode, encode


class Pipes:
    def __init__(self) -> None:
        self.stdin, self.supervisor_end = os.pipe()
        self.reports, self.stdout = os.pipe()
        os.set_blocking(self.reports, False)
        self.seen = b""

    def read(self) -> list[Report]:
        try:
            self.seen += os.read(self.reports, 1 << 20)
        except BlockingIOError:
            pass
        found = [decode(line) for line in self.seen.split(b"\n")[:-1]]
        assert None not in found
        return [report for report in found if report is not None]

    def hang_up(self) -> None:
        if self.supervisor_end >= 0:
            os.close(self.supervisor_end)
        self.supervisor_end = -1

    def close(self) -> None:
        self.hang_up()
        for end in (self.stdin, self.reports, self.stdout):
            os.close(end)


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    both = Pipes()
    yield both
    both.close()


def test_reports_come_back_and_other_lines_do_not() -> None:
    report = Report(False, "starting: 'é' \n two", "127.0.0.1:10911")
    line = encode(report)
    assert line.count(b"\n") == 1 and decode(line.rstrip(b"\n")) == report
    assert decode(b"2026-01-01 INFO something") is None
    assert decode(MARK + b"{broken") is None
    assert len(encode(Report(True, "x" * 100_000))) < 4096


async def test_a_change_is_reported_soon_and_silence_never_lasts(
    pipes: Pipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_link, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(worker_link, "REPORT_SECONDS", 0.1)
    state = Report(False, "starting")
    link = WorkerLink(lambda: state, lambda: None, stdin=pipes.stdin, stdout=pipes.stdout)
    await link.start()
    await link.start()
    async with asyncio.timeout(60):
        while not pipes.read():
            await asyncio.sleep(0.01)
        state = Report(True, "fine", "h:1")
        while pipes.read()[-1] != state:
            await asyncio.sleep(0.01)
        count = len(pipes.read())
        while len(pipes.read()) < count + 2:
            await asyncio.sleep(0.01)
    await link.stop()
    await link.stop()


async def test_a_supervisor_that_does_not_read_holds_nobody_up(
    pipes: Pipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_link, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(worker_link, "REPORT_SECONDS", 0.0)
    link = WorkerLink(
        lambda: Report(True, "x" * 400), lambda: None, stdin=pipes.stdin, stdout=pipes.stdout
    )
    await link.start()
    full = b""
    async with asyncio.timeout(60):
        while not full:  # the pipe takes 64 KiB
            await asyncio.sleep(0.01)
            try:
                os.write(pipes.stdout, b"\n")
            except BlockingIOError:
                full = b"full"
        await asyncio.sleep(0.01)
    await link.stop()


async def test_the_end_of_the_supervisor_is_noticed_once(pipes: Pipes) -> None:
    calls: list[None] = []
    alone = asyncio.Event()

    def on_alone() -> None:
        calls.append(None)
        alone.set()

    link = WorkerLink(
        lambda: Report(True, "fine"), on_alone, stdin=pipes.stdin, stdout=pipes.stdout
    )
    await link.start()
    await asyncio.sleep(0.05)
    assert not alone.is_set()
    pipes.hang_up()
    async with asyncio.timeout(60):
        await alone.wait()
    await asyncio.sleep(0.05)
    assert len(calls) == 1
    await link.stop()
