"""One case of bench.client with the C++ client's wheel: CASE NAMESRV TOPIC MESSAGES SIZE.

Runs in the virtual environment that holds the wheel. Its binding has no batches.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
import uuid
from typing import Any

from rocketmq.client import Message, Producer, PushConsumer
from rocketmq.ffi import _CLogLevel, dll

THREADS = 64

# The library writes to file descriptor 1 when it starts.
_results = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def say(messages: int, failed: int, began: tuple[float, float]) -> None:
    row = {
        "messages": messages,
        "failed": failed,
        "seconds": time.monotonic() - began[0],
        "cpu_seconds": cpu_seconds() - began[1],
    }
    _results.write(json.dumps(row) + "\n")
    _results.flush()
    os._exit(0)  # the library's own end may take minutes


def produce(namesrv: str, topic: str, count: int, size: int) -> None:
    producer = Producer("bench_cpp", timeout=10_000)
    producer.set_namesrv_addr(namesrv)
    dll.SetProducerLogLevel(producer._handle, _CLogLevel.WARN)
    producer.start()
    body = b"x" * size
    failed: list[Exception] = []

    def work(times: int) -> None:
        for _ in range(times):
            message = Message(topic)
            message.set_body(body)
            try:
                producer.send_sync(message)
            except Exception as error:
                failed.append(error)

    work(10)
    threads = [threading.Thread(target=work, args=(count // THREADS,)) for _ in range(THREADS)]
    began = (time.monotonic(), cpu_seconds())
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    say(count // THREADS * THREADS - len(failed), len(failed), began)


def consume(namesrv: str, topic: str, count: int) -> None:
    seen, first = 0, count // 4
    began = (0.0, 0.0)
    lock, enough = threading.Lock(), threading.Event()

    def received(_: Any) -> None:
        nonlocal seen, began
        with lock:
            seen += 1
            if seen == first:
                began = (time.monotonic(), cpu_seconds())
            elif seen == count:
                enough.set()

    consumer = PushConsumer(f"bench_{uuid.uuid4().hex}")
    consumer.set_namesrv_addr(namesrv)
    consumer.subscribe(topic, received)
    consumer.start()
    enough.wait()
    say(count - first, 0, began)


if __name__ == "__main__":
    case, namesrv, topic, count, size = sys.argv[1:]
    if case == "consume":
        consume(namesrv, topic, int(count))
    else:
        produce(namesrv, topic, int(count), int(size))
