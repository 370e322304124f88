"""How long a start takes: after a crash, per GiB of log, and after a clean stop.

    python -m bench.recovery --gib 1

Writes a store of real records (1 KiB bodies, unique key, one key, tags, 16 queues of 4 topics),
then starts it in fresh processes: as after kill -9 with a checkpoint that covers nothing, and
after a clean stop. The page cache is warm: a cold disk adds what reading the log costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

from cosmodrome import speed
from cosmodrome.env.options import StoreOptions
from cosmodrome.env.real import real_env
from cosmodrome.store.store import Draft, Store

GIB = 1 << 30
HOST = b"\x7f\x00\x00\x01\x00\x00\x2a\x9f"
BODY = bytes(range(256)) * 4
BATCH = 1000


def options(root: str) -> StoreOptions:
    return StoreOptions(
        store_path_root_dir=root,
        flush_disk_type="ASYNC_FLUSH",
        disk_space_warning_level_ratio=100,
        max_message_size=4 << 20,
    )


async def fill(root: str, size: int) -> int:
    """Write messages until the log has `size` bytes; how many."""
    store = Store(options(root), real_env())
    await store.start()
    count = 0
    while store.facts().written_offset < size:
        drafts = [
            Draft(
                f"Topic{number % 4}",
                number // 4 % 4,
                BODY,
                f"KEYS\x01order-{number}\x02UNIQ_KEY\x017F0000010A5318B4AAC2{number:012X}"
                "\x02WAIT\x01true\x02TAGS\x01TagA",
                HOST,
                HOST,
            )
            for number in range(count, count + BATCH)
        ]
        await store.durable(store.append_batch(drafts)[-1].end)
        count += BATCH
    await store.stop()
    return count


async def start(root: str, *, crash: bool) -> dict[str, object]:
    """Start once and say how long it took; leaves the files as they were found."""
    store = Store(options(root), real_env())
    if crash:
        with open(os.path.join(root, "abort"), "w"):
            pass
        with open(os.path.join(root, "checkpoint"), "r+b") as file:
            file.write(bytes(24))
    wall, cpu = time.perf_counter(), time.process_time()
    await store.start()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    size = store.facts().max_offset
    await store.stop()
    return {
        "flavour": speed.FLAVOUR,
        "gib": size / GIB,
        "wall_s": wall,
        "cpu_s": cpu,
    }


def measure(root: str, *, crash: bool, pure: bool) -> dict[str, float]:
    """One start in a process of its own."""
    environment = dict(os.environ, COSMODROME_PURE="1" if pure else "")
    words = [sys.executable, "-m", "bench.recovery", "--start", root]
    done = subprocess.run(
        words + ["--crash"] * crash, env=environment, check=True, stdout=subprocess.PIPE
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--directory", help="where to write the store; default is a temp one")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--start", help=argparse.SUPPRESS)
    parser.add_argument("--crash", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start:
        print(json.dumps(asyncio.run(start(arguments.start, crash=arguments.crash))))
        return
    root = tempfile.mkdtemp(prefix="cosmo-recovery-", dir=arguments.directory)
    try:
        count = asyncio.run(fill(root, int(arguments.gib * GIB)))
        print(f"{count} messages, bodies of {len(BODY)} bytes")
        for pure in (False, True):
            for crash in (True, False):
                runs = [
                    measure(root, crash=crash, pure=pure)
                    for _ in range(1 if pure and crash else arguments.repeat)
                ]
                best = min(runs, key=lambda run: run["wall_s"])
                kind = "after a crash" if crash else "after a clean stop"
                print(
                    f"{best['flavour']:6} {kind:18} {best['gib']:.2f} GiB"
                    f" wall {best['wall_s']:.2f} s cpu {best['cpu_s']:.2f} s"
                    f" = {best['wall_s'] / best['gib']:.2f} s/GiB"
                )
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
