"""Producers that go on while servers come and go.

    with Flow(JAVA_HURRIED, namesrv, topic, group, mode="sync", pause_ms=5) as flow:
        flow.feed(letters)
        flow.wait_answers(100)
        ... kill something ...

Each letter is answered by a line `sent` or `failed` with its body and the driver's clock before
and after (`before_ms`, `at_ms`).
"""

from __future__ import annotations

from collections.abc import Sequence

from peers.clients import Client, Consumer, Letter, Line


class Flow(Consumer):
    """A running producer driver: answers are collected until it is closed."""

    def __init__(
        self,
        client: Client,
        namesrv: str,
        topic: str,
        group: str,
        *,
        mode: str = "sync",
        verb: str = "flow",
        timeout_ms: int = 3000,
        pause_ms: int = 5,
    ) -> None:
        self.answers: list[Line] = []
        self.checked: list[Line] = []  # transactions the producer was asked about
        super().__init__(
            client,
            namesrv,
            topic,
            group,
            expression=str(timeout_ms),
            mode=mode,
            verb=verb,
            properties=[str(pause_ms)],
        )

    @property
    def acknowledged(self) -> list[Line]:
        return [line for line in self.answers if line["event"] == "sent"]

    @property
    def failed(self) -> list[Line]:
        return [line for line in self.answers if line["event"] == "failed"]

    def feed(self, letters: Sequence[Letter]) -> None:
        """Hands letters over; the driver sends them one after the other."""
        assert self._child.stdin is not None
        self._child.stdin.write("".join(f"{letter.line()}\n" for letter in letters).encode())
        self._child.stdin.flush()

    def wait_answers(self, count: int, timeout_s: float = 60) -> None:
        self.wait(lambda: len(self.answers) >= count, timeout_s, f"get {count} answers")

    def _note(self, line: Line) -> None:
        if line["event"] in ("sent", "failed"):
            self.answers.append(line)
        elif line["event"] == "checked":
            self.checked.append(line)
