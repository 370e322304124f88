"""An archive in Delta Lake, on the Spark that its newest release is made for.

A run is killed where it hurts: the rows of a batch are committed to the table, and nobody has
written down that the batch is done. The judge is Delta's own reader, which knows nothing of us.
"""

from __future__ import annotations

import json
import os
import signal
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from peers.clients import JAVA, Client
from peers.node import CosmoNode
from peers.raw import create_topic
from peers.resolve import ResolveFailed
from peers.spark import OLDEST, delta_jars, oldest_python
from tests.oracle.spark_kit import DEADLINE_S, Setting

from cosmodrome import Message
from cosmodrome.blocking import Producer

TOPIC = "kept"
FIRST, SECOND, LIVE = 400, 200, 100
# Of a table this small Delta would make 50 tasks of a few rows to look at its own log.
SMALL = {"spark.databricks.delta.snapshotPartitions": "1", "spark.sql.shuffle.partitions": "2"}

PROGRAM = textwrap.dedent(
    """
    import json, sys
    from cosmodrome import Message
    from cosmodrome.blocking import Producer
    from cosmodrome.spark import table
    from cosmodrome.spark.jobs.archive import archive
    from cosmodrome.spark.runtime.session import session, stop

    namesrv, lake, topic, conf = sys.argv[1:5]
    begin, count = int(sys.argv[5]), int(sys.argv[6])
    spark = session("delta", master="local[2]", conf=json.loads(conf))

    def rows(frame):
        found = frame.select("queue_id", "queue_offset", "body").collect()
        return sorted([row[0], row[1], bytes(row[2]).decode()] for row in found)

    def held():
        return rows(spark.read.format("delta").load(lake))

    def everything():
        return rows(table(spark, topic, archive=lake, namesrv=namesrv))

    found = {"first": held(), "first_and_live": everything()}
    status = archive(spark, topic, lake, namesrv=namesrv, once=True)
    found |= {"archived": status.rows, "second": held()}
    with Producer(namesrv, group="live") as producer:
        producer.send_batch([Message(topic, b"%d" % (begin + n)) for n in range(count)])
    found |= {"still": held(), "all": everything()}
    stop(spark)
    print(json.dumps(found))
    """
)


@pytest.fixture
def setting(ready: Callable[[Client], Client]) -> Setting:
    ready(JAVA)  # and so Maven
    try:
        jars = delta_jars()
    except ResolveFailed as failure:
        if "Could not transfer" in str(
            failure
        ):  # Maven's words; a jar that is not there is a fault
            pytest.skip(f"Maven Central cannot be reached for the jars of Delta Lake: {failure}")
        raise
    environ = {"COSMODROME_DELTA_JARS": str(jars), "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1"}
    return Setting("delta", str(oldest_python()), OLDEST, environ)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[CosmoNode]:
    with CosmoNode(tmp_path / "data") as node:
        create_topic(node.namesrv_port, node.broker_port, TOPIC, 2)
        yield node


def fill(node: CosmoNode, begin: int, count: int) -> None:
    with Producer(node.namesrv_address, group="fill", send_timeout_ms=15_000) as producer:
        for first in range(begin, begin + count, 20):
            producer.send_batch([Message(TOPIC, b"%d" % (first + n)) for n in range(20)])


def kill_at_first_commit(setting: Setting, words: list[str], lake: Path, log: Path) -> None:
    """Rows of one batch are in the table then, and there is another batch."""
    with setting.start(*words, log=log) as child:
        try:
            deadline = time.monotonic() + DEADLINE_S
            while not list(lake.glob("_delta_log/*.json")):
                assert child.poll() is None, log.read_text(errors="replace")[-4_000:]
                assert time.monotonic() < deadline, log.read_text(errors="replace")[-4_000:]
                time.sleep(0.005)
        finally:
            os.killpg(child.pid, signal.SIGKILL)


def check(rows: list[list[Any]], count: int) -> None:
    """Each message once, and the offsets of each queue without a gap."""
    assert sorted(int(body) for _, _, body in rows) == list(range(count))
    for queue in (0, 1):
        offsets = [offset for found, offset, _ in rows if found == queue]
        assert offsets == list(range(len(offsets)))


def test_every_message_is_in_the_table_once(
    setting: Setting, node: CosmoNode, tmp_path: Path
) -> None:
    lake, log = tmp_path / "lake", tmp_path / "log"
    fill(node, 0, FIRST)
    words = [
        *("-m", "cosmodrome.cli", "pipeline", "archive", str(lake), "-t", TOPIC),
        *("-n", node.namesrv_address, "--once", "--rows-per-batch", str(FIRST // 2)),
        *("--master", "local[2]"),
        *(word for pair in SMALL.items() for word in ("--conf", "=".join(pair))),
    ]
    kill_at_first_commit(setting, words, lake, log)
    setting.run(*words, log=log)
    # Nobody asked for Delta: it is what an archive is where its jars are.
    assert json.loads((lake / "_cosmodrome" / "archive.json").read_text())["lake"] == "delta"

    fill(node, FIRST, SECOND)
    total = FIRST + SECOND
    program = tmp_path / "second.py"
    program.write_text(PROGRAM)
    arguments = (node.namesrv_address, str(lake), TOPIC, json.dumps(SMALL), str(total), str(LIVE))
    written = setting.run(str(program), *arguments, log=log)
    found: dict[str, Any] = json.loads(written.splitlines()[-1])
    assert found["archived"] == SECOND
    check(found["first"], FIRST)
    check(found["first_and_live"], total)
    check(found["second"], total)
    check(found["still"], total)
    check(found["all"], total + LIVE)
