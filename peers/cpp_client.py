"""Drives the C++ client from a test; runs in the virtual environment that holds its wheel.

The interface shared by all drivers is in clients.py.

    send    NAMESRV TOPIC GROUP sync|async|oneway|orderly            messages on standard input
    consume NAMESRV TOPIC GROUP EXPRESSION push|orderly PROPERTIES   until end of input

The wheel's binding hands out a body as a C string, so a body must not hold a zero byte, and
properties only by name, so the caller names those it wants to see. Of the options of a mode (see
clients.py) it takes broadcast and instance; where a new group starts cannot be chosen.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
import time
from typing import Any

from rocketmq.client import Message, MessageModel, Producer, PushConsumer, SendStatus
from rocketmq.ffi import _CLogLevel, dll

# The library writes to file descriptor 1 when it starts; results go to a private copy of it.
_results = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)
_output = threading.Lock()


def write(line: dict[str, Any]) -> None:
    with _output:
        _results.write(json.dumps(line) + "\n")
        _results.flush()


def message(topic: str, asked: dict[str, Any]) -> Message:
    made = Message(topic)
    made.set_body(base64.b64decode(asked["body"]))
    if asked.get("tags"):
        made.set_tags(asked["tags"])
    if asked.get("keys"):
        made.set_keys(asked["keys"])
    if asked.get("delay"):
        made.set_delay_time_level(asked["delay"])
    for key, value in (asked.get("properties") or {}).items():
        made.set_property(key, value)
    return made


def sent(index: int, result: Any) -> None:
    write(
        {
            "event": "sent",
            "index": index,
            "status": "SEND_OK" if result.status == SendStatus.OK else str(result.status),
            "msg_id": result.msg_id,
            "offset_msg_id": None,
            "queue_id": None,
            "queue_offset": result.offset,
        }
    )


def callbacks(index: int, answered: threading.Semaphore) -> tuple[Any, Any]:
    def success(result: Any) -> None:
        sent(index, result)
        answered.release()

    def failure(error: Exception) -> None:
        write({"event": "failed", "index": index, "error": str(error)})
        answered.release()

    return success, failure


def send(namesrv: str, topic: str, group: str, mode: str) -> None:
    asked = [json.loads(line) for line in sys.stdin]
    producer = Producer(group, timeout=10_000)
    producer.set_namesrv_addr(namesrv)
    dll.SetProducerLogLevel(producer._handle, _CLogLevel.WARN)
    producer.start()
    messages = [message(topic, one) for one in asked]
    answered = threading.Semaphore(0)
    for index, one in enumerate(messages):
        if mode == "sync":
            sent(index, producer.send_sync(one))
        elif mode == "orderly":
            sent(index, producer.send_orderly(one, asked[index]["shard"]))
        elif mode == "async":
            producer.send_async(one, *callbacks(index, answered))
        elif mode == "oneway":
            producer.send_oneway(one)
            write({"event": "sent", "index": index})
        else:
            raise SystemExit(f"unknown mode {mode}")
    if mode == "async":
        for _ in messages:
            answered.acquire()
    if mode == "oneway":
        time.sleep(0.5)  # The library drops what it has not written when it is shut down.
    producer.shutdown()


def consume(
    namesrv: str, topic: str, group: str, expression: str, mode: str, properties: str
) -> None:
    names = [name for name in properties.split(",") if name]
    mode, *words = mode.split("+")
    options = dict(word.partition("=")[::2] for word in words)

    def received(got: Any) -> None:
        values = {name: got.get_property(name) for name in ("UNIQ_KEY", *names)}
        write(
            {
                "event": "message",
                "at_ms": int(time.time() * 1000),
                "msg_id": (values["UNIQ_KEY"] or b"").decode() or None,
                "offset_msg_id": None,
                "queue_id": got.queue_id,
                "queue_offset": got.queue_offset,
                "born_ms": got.born_timestamp,
                "store_ms": got.store_timestamp,
                "sys_flag": None,
                "reconsume_times": got.reconsume_times,
                "tags": (got.tags or b"").decode() or None,
                "keys": (got.keys or b"").decode() or None,
                "properties": {name: value.decode() for name, value in values.items() if value},
                "body": base64.b64encode(got.body).decode(),
            }
        )
        if mode.startswith("failing:"):  # the binding can set neither a limit nor a level
            raise RuntimeError("to be tried again")

    consumer = PushConsumer(group, orderly=mode == "orderly")
    if "broadcast" in options:
        consumer.set_message_model(MessageModel.BROADCASTING)
    if "instance" in options:
        consumer.set_instance_name(options["instance"])
    consumer.set_namesrv_addr(namesrv)
    consumer.set_thread_count(2)
    dll.SetPushConsumerLogLevel(consumer._handle, _CLogLevel.WARN)
    consumer.subscribe(topic, received, expression)
    consumer.start()
    write({"event": "started"})
    sys.stdin.read()
    consumer.shutdown()
    write({"event": "stopped"})


def main(words: list[str]) -> None:
    if words[0] == "send":
        send(*words[1:])
    elif words[0] == "consume":
        consume(*words[1:])
    else:
        raise SystemExit(f"unknown verb {words[0]}")
    # The library's threads may still run and would crash in the interpreter's own shutdown.
    os._exit(0)


main(sys.argv[1:])
