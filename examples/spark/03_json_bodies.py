"""Turn JSON bodies into columns: infer the schema from some messages, let Spark parse all.

.venv/bin/python examples/spark/03_json_bodies.py [HOST:PORT]
"""

import os
import sys

from pyspark.sql import functions as F

from cosmodrome.spark import infer_json_schema, json_bodies, session

NAMESRV = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("COSMO_NAMESRV", "127.0.0.1:9876")

spark = session("json bodies")
where = {"namesrv": NAMESRV, "subscribe": "orders"}
schema = infer_json_schema(spark, where)
print(schema.simpleString())

orders = spark.read.format("rocketmq").options(**where).option("columns", "store_time,body").load()
values = json_bodies(orders, schema).select("store_time", "value.*")
values.groupBy("customer").agg(F.count("*"), F.sum("amount")).orderBy("customer").show()
