"""Archive a topic, send one more message, and read archive and topic as one table.

.venv/bin/python examples/spark/04_archive_and_live.py [HOST:PORT]
"""

import os
import sys
import tempfile

from cosmodrome import Message
from cosmodrome.blocking import Producer
from cosmodrome.spark import session, table
from cosmodrome.spark.jobs.archive import archive

NAMESRV = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("COSMO_NAMESRV", "127.0.0.1:9876")
LAKE = tempfile.mkdtemp()  # in real life: a directory that lasts

spark = session("archive and live")
status = archive(spark, "orders", LAKE, namesrv=NAMESRV, once=True)
print(status.line())

with Producer(NAMESRV, group="examples") as producer:
    producer.send(Message("orders", b'{"id": 1000000, "customer": "late", "amount": 1}'))

archived = table(spark, "orders", archive=LAKE)
both = table(spark, "orders", archive=LAKE, namesrv=NAMESRV)
print(archived.count(), "archived,", both.count(), "with what came since")

newest = archived.agg({"store_time": "max"}).collect()[0][0]
print("of them stored after the archive:", both.where(both.store_time > newest).count())
