"""`make demo`: orders stream in, an archive follows them, and SQL queries both as one table.

Everything is real and runs on this machine: a name server and a broker, a producer, local Spark.
The demo takes about a minute and leaves nothing behind. `--keep DIR` keeps the archive in DIR.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cosmodrome import Message, blocking
from cosmodrome.spark.jobs.archive import Status, archive
from cosmodrome.spark.jobs.output import table_lines
from cosmodrome.spark.lake.table import create_view
from cosmodrome.spark.runtime.session import quiet_spark, session, stop

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOPIC = "orders"
ITEMS = {"rocket": 990, "capsule": 420, "patch": 5, "suit": 150}
STREAM_S = 10
PER_SECOND = 2_000
LIVE = 5_000
STARTED = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:5.1f} s] {text}", flush=True)


class Shop:
    """Sends orders numbered from 1, each with an item, a number of pieces and an amount."""

    def __init__(self, producer: blocking.Producer) -> None:
        self._producer = producer
        self._random = random.Random(7)
        self.sent = 0
        self.closed = False

    def send(self, count: int) -> None:
        messages = []
        for _ in range(count):
            self.sent += 1
            item = self._random.choice(list(ITEMS))
            pieces = self._random.randint(1, 3)
            order = {"order": self.sent, "item": item, "pieces": pieces}
            order["amount"] = pieces * ITEMS[item]
            messages.append(Message(TOPIC, json.dumps(order).encode(), tags=item))
        for start in range(0, count, 500):
            self._producer.send_batch(messages[start : start + 500])

    def open_for(self, seconds: int) -> None:
        begin = time.monotonic()
        while time.monotonic() - begin < seconds:
            self.send(PER_SECOND // 4)
            time.sleep(0.25)
        self.closed = True


@contextlib.contextmanager
def lake(keep: str | None) -> Iterator[str]:
    if keep is not None:
        yield keep
        return
    folder = tempfile.mkdtemp(prefix="cosmo-demo-")
    try:
        yield f"{folder}/lake"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", metavar="DIR", help="keep the archive in DIR")
    keep = parser.parse_args().keep
    with blocking.embedded() as node, lake(keep) as path:
        say(f"a node is up: name server {node.namesrv}")
        with (
            blocking.Admin(node.namesrv) as admin,
            blocking.Producer(node.namesrv, group="shop") as producer,
        ):
            admin.topics.create(TOPIC, queues=4)
            shop = Shop(producer)
            spark = session("cosmodrome demo", master="local[2]")
            say(f"Spark {spark.version} is up")
            try:
                with quiet_spark():
                    show(spark, shop, node.namesrv, path)
            finally:
                stop(spark)
    say("done")


def show(spark: SparkSession, shop: Shop, namesrv: str, path: str) -> None:
    follow(spark, shop, namesrv, path)
    archived = shop.sent
    moment = datetime.datetime.now(datetime.UTC)
    time.sleep(0.01)
    shop.send(LIVE)
    say(f"{LIVE:,} more orders came in; the archive does not have them yet")

    create_view(spark, TOPIC, archive=path, namesrv=namesrv)
    by_tag = "SELECT tags, count(*) AS orders, sum(value.amount) AS amount FROM orders"
    ask(spark, "archive and live as one table", f"{by_tag} GROUP BY tags ORDER BY tags")
    ask(
        spark,
        f"the same as of {moment:%H:%M:%S}, before the last orders came in",
        f"{by_tag} WHERE store_time < timestamp'{moment.isoformat()}' GROUP BY tags ORDER BY tags",
    )
    rows, ids, first, last = ask(
        spark,
        "is every order there exactly once?",
        "SELECT count(*) AS orders, count(DISTINCT value.order) AS numbers,"
        f" min(value.order) AS first, max(value.order) AS last FROM {TOPIC}",
    )[0]
    if not rows == ids == last == shop.sent or first != 1:
        raise SystemExit(f"{shop.sent} orders were sent, the table has {rows}")
    say(f"yes: {archived:,} of them from the archive, {LIVE:,} from the broker")


def follow(spark: SparkSession, shop: Shop, namesrv: str, path: str) -> None:
    """Archive while orders stream in, until the shop is closed and all orders are archived."""
    seen: list[Status] = []

    def watch(status: Status) -> None:
        if not seen or status.batch != seen[-1].batch:
            say(status.line())
        seen.append(status)

    opened = threading.Thread(target=shop.open_for, args=(STREAM_S,))
    opened.start()
    say(f"orders stream in, {PER_SECOND:,} a second; the archive follows them")
    archive(
        spark,
        [TOPIC],
        path,
        namesrv=namesrv,
        trigger="2 seconds",
        json=True,
        watch=watch,
        stop=lambda: shop.closed and bool(seen) and seen[-1].total >= shop.sent,
    )
    opened.join()
    say(f"the shop closed after {shop.sent:,} orders; all of them are in the archive")


def ask(spark: SparkSession, what: str, sql: str) -> list[tuple[object, ...]]:
    begin = time.monotonic()
    frame = spark.sql(sql)
    rows = [tuple(row) for row in frame.collect()]
    say(f"{what} ({time.monotonic() - begin:.1f} s)")
    cells = [[str(value) for value in row] for row in rows]
    print("".join(f"          {line}" for line in table_lines(frame.columns, cells)), flush=True)
    return rows


if __name__ == "__main__":
    main()
