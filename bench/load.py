"""Runs a load generator against a server and returns what it measured.

The neutral Go generator beside the repository (../shared/loadgen) is used when it is there and Go
is installed, otherwise `bench.loadgen`. Many topics and delayed sends are `bench.ring`'s.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping

from bench.brokers import CLIENT_CORE, ROOT, Target, pinned
from bench.verdict import Sample

NEUTRAL = ROOT.parent / "shared" / "loadgen"
TIMEOUT_S = 60  # beyond the time that a load is asked to take


class Generator:
    """`name` says which one it is."""

    def __init__(self) -> None:
        self.neutral = NEUTRAL.is_dir() and shutil.which("go") is not None
        self.name = "shared/loadgen (Go)" if self.neutral else "bench.loadgen"
        self._command = [sys.executable, "-m", "bench.loadgen"]
        if self.neutral:
            binary = ROOT / "build" / "loadgen"
            binary.parent.mkdir(exist_ok=True)
            subprocess.run(["go", "build", "-o", str(binary), "."], cwd=NEUTRAL, check=True)
            self._command = [str(binary)]

    def run(
        self, target: Target, load: Mapping[str, object], seconds: float, warm_s: float = 1.0
    ) -> Sample:
        unit, dash = ("s", "-") if self.neutral else ("", "--")
        words = {
            "addr": target.address,
            "pid": target.pid,
            "queues": 8,
            "duration": f"{seconds}{unit}",
            "warmup": f"{warm_s}{unit}",
            **load,
        }
        return self._report_errors(target, _run(self._command, words, dash, seconds + warm_s))

    def run_freely(self, port: int, load: Mapping[str, object], seconds: float) -> Sample:
        """Like `run`, on any core, and nobody's CPU is counted."""
        unit, dash = ("s", "-") if self.neutral else ("", "--")
        words = {"addr": f"127.0.0.1:{port}", "queues": 8, "warmup": f"1{unit}", **load}
        words["duration"] = f"{seconds}{unit}"
        return _run(self._command, words, dash, seconds + 1, core=None)

    def program(
        self, name: str, target: Target, load: Mapping[str, object], took_s: float
    ) -> Sample:
        """One of our own generators, which takes `took_s` at most."""
        words = {"addr": target.address, **load}
        return self._report_errors(target, _run([sys.executable, "-m", name], words, "--", took_s))

    def _report_errors(self, target: Target, sample: Sample) -> Sample:
        if sample.get("errors"):
            first = sample.get("first_error") or "no word of it"
            print(f"{sample['errors']} errors of {target.name}: {first}", file=sys.stderr)
        return sample


def _run(
    command: list[str],
    words: Mapping[str, object],
    dash: str,
    took_s: float,
    core: str | None = CLIENT_CORE,
) -> Sample:
    flags = [word for key, value in words.items() for word in (dash + key, str(value))]
    done = subprocess.run(
        [*(pinned(core) if core else []), *command, *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=took_s + TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command + flags)} failed: {done.stderr[-2000:]}")
    sample = parse(done.stdout)
    if sample.get("tps") == 0 and not sample.get("errors"):
        why = f"{' '.join(command + flags)} measured nothing: {done.stderr[-2000:]}"
        return {**sample, "errors": 1, "first_error": sample.get("first_error") or why}
    return sample


def parse(output: str) -> Sample:
    """The last line is the result."""
    lines = output.strip().splitlines()
    try:
        sample = json.loads(lines[-1]) if lines else None
    except ValueError:
        sample = None
    if not isinstance(sample, dict):
        raise RuntimeError(f"the load generator printed no result: {output[-500:]!r}")
    return sample
