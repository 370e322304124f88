"""Send a thousand orders as JSON, so that the other examples have something to read.

make run                                                          # in another terminal
.venv/bin/python examples/spark/00_make_orders.py [HOST:PORT]     # of the name server
"""

import json
import os
import sys

from cosmodrome import Message
from cosmodrome.blocking import Producer

NAMESRV = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("COSMO_NAMESRV", "127.0.0.1:9876")

with Producer(NAMESRV, group="examples") as producer:
    for number in range(1000):
        customer = f"c{number % 7}"
        order = {"id": number, "customer": customer, "amount": number % 90 + 10}
        paid = number % 3 == 0
        producer.submit(
            Message(
                "orders",
                json.dumps(order),
                tags="paid" if paid else "open",
                keys=f"order-{number}",
                properties={"amount": str(order["amount"])},
                queue_key=customer,  # a customer's orders stay in order
            )
        )
print("sent 1000 orders to the topic orders")
