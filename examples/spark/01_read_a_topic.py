"""Read a topic as a table: the messages of each queue, their offsets, the newest.

.venv/bin/python examples/spark/01_read_a_topic.py [HOST:PORT]
"""

import os
import sys

from pyspark.sql import functions as F

from cosmodrome.spark import session

NAMESRV = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("COSMO_NAMESRV", "127.0.0.1:9876")

spark = session("read a topic")
orders = spark.read.format("rocketmq").option("namesrv", NAMESRV).load("orders")

orders.groupBy("broker", "queue_id").agg(
    F.count("*").alias("messages"),
    F.min("queue_offset").alias("first"),
    F.max("queue_offset").alias("last"),
    F.max("store_time").alias("newest"),
).orderBy("broker", "queue_id").show(truncate=False)

# The conditions are pushed down: the broker is asked only for these offsets of queue 0.
some = orders.where("queue_id = 0 AND queue_offset < 5")
some.select("queue_offset", "tags", "keys", F.col("body").cast("string")).show(truncate=False)
