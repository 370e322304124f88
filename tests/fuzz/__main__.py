"""`make fuzz`: every target for a while, each in a process of its own, two at a time.

make fuzz                                  # a new seed, FUZZ_SECONDS (10) per target
make fuzz TARGET=header SEED=42            # the same inputs again
make fuzz TARGET=header INPUT=build/fuzz/header-1a2b3c4d
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fuzz import access, parsers, servers
from tests.fuzz.engine import Target, attempt, fuzz

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "fuzz"
AT_ONCE = 2
TARGETS: dict[str, Callable[[], Target]] = {
    target.name: target
    for target in (
        parsers.FrameTarget,
        parsers.HeaderTarget,
        parsers.BodyTarget,
        parsers.RecordTarget,
        parsers.PropertiesTarget,
        parsers.Sql92Target,
        parsers.SettingsTarget,
        servers.HttpTarget,
        servers.StoreTarget,
        servers.LaneTarget,
        access.SignedTarget,
        access.AccountsTarget,
        access.GuardedTarget,
    )
}


def run_one(name: str, seed: int, seconds: float) -> int:
    target = TARGETS[name]()
    try:
        result = fuzz(target, seed, seconds=seconds, folder=FOLDER)
        print(result, flush=True)  # before what the end may find, which follows from the fault
    finally:
        target.close()
    return 1 if result.fault else 0


def replay(name: str, path: Path) -> int:
    target = TARGETS[name]()
    try:
        print(f"{name}: {attempt(target, path.read_bytes())}")
    finally:
        target.close()
    return 0


def run_all(seed: int, seconds: float) -> int:
    def child(name: str) -> int:
        command = [sys.executable, "-m", "tests.fuzz", "--target", name]
        command += ["--seed", str(seed), "--seconds", str(seconds)]
        return subprocess.run(command, cwd=ROOT).returncode

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return max(pool.map(child, TARGETS))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", choices=TARGETS)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--seconds", type=float, default=os.environ.get("FUZZ_SECONDS") or 10.0)
    parser.add_argument("--input", type=Path, help="try this one input")
    options = parser.parse_args()
    if options.input:
        return replay(options.target or options.input.name.partition("-")[0], options.input)
    if options.target:
        return run_one(options.target, options.seed, options.seconds)
    return run_all(options.seed, options.seconds)


if __name__ == "__main__":
    sys.exit(main())
