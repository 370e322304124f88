"""Cosmodrome: a message system that speaks the Apache RocketMQ remoting protocol.

The names for users of the client are here; they are loaded when they are first used, so that
servers and tools do not pay for them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Admin": "client.admin",
    "App": "client.app",
    "BadMessage": "client.failures",
    "BatchFailed": "client.failures",
    "Busy": "client.failures",
    "ClientOptions": "client.options",
    "Consumer": "client.consumer",
    "Credentials": "client.options",
    "Message": "client.values",
    "MessageQueue": "client.values",
    "NoRoute": "client.values",
    "Producer": "client.producer",
    "PullConsumer": "client.pull_consumer",
    "PullSchedule": "client.pull_schedule",
    "ReceivedMessage": "client.values",
    "Reject": "client.handlers",
    "RequestTimedOut": "client.failures",
    "RetryLater": "client.handlers",
    "SendFailed": "client.failures",
    "SendResult": "client.values",
    "SendStatus": "client.values",
    "SendTimedOut": "client.failures",
    "TransactionProducer": "client.transactions",
    "TransactionResult": "client.transactions",
    "TransactionState": "client.transactions",
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
    from cosmodrome.client.admin import Admin
    from cosmodrome.client.app import App
    from cosmodrome.client.consumer import Consumer
    from cosmodrome.client.failures import (
        BadMessage,
        BatchFailed,
        Busy,
        RequestTimedOut,
        SendFailed,
        SendTimedOut,
    )
    from cosmodrome.client.handlers import Reject, RetryLater
    from cosmodrome.client.options import ClientOptions, Credentials
    from cosmodrome.client.producer import Producer
    from cosmodrome.client.pull_consumer import PullConsumer
    from cosmodrome.client.pull_schedule import PullSchedule
    from cosmodrome.client.transactions import (
        TransactionProducer,
        TransactionResult,
        TransactionState,
    )
    from cosmodrome.client.values import (
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
