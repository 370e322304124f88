"""A signal: one service announces, others listen, neither knows the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Signal(Generic[T]):
    """Listeners are wired while the process is built and called in that order."""

    __slots__ = ("_listeners",)

    def __init__(self) -> None:
        self._listeners: list[Callable[[T], None]] = []

    def subscribe(self, listener: Callable[[T], None]) -> None:
        self._listeners.append(listener)

    def fire(self, value: T) -> None:
        for listener in self._listeners:
            listener(value)
