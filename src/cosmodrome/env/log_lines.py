"""Lines of a text log that no peer can forge.

Names, remarks and ids come over the wire and go into the log as they are, because a log that is
written as JSON wants the values themselves. So the line as a whole is made safe where it becomes
text: characters that end a line, move the cursor of a terminal or turn the direction of writing
are shown as escapes. Lines of a traceback, which are several by nature, are indented, so none of
them looks like an entry of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import TracebackType


def _unsafe() -> Iterator[int]:
    yield from range(0x20)  # C0: line ends, ESC, NUL
    yield from range(0x7F, 0xA0)  # DEL, C1
    yield from (0x2028, 0x2029)  # separators of lines and paragraphs
    yield from (0x061C, 0x200E, 0x200F)  # marks of direction
    yield from (*range(0x202A, 0x202F), *range(0x2066, 0x206A))  # embeddings and isolates
    yield 0xFEFF  # invisible


# Written as JSON writes them, so that a JSON text stays one.
_ESCAPES = {code: f"\\u{code:04x}" for code in _unsafe()} | {9: "\\t", 10: "\\n", 13: "\\r"}


def one_line(text: str) -> str:
    """The text with an escape instead of each character that is unsafe in a line of a log."""
    return text.translate(_ESCAPES)


class LineFormatter(logging.Formatter):
    """For a handler that writes text: `handler.setFormatter(LineFormatter(FORMAT))`."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))

    def formatException(
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None]
        | tuple[None, None, None],
    ) -> str:
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return "\n".join("  " + one_line(line) for line in text.split("\n"))
