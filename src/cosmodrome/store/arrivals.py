"""Who wants to know that messages became readable.

Under load thousands of queues grow in a second and hardly anybody waits for one of them, so
listeners say what they wait for, and an announcement is only made when somebody does.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from cosmodrome.env.signal import Signal
from cosmodrome.store.values import Arrival

QueueKey = tuple[str, int]
Listener = Callable[[Arrival], None]


class _Every:
    def __contains__(self, name: object) -> bool:
        return True


class Arrivals(Signal[Arrival]):
    """Listeners are called in the order in which they subscribed."""

    __slots__ = ("_names", "queues", "topics")

    def __init__(self) -> None:
        super().__init__()
        self._names: set[str] = set()
        self.topics: Container[str] = self._names  # all of whose queues somebody waits for
        self.queues: list[Container[QueueKey]] = []  # further queues somebody waits for

    def subscribe(
        self,
        listener: Listener,
        *,
        topic: str | None = None,
        queues: Container[QueueKey] | None = None,
    ) -> Callable[[], None]:
        """Hear of everything, of one topic, or of the queues that are in `queues` at the time.

        A listener also hears of what others asked for.
        """
        if topic is not None:
            self._names.add(topic)
        elif queues is not None:
            self.queues.append(queues)
        else:
            self.topics = _Every()
        return super().subscribe(listener)

    def wanted(self, topic: str, queue_id: int) -> bool:
        """Whether anybody waits for this queue."""
        return topic in self.topics or any((topic, queue_id) in some for some in self.queues)
