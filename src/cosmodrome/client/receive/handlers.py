"""What a user's handler is, what it may answer, and how it is called.

A handler that returns is done with its message; one that raises gets it again later. A plain
function is called directly in the event loop and has to be quick; an `async` function may wait.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from typing import Any

from cosmodrome.client.receive.consumer_options import ConsumerOptions, Consumption
from cosmodrome.client.receive.engine.report import ConsumeMessageDirectlyResult, Rates
from cosmodrome.client.receive.engine.window import Window
from cosmodrome.client.values import ReceivedMessage
from cosmodrome.env.base import Clock
from cosmodrome.errors import ConfigError, CosmodromeError
from cosmodrome.wire import bodies

log = logging.getLogger(__name__)

# Seconds of the delay levels from 1 on, as brokers have them unless they are told otherwise.
# fmt: off
DELAY_LEVELS_S = (
    1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1_200, 1_800, 3_600, 7_200,
)
# fmt: on


class RetryLater(CosmodromeError):
    """Raised by a handler: not now. `delay_level` counts from 1, 0 lets the broker choose (longer
    with every attempt); `delay_s` takes the next longer level. With batches, `done` says how
    many messages from the first on are done."""

    def __init__(
        self, delay_level: int = 0, *, delay_s: float | None = None, done: int = 0
    ) -> None:
        if delay_level < 0 or done < 0:
            raise ConfigError("delay_level and done are not negative; Reject puts a message aside")
        if delay_s is not None:
            if delay_level:
                raise ConfigError("give delay_level or delay_s, not both")
            delay_level = level_of(delay_s)
        super().__init__(f"try again later (delay level {delay_level})")
        self.delay_level = delay_level
        self.delay_s = delay_s
        self.done = done


class Reject(CosmodromeError):
    """Raised by a handler: never. The message goes to the dead letters of the group."""


def level_of(delay_s: float) -> int:
    """The first level that is at least as long, or the longest there is."""
    for level, seconds in enumerate(DELAY_LEVELS_S, 1):
        if seconds >= delay_s:
            return level
    return len(DELAY_LEVELS_S)


class Handler:
    """A user's function and whether it can be called without waiting."""

    __slots__ = ("call", "inline")

    def __init__(self, call: Callable[[Any], Any]) -> None:
        if not callable(call):
            raise ConfigError(f"{call!r} is no handler; give a function that takes a message")
        self.call = call
        self.inline = not (
            inspect.iscoroutinefunction(call)
            or inspect.iscoroutinefunction(getattr(call, "__call__", None))  # noqa: B004
        )


class Listeners:
    """Which handler gets the messages of a topic; iterating takes those that have none."""

    def __init__(self) -> None:
        self.by_topic: dict[str, Handler] = {}
        self.default: Handler | None = None
        self.iterating = False

    def find(self, topic: str) -> Handler | None:
        return self.by_topic.get(topic, self.default)

    @property
    def inline(self) -> bool:
        """Whether some handler is a plain function."""
        return any(handler.inline for handler in self._all())

    @property
    def waiting(self) -> bool:
        """Whether some handler is asynchronous."""
        return any(not handler.inline for handler in self._all())

    def _all(self) -> list[Handler]:
        known = list(self.by_topic.values())
        return known if self.default is None else [*known, self.default]


class Calls:
    """Calls handlers, with hooks around them and a count of how it went."""

    def __init__(self, group: str, options: ConsumerOptions, rates: Rates, clock: Clock) -> None:
        self.hooked = bool(options.hooks)
        self._group = group
        self._options = options
        self._rates = rates
        self._clock = clock

    async def call(
        self, handler: Handler, window: Window, batch: list[ReceivedMessage]
    ) -> Exception | None:
        """What the handler raised; None when it was content. Cancellation passes through."""
        time = asyncio.get_running_loop().time
        began = time()
        consumption = self.begin(window, batch) if self.hooked else None
        error: Exception | None = None
        try:
            outcome = handler.call(batch if self._options.batch > 1 else batch[0])
            if outcome is not None and inspect.isawaitable(outcome):
                await outcome
        except asyncio.CancelledError as cancelled:
            error = cancelled_within(cancelled)
        except Exception as raised:
            error = raised
        self.end(window, consumption, len(batch), began, error)
        return error

    def counted(self, window: Window, done: int, failed: int, began: float, now: float) -> None:
        """Count calls that were made without `call`."""
        self._rates.consumed(window.queue.topic, done, failed, began, now)

    def begin(
        self, window: Window, batch: list[ReceivedMessage], *, iterated: bool = False
    ) -> Consumption:
        """Call the hooks; callers that do not use `call` use this and `end`."""
        consumption = Consumption(
            self._group, window.queue, batch, self._clock.now_ms(), iterated=iterated
        )
        for hook in self._options.hooks:
            try:
                hook.before_consume(consumption)
            except Exception:
                log.exception("before_consume failed: hook=%r", hook)
        return consumption

    def end(
        self,
        window: Window,
        consumption: Consumption | None,
        count: int,
        began: float,
        error: Exception | None,
    ) -> None:
        window.consumed_at = now = asyncio.get_running_loop().time()
        failed = 0 if error is None else count
        self._rates.consumed(window.queue.topic, count - failed, failed, began, now)
        if consumption is None:
            return
        consumption.took_ms = (now - began) * 1000
        consumption.error = error
        for hook in self._options.hooks:
            try:
                hook.after_consume(consumption)
            except Exception:
                log.exception("after_consume failed: hook=%r", hook)

    async def directly(self, handler: Handler | None, message: ReceivedMessage) -> bytes:
        """Process one message for an operator; the JSON of how it went."""
        result = ConsumeMessageDirectlyResult(order=self._options.orderly)
        began = asyncio.get_running_loop().time()
        if handler is None:
            result.consume_result = "CR_RETURN_NULL"
            result.remark = "no handler takes this topic; the consumer is iterated"
        else:
            try:
                outcome = handler.call([message] if self._options.batch > 1 else message)
                if inspect.isawaitable(outcome):
                    await outcome
            except (RetryLater, Reject) as later:
                result.consume_result = "CR_LATER"
                result.remark = str(later)
            except Exception as error:
                result.consume_result = "CR_THROW_EXCEPTION"
                result.remark = f"{type(error).__name__}: {error}"
        result.spent_time_mills = int((asyncio.get_running_loop().time() - began) * 1000)
        return bodies.encode(result)


def cancelled_within(cancelled: asyncio.CancelledError) -> Exception:
    """The failure to report when something that the user's code waited for was cancelled. When
    this task itself is cancelled, the cancellation goes on."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise cancelled
    error = CosmodromeError("the handler was cancelled from within")
    error.__cause__ = cancelled
    return error


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
