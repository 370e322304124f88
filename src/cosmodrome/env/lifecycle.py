"""`with` and `async with` for whatever has `start` and `stop`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class AsyncLifecycle(ABC):
    """Starts with `async with` and stops with the end of the block."""

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def stop(self) -> None: ...

    async def stop_after(self, error: BaseException | None) -> None:
        """Stop at the end of a block; `error` is what ended the block, if something did."""
        await self.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop_after(error)


class Lifecycle(ABC):
    """The same for threads: `with`."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...

    def stop_after(self, error: BaseException | None) -> None:
        """Stop at the end of a block; `error` is what ended the block, if something did."""
        self.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop_after(error)
