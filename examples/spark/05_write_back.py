"""From topic to topic: paid orders become invoices. A reader with dedupe sees each invoice once.

.venv/bin/python examples/spark/05_write_back.py [HOST:PORT]
"""

import os
import sys
import tempfile

from pyspark.sql import functions as F

from cosmodrome.spark import session

NAMESRV = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("COSMO_NAMESRV", "127.0.0.1:9876")

spark = session("write back")
rocketmq = {"namesrv": NAMESRV}
paid = (
    spark.readStream.format("rocketmq")
    .options(**rocketmq, startingOffsets="earliest", tags="paid")
    .load("orders")
)
order = F.from_json(F.col("body").cast("string"), "id LONG, customer STRING, amount LONG")
invoices = paid.select(
    F.to_json(F.struct(order.id.alias("order"), order.amount.alias("due"))).alias("body"),
    F.col("keys"),
    order.customer.alias("queue_key"),  # a customer's invoices: one queue, in order
)
query = (
    invoices.writeStream.format("rocketmq")
    .options(**rocketmq, topic="invoices", checkpointLocation=tempfile.mkdtemp())
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
written = spark.read.format("rocketmq").options(**rocketmq, dedupe="true").load("invoices")
print(written.count(), "invoices")
