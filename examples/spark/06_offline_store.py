"""Read the directory of a broker without the broker: any RocketMQ store, also a damaged one.

.venv/bin/python examples/spark/06_offline_store.py [DIR]     # by default cosmo-data of `make run`
"""

import os
import sys

from pyspark.sql import functions as F

from cosmodrome.spark import session

STORE = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("COSMO_STORE", "cosmo-data")

spark = session("offline store")
store = spark.read.format("rocketmq").option("storePath", STORE).load()

store.groupBy("topic").agg(
    F.count("*").alias("messages"),
    F.sum("store_size").alias("bytes"),
    F.min("store_time").alias("oldest"),
).orderBy("topic").show(truncate=False)

damaged = store.where("_corrupt_record IS NOT NULL").select("commit_log_offset", "_corrupt_record")
print(damaged.count(), "damaged places")
damaged.show(5, truncate=False)
