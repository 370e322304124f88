"""Processes kept running: pauses between lives, a crash loop beside a healthy one, the stop."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
from collections.abc import Callable

import pytest

from cosmodrome.cli.serve import supervise
from cosmodrome.cli.serve.supervise import LINE_BYTES_MAX, Child, Pacing, Supervisor
from cosmodrome.cli.serve.worker_link import EXIT_SETTINGS, Report, encode

QUICK = Pacing(first_pause_s=0.02, pause_s_max=0.1, healthy_s=60.0, stop_s=10.0)
READY = f"import sys, time; sys.stdout.buffer.write({encode(Report(True, 'fine', 'h:1'))!r})"
READY += "; sys.stdout.flush()"
SLEEP = "time.sleep(60)"


@pytest.fixture(autouse=True)
def time_for_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer than a second to read what a child wrote."""
    monkeypatch.setattr(supervise, "LAST_WORDS_SECONDS", 30.0)


class Output:
    """What children wrote, line by line."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)


def child(
    program: str, *, name: str = "b", pacing: Pacing = QUICK, output: Output | None = None
) -> Child:
    words = [sys.executable, "-I", "-S", "-c", program]
    return Child(name, lambda useless: words, output or Output(), pacing)


async def until(true: Callable[[], object], timeout_s: float = 50) -> None:
    async with asyncio.timeout(timeout_s):
        while not true():
            await asyncio.sleep(0.01)


def words_of(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, str]]:
    """The key=value words of every log line of this event."""
    lines = [record.getMessage() for record in caplog.records]
    return [
        dict(word.split("=", 1) for word in line.split() if "=" in word)
        for line in lines
        if line.startswith(event + " ")
    ]


async def test_a_crash_loop_is_loud_and_leaves_the_others_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    output = Output()
    bad = child("import sys; print('why', file=sys.stderr); sys.exit(3)", name="bad", output=output)
    good = child(f"{READY}; {SLEEP}", name="good")
    supervisor = Supervisor([bad, good])
    with caplog.at_level(logging.INFO):
        await supervisor.start()
        await until(lambda: bad.starts >= 5 and good.was_ready)
        pid = good.pid
        assert good.ready() == (True, "fine")
        assert good.starts == 1 and good.pid == pid
        ready, text = supervisor.ready()
        assert not ready
        assert text.startswith("1 of 2 workers are ready; bad: ")
        assert supervisor.started() == (False, "starting: bad")
        await supervisor.stop()
    deaths = words_of(caplog, "worker_died")
    assert [death["name"] for death in deaths] == ["bad"] * len(deaths)
    assert [death["restart_in_s"] for death in deaths[:4]] == ["0.02", "0.04", "0.08", "0.1"]
    assert [death["deaths"] for death in deaths[:4]] == ["1", "2", "3", "4"]
    assert "ended with status 3" in caplog.text
    loops = words_of(caplog, "worker_crash_loop")
    assert loops and loops[0]["deaths"] == "3;"
    assert output.lines[:2] == ["bad | why", "bad | why"]
    assert supervisor.all_stopped_cleanly


async def test_a_time_of_health_forgives_earlier_deaths(caplog: pytest.LogCaptureFixture) -> None:
    pacing = Pacing(first_pause_s=0.02, pause_s_max=5.0, healthy_s=0.0)
    worker = child(f"{READY}; sys.exit(1)", pacing=pacing)
    await worker.start()
    await until(lambda: worker.starts >= 4)
    await worker.stop()
    deaths = words_of(caplog, "worker_died")
    assert [death["restart_in_s"] for death in deaths[:3]] == ["0.02"] * 3
    assert not words_of(caplog, "worker_crash_loop")


async def test_a_short_time_of_health_forgives_nothing(caplog: pytest.LogCaptureFixture) -> None:
    worker = child(f"{READY}; sys.exit(1)")
    await worker.start()
    await until(lambda: worker.starts >= 3)
    await worker.stop()
    deaths = words_of(caplog, "worker_died")
    assert [death["restart_in_s"] for death in deaths[:2]] == ["0.02", "0.04"]


async def test_a_killed_child_is_replaced_by_another_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = child(f"{READY}; {SLEEP}")
    await worker.start()
    await until(lambda: worker.ready()[0])
    first = worker.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: worker.starts == 2 and worker.ready()[0])
    assert worker.pid != first
    await worker.stop()
    assert "killed by SIGKILL" in caplog.text


async def test_what_cannot_be_started_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    worker = Child("b", lambda useless: ["no/such/program"], Output(), QUICK)
    await worker.start()
    await until(lambda: worker.starts >= 3)
    assert "cannot be started" in worker.ready()[1] or worker.ready()[1] == "starting"
    await worker.stop()
    assert "cannot be started" in caplog.text


async def test_a_command_hears_that_the_last_life_was_of_no_use() -> None:
    heard: list[bool] = []

    def command(useless: bool) -> list[str]:
        heard.append(useless)
        program = "1/0" if len(heard) == 1 else f"{READY}; sys.exit(1)"
        return [sys.executable, "-I", "-S", "-c", program]

    worker = Child("b", command, Output(), QUICK)
    await worker.start()
    await until(lambda: len(heard) >= 3)
    await worker.stop()
    assert heard[:3] == [False, True, False]


async def test_the_stop_is_clean_and_waits() -> None:
    output = Output()
    program = f"""
import signal, sys, time
def stop(*_):
    time.sleep(0.2)
    print("bye", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
{READY}
{SLEEP}
"""
    workers = [child(program, name=name, output=output) for name in ("a", "b")]
    supervisor = Supervisor(workers)
    await supervisor.start()
    await until(lambda: supervisor.ready()[0])
    await supervisor.stop()
    assert sorted(output.lines) == ["a | bye", "b | bye"]
    assert supervisor.all_stopped_cleanly
    assert [worker.pid for worker in workers] == [None, None]
    assert [worker.starts for worker in workers] == [1, 1]
    await supervisor.stop()


async def test_a_child_that_does_not_stop_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    pacing = Pacing(stop_s=0.2)
    deaf = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}; {SLEEP}"
    worker = child(deaf, pacing=pacing)
    supervisor = Supervisor([worker])
    await supervisor.start()
    await until(lambda: worker.ready()[0])
    pid = worker.pid
    assert pid is not None
    await supervisor.stop()
    assert not supervisor.all_stopped_cleanly
    assert "worker_killed" in caplog.text
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_stop_between_two_lives_does_not_wait_for_the_next() -> None:
    worker = child("", pacing=Pacing(first_pause_s=60.0, pause_s_max=60.0))
    await worker.start()
    await until(lambda: "starts again" in worker.ready()[1])
    async with asyncio.timeout(30):
        await worker.stop()
    assert worker.starts == 1


async def test_a_silent_child_is_not_believed() -> None:
    worker = child(f"{READY}; {SLEEP}", pacing=Pacing(silent_s=0.2))
    await worker.start()
    await until(lambda: worker.was_ready)
    await until(lambda: not worker.ready()[0])
    assert re.match(r"no sign of life for \d+ s \(pid ", worker.ready()[1])
    await worker.stop()


async def test_output_is_prefixed_and_reports_are_not_output() -> None:
    output = Output()
    length = LINE_BYTES_MAX * 3
    program = f"{READY}; print('plain'); print('x' * {length}); print('rest', end='')"
    worker = child(program, output=output, pacing=Pacing(first_pause_s=60.0, pause_s_max=60.0))
    await worker.start()
    await until(lambda: "starts again" in worker.ready()[1])
    await worker.stop()
    assert output.lines[0] == "b | plain"
    assert output.lines[-1] == "b | rest"
    long = "".join(line.removeprefix("b | ") for line in output.lines[1:-1])
    assert long == "x" * length
    assert worker.was_ready


async def test_settings_nobody_takes_are_told_from_other_ends() -> None:
    bad = child(f"import sys; sys.exit({EXIT_SETTINGS})", name="bad")
    supervisor = Supervisor([bad])
    await supervisor.start()
    await until(lambda: supervisor.is_misconfigured)
    await supervisor.stop()
    good = child(f"{READY}; {SLEEP}", name="good")
    both = Supervisor([good, child(f"import sys; sys.exit({EXIT_SETTINGS})", name="bad")])
    await both.start()
    await until(lambda: good.was_ready and both.children[1].refuses_settings)
    assert not both.is_misconfigured
    await both.stop()
