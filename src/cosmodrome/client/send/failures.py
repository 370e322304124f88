"""How sends fail, in words that name the cause and every attempt."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from cosmodrome.client.values import SendResult
from cosmodrome.errors import CosmodromeError, Refused, TimedOut


class BadMessage(CosmodromeError, ValueError):
    """A message breaks a rule that the client checks itself; nothing was sent."""


class Busy(CosmodromeError):
    """Too many messages are on their way; wait for `ready()` and submit again."""


class NotRunning(CosmodromeError):
    """The producer is not started, or was closed."""


class RequestTimedOut(TimedOut):
    """Nobody replied in time; whether the request was processed is unknown."""


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt:
    """One try to send: to whom, how it ended and how long that took."""

    broker_name: str
    address: str
    error: CosmodromeError
    cost_ms: int

    def __str__(self) -> str:
        return f"{self.broker_name} {self.address} after {self.cost_ms} ms: {self.error}"


class SendFailed(CosmodromeError):
    """No broker acknowledged the message. It may be stored all the same when an attempt timed
    out or its connection broke."""

    def __init__(self, topic: str, tried: Sequence[Attempt], why: str = "") -> None:
        self.topic = topic
        self.tried = tuple(tried)
        self.why = why
        refusal = next(
            (try_.error for try_ in reversed(tried) if isinstance(try_.error, Refused)), None
        )
        self.code: int | None = None if refusal is None else refusal.code
        self.remark: str | None = None if refusal is None else refusal.remark
        attempts = "; ".join(map(str, tried)) or "nothing was sent"
        super().__init__(f"a message to {topic} was not acknowledged{why}: {attempts}")


class SendTimedOut(SendFailed, TimedOut):
    """The time for the message and all its attempts is over."""


class BatchFailed(CosmodromeError):
    """A part of a batch failed; `results` says for each message where it is or why not."""

    def __init__(self, results: Sequence[SendResult | CosmodromeError]) -> None:
        self.results = list(results)
        errors = [result for result in results if isinstance(result, CosmodromeError)]
        super().__init__(f"{len(errors)} of {len(results)} messages were not sent: {errors[0]}")


def another(error: BaseException) -> BaseException:
    """The same error for one more waiter: raising one adds its traceback to it."""
    if isinstance(error, SendFailed):
        return type(error)(error.topic, error.tried, error.why)
    if isinstance(error, CosmodromeError) and len(error.args) == 1 and type(error) is not Refused:
        return type(error)(*error.args)
    return error
