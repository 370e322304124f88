"""Cosmodrome: a message system that speaks the Apache RocketMQ remoting protocol.

The names for users of the client are here; they are loaded when they are first used, so that
servers and tools do not pay for them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Admin": "client.operate.admin",
    "App": "client.app",
    "BadMessage": "client.send.failures",
    "BatchFailed": "client.send.failures",
    "Busy": "client.send.failures",
    "ClientOptions": "client.options",
    "Consumer": "client.receive.consumer",
    "Credentials": "client.options",
    "DamagedBody": "client.values",
    "DamagedMessage": "client.values",
    "Message": "client.values",
    "MessageQueue": "client.values",
    "NoRoute": "client.values",
    "Producer": "client.send.producer",
    "PullConsumer": "client.receive.pull_consumer",
    "PullSchedule": "client.receive.pull_schedule",
    "ReceivedMessage": "client.values",
    "Reject": "client.receive.handlers",
    "RequestTimedOut": "client.send.failures",
    "RetryLater": "client.receive.handlers",
    "SendFailed": "client.send.failures",
    "SendResult": "client.values",
    "SendStatus": "client.values",
    "SendTimedOut": "client.send.failures",
    "TransactionProducer": "client.send.transactions",
    "TransactionResult": "client.send.transactions",
    "TransactionState": "client.send.transactions",
    "embedded": "node",
}

__all__ = [
    "Admin",
    "App",
    "BadMessage",
    "BatchFailed",
    "Busy",
    "ClientOptions",
    "Consumer",
    "Credentials",
    "DamagedBody",
    "DamagedMessage",
    "Message",
    "MessageQueue",
    "NoRoute",
    "Producer",
    "PullConsumer",
    "PullSchedule",
    "ReceivedMessage",
    "Reject",
    "RequestTimedOut",
    "RetryLater",
    "SendFailed",
    "SendResult",
    "SendStatus",
    "SendTimedOut",
    "TransactionProducer",
    "TransactionResult",
    "TransactionState",
    "embedded",
]

if TYPE_CHECKING:
    from cosmodrome.client.app import App
    from cosmodrome.client.operate.admin import Admin
    from cosmodrome.client.options import ClientOptions, Credentials
    from cosmodrome.client.receive.consumer import Consumer
    from cosmodrome.client.receive.handlers import Reject, RetryLater
    from cosmodrome.client.receive.pull_consumer import PullConsumer
    from cosmodrome.client.receive.pull_schedule import PullSchedule
    from cosmodrome.client.send.failures import (
        BadMessage,
        BatchFailed,
        Busy,
        RequestTimedOut,
        SendFailed,
        SendTimedOut,
    )
    from cosmodrome.client.send.producer import Producer
    from cosmodrome.client.send.transactions import (
        TransactionProducer,
        TransactionResult,
        TransactionState,
    )
    from cosmodrome.client.values import (
        DamagedBody,
        DamagedMessage,
        Message,
        MessageQueue,
        NoRoute,
        ReceivedMessage,
        SendResult,
        SendStatus,
    )
    from cosmodrome.node import embedded


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
