"""The Spark process of `bench.spark`: reads one request per line, answers with one line.

A stream says before that when it waits for messages, so that they do not come while it starts.

It has one session for everything, so that both connectors meet the same JVM. CPU time is counted
by whoever asks, over this process and everything below it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from typing import Any

from pyspark.find_spark_home import _find_spark_home
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cosmodrome.spark.runtime.python import unzipped_python
from cosmodrome.spark.runtime.session import ARROW_UNCHECKED, WITHOUT_DICTIONARY, parquet_settings

Ask = dict[str, Any]
Answer = dict[str, Any]
FOUR = {
    "kafka": ["partition", "offset", "timestamp", "value"],
    "ours": ["queue_id", "queue_offset", "store_time", "body"],
}
FIRST_BATCH_S = 90
STAMP = {"kafka": "timestamp", "ours": "store_time"}
# Of Kafka's columns those that are what `WITHOUT_DICTIONARY` names here.
KAFKA_WITHOUT_DICTIONARY = ("offset", "headers.list.element.value")


def session(jars: str, folder: str) -> SparkSession:
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    # As `cosmodrome.spark.runtime.session` has it, for both sides.
    python = unzipped_python(_find_spark_home())
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = python
    settings = {
        "spark.jars": jars,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "2g",
        "spark.ui.enabled": "false",
        # As `cosmodrome.spark.runtime.session` has them; the collector serves both sides.
        "spark.driver.extraJavaOptions": f"-XX:+UseParallelGC {ARROW_UNCHECKED}",
        "spark.python.unix.domain.socket.enabled": "true",
        **parquet_settings((*WITHOUT_DICTIONARY, *KAFKA_WITHOUT_DICTIONARY)),
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": folder,
        "spark.sql.warehouse.dir": f"{folder}/warehouse",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.streaming.numRecentProgressUpdates": "10000",
    }
    builder = SparkSession.builder.appName("bench").master("local[2]")
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def options(ask: Ask, **more: str) -> dict[str, str]:
    if ask["side"] == "kafka":
        place = {"kafka.bootstrap.servers": ask["address"], "subscribe": ask["topic"]}
    elif "store" in ask:
        place = {"storePath": ask["store"], "subscribe": ask["topic"]}
    else:
        place = {"namesrv": ask["address"], "subscribe": ask["topic"]}
    return {**place, **more}


def name(spark: SparkSession, ask: Ask) -> str:
    if ask["side"] == "kafka":
        return "kafka"
    from cosmodrome.spark.source import register

    register(spark)
    return "rocketmq"


def table(spark: SparkSession, ask: Ask, **more: str) -> DataFrame:
    return spark.read.format(name(spark, ask)).options(**options(ask, **more)).load()


def everything(spark: SparkSession, ask: Ask) -> DataFrame:
    """All columns: Kafka's headers are what properties are here."""
    more = {"includeHeaders": "true"} if ask["side"] == "kafka" else {}
    return table(spark, ask, **more)


def noop(spark: SparkSession, ask: Ask) -> Answer:
    everything(spark, ask).write.format("noop").mode("overwrite").save()
    return {}


def bare(spark: SparkSession, ask: Ask) -> Answer:
    """Without properties and headers."""
    found = table(spark, ask)
    if ask["side"] == "ours":
        names = [name for name in found.columns if name != "properties"]
        found = table(spark, ask, columns=",".join(names))
    found.write.format("noop").mode("overwrite").save()
    return {}


def four_columns(spark: SparkSession, ask: Ask) -> DataFrame:
    side = ask["side"]
    chosen = {"columns": ",".join(FOUR[side])} if side == "ours" else {}
    return table(spark, ask, **chosen).select(*FOUR[side])


def four(spark: SparkSession, ask: Ask) -> Answer:
    four_columns(spark, ask).write.format("noop").mode("overwrite").save()
    return {}


def parquet(spark: SparkSession, ask: Ask) -> Answer:
    return to_parquet(everything(spark, ask), ask)


def four_parquet(spark: SparkSession, ask: Ask) -> Answer:
    return to_parquet(four_columns(spark, ask), ask)


def to_parquet(found: DataFrame, ask: Ask) -> Answer:
    out = tempfile.mkdtemp(dir=ask["folder"])
    found.write.mode("overwrite").parquet(out)
    shutil.rmtree(out)
    return {}


def count(spark: SparkSession, ask: Ask) -> Answer:
    """All columns travel, so that the number is that of a full scan."""
    found = table(spark, ask)
    if ask["side"] == "ours":
        row = found.agg(F.count("*"), F.sum("store_size")).first()
    else:
        row = found.agg(F.count("*"), F.sum(F.length("value"))).first()
    assert row is not None
    return {"rows": row[0], "bytes": row[1]}


def stream(spark: SparkSession, ask: Ask) -> Answer:
    """Follows a topic. What counts is `seconds` long and begins `warm_seconds` after the first
    batch."""
    batches: list[list[float]] = []  # rows, mean and oldest age of a row when the batch is done
    stamp = F.unix_micros(F.col(STAMP[ask["side"]]))
    first: list[float] = []
    counted: set[int] = set()
    over = False

    def take(batch: DataFrame, number: int) -> None:
        if over:
            return
        row = batch.agg(F.count("*"), F.avg(stamp), F.min(stamp)).first()
        now_us, now = time.time() * 1e6, time.monotonic()
        if row is None or not row[0]:
            return
        first.append(now)
        if now > first[0] + ask["warm_seconds"]:
            counted.add(number)
            batches.append([row[0], (now_us - row[1]) / 1e3, (now_us - row[2]) / 1e3])

    checkpoint = tempfile.mkdtemp(dir=ask["folder"])
    source = spark.readStream.format(name(spark, ask))
    source = source.options(**options(ask, startingOffsets="latest"))
    writer = source.load().writeStream.foreachBatch(take)
    query = writer.option("checkpointLocation", checkpoint).start()
    deadline = time.monotonic() + FIRST_BATCH_S + ask["warm_seconds"] + ask["seconds"]
    while not query.lastProgress and not query.status["isDataAvailable"]:
        query.awaitTermination(1)  # raises what the query ended with
        if query.status["message"].startswith("Waiting"):
            break
    ask["tell_ready"]()
    while not first and time.monotonic() < deadline:
        query.awaitTermination(1)
    query.awaitTermination(ask["warm_seconds"] + ask["seconds"])
    # A query that is stopped inside of a batch of Python ends with a stack overflow in Spark.
    over = True
    before = query.lastProgress
    while query.isActive and query.lastProgress == before and time.monotonic() < deadline:
        time.sleep(0.01)
    query.stop()
    progress = [done for done in query.recentProgress if done["batchId"] in counted]
    took = [done["durationMs"] for done in progress if "addBatch" in done["durationMs"]]
    shutil.rmtree(checkpoint)
    return {"batches": batches, "took_ms": took}


CASES = {case.__name__: case for case in (noop, bare, four, parquet, four_parquet, count, stream)}


def main() -> None:
    folder, jars = sys.argv[1:]
    # Whatever Spark prints goes to the other stream: this one carries answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    spark = session(jars, folder)
    print(json.dumps({"spark": spark.version}), file=answers)
    for line in sys.stdin:
        ask = json.loads(line)
        ask["tell_ready"] = lambda: print(json.dumps({"ready": True}), file=answers)
        began = time.monotonic()
        answer = CASES[ask["case"]](spark, ask)
        print(json.dumps({"seconds": time.monotonic() - began, **answer}), file=answers)
    spark.stop()


if __name__ == "__main__":
    main()
