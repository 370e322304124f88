"""A signal: one service announces, others listen, neither knows the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Signal(Generic[T]):
    """Listeners are called in the order in which they came.

    Where a signal would fire thousands of times per second, ask first whether it has `listeners`.
    """

    __slots__ = ("listeners",)

    def __init__(self) -> None:
        # Replaced, never changed: a listener may come or go while the signal fires.
        self.listeners: tuple[Callable[[T], None], ...] = ()

    def subscribe(self, listener: Callable[[T], None]) -> Callable[[], None]:
        """Call `listener` from now on; what was returned ends that."""
        self.listeners = (*self.listeners, listener)

        def end() -> None:
            self.listeners = tuple(one for one in self.listeners if one is not listener)

        return end

    def fire(self, value: T) -> None:
        for listener in self.listeners:
            listener(value)
