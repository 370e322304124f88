"""`python -m bench.spark_large`: many small messages, through the source into an archive, exactly.

A node of ours is filled, `archive` copies the topic into Parquet, and then the archive is counted
by plain Spark: every queue must hold each offset from 0 on once, and there must be as many rows as
were sent. A few more messages are sent afterwards, and the one table over archive and broker must
have those too. With --record the outcome replaces its part of bench/RESULTS.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from peers.node import CosmoNode
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from bench.run import RESULTS, ROOT
from bench.spark import QUEUES, cpu_of_tree
from cosmodrome.spark.jobs.archive import archive
from cosmodrome.spark.lake.table import table
from cosmodrome.spark.runtime.session import session, stop

TOPIC, BODIES_HELD, LATER = "BenchLarge", 64 << 10, 10_000


def fill(node: CosmoNode, bodies: Path, size: int, count: int) -> None:
    words = [node.namesrv_address, TOPIC, bodies, size, count, 0, QUEUES]
    subprocess.run(
        [sys.executable, "-m", "bench.spark_load", *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=True,
    )


def check(rows: DataFrame, count: int, what: str) -> None:
    """Each queue has the offsets 0 to n - 1 once, and the n make `count`."""
    found = rows.groupBy("queue_id").agg(
        F.count("*").alias("rows"),
        F.count_distinct("queue_offset").alias("offsets"),
        F.min("queue_offset").alias("first"),
        F.max("queue_offset").alias("last"),
    )
    queues = found.collect()
    total = sum(queue["rows"] for queue in queues)
    wrong = [
        queue
        for queue in queues
        if not queue["rows"] == queue["offsets"] == queue["last"] + 1 or queue["first"]
    ]
    if total != count or wrong:
        raise SystemExit(f"{what}: {total:,} rows instead of {count:,}; queues: {queues}")
    print(f"{what}: {total:,} rows, each offset of {len(queues)} queues once", flush=True)


def run(options: argparse.Namespace) -> list[tuple[str, float, float]]:
    """Names, seconds and CPU seconds of this process and those below it, the node excluded."""
    (ROOT / "build").mkdir(exist_ok=True)
    steps: list[tuple[str, float, float]] = []
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as scratch:
        folder = Path(scratch)
        bodies, lake = folder / "bodies", str(folder / "lake")
        bodies.write_bytes(os.urandom(BODIES_HELD * options.size))
        flush = ["--set", "flushDiskType=ASYNC_FLUSH"]
        with CosmoNode(folder / "node" / "data", options=flush) as node:

            def step(name: str, began: tuple[float, float]) -> None:
                seconds, cpu = time.monotonic() - began[0], spark_cpu(node) - began[1]
                steps.append((name, seconds, cpu))
                print(f"{name}: {seconds:.1f} s, {cpu:.1f} s of CPU", flush=True)

            began = time.monotonic()
            fill(node, bodies, options.size, options.messages)
            print(f"filled in {time.monotonic() - began:.0f} s", flush=True)
            spark = session("bench", master="local[2]", conf={"spark.driver.memory": "2g"})
            try:
                mark = time.monotonic(), spark_cpu(node)
                archive(
                    spark,
                    [TOPIC],
                    lake,
                    namesrv=node.namesrv_address,
                    once=True,
                    format="parquet",
                )
                step("topic to archive (Parquet)", mark)
                mark = time.monotonic(), spark_cpu(node)
                check(spark.read.parquet(lake), options.messages, "archive")
                step("archive counted by plain Spark", mark)
                fill(node, bodies, options.size, LATER)
                mark = time.monotonic(), spark_cpu(node)
                both = table(spark, TOPIC, archive=lake, namesrv=node.namesrv_address)
                check(both, options.messages + LATER, "archive and broker")
                step("one table over archive and broker counted", mark)
            finally:
                stop(spark)
    return steps


def spark_cpu(node: CosmoNode) -> float:
    return cpu_of_tree(os.getpid()) - cpu_of_tree(node.pid)


def record(options: argparse.Namespace, steps: list[tuple[str, float, float]]) -> None:
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    lines = [
        f"### {options.messages:,} messages through the pipeline",
        "",
        f"Measured {stamp} at {commit}, {platform.machine()}, {os.cpu_count()} cores, load average"
        f" {os.getloadavg()[1]:.1f} at the end, {options.size} B, {QUEUES} queues.",
        f"Command: `.venv/bin/python -m bench.spark_large {' '.join(sys.argv[1:])}`.",
        "Counts were exact: every offset of every queue once, in the archive and in the table over"
        " archive and broker.",
        "",
        "| step | seconds | msg/s | CPU-µs/msg (Spark side) |",
        "|---|---|---|---|",
    ]
    for name, seconds, cpu in steps:
        rate, each = options.messages / seconds, cpu / options.messages * 1e6
        lines.append(f"| {name} | {seconds:,.0f} | {rate:,.0f} | {each:.2f} |")
    begin, end = "<!-- spark large -->\n", "<!-- end spark large -->\n"
    page = RESULTS.read_text()
    if begin in page:
        before, rest = page.split(begin, 1)
        after = rest.split(end, 1)[1]
    else:
        before, _, rest = page.partition("## What these numbers do not say")
        after = f"\n## What these numbers do not say{rest}"
    text = "\n".join(lines)
    RESULTS.write_text(f"{before}{begin}{text}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Many messages, exactly.")
    parser.add_argument("--messages", type=int, default=10_000_000)
    parser.add_argument("--size", type=int, default=100, help="bytes of a body")
    parser.add_argument("--record", action="store_true", help="write bench/RESULTS.md")
    options = parser.parse_args()
    steps = run(options)
    if options.record:
        record(options, steps)


if __name__ == "__main__":
    main()
