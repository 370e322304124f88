"""Read a topic as a stream: sums per tag, at most 400 messages in a batch, up to the last message.

.venv/bin/python examples/spark/02_stream_orders.py [HOST:PORT]
"""

import os
import sys
import tempfile

from pyspark.sql import functions as F

from cosmodrome.spark import session

NAMESRV = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("COSMO_NAMESRV", "127.0.0.1:9876")

spark = session("stream orders")
orders = (
    spark.readStream.format("rocketmq")
    .option("namesrv", NAMESRV)
    .option("startingOffsets", "earliest")  # without it a new stream starts at the end
    .option("maxOffsetsPerTrigger", 400)
    .option("consumerGroup", "example_stream")  # other tools can show its lag
    .load("orders")
)
sums = orders.groupBy("tags").agg(F.sum(F.col("properties")["amount"].cast("long")).alias("sum"))
query = (
    sums.writeStream.outputMode("complete")
    .foreachBatch(lambda batch, number: print(number, batch.orderBy("tags").collect()))
    .option("checkpointLocation", tempfile.mkdtemp())  # in real life: a directory that lasts
    .trigger(availableNow=True)  # leave it out, and the stream goes on
    .start()
)
query.awaitTermination()
