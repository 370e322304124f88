"""A window that keeps batches whole knows the same as one that knows single messages only."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cosmodrome.client.receive.engine.inflating import Inflated
from cosmodrome.client.receive.engine.options import MIB, ReadOptions
from cosmodrome.client.receive.engine.window import Window
from cosmodrome.client.values import MessageQueue, ReceivedMessage

QUEUE = MessageQueue(topic="T", broker_name="b", queue_id=0)
LIMIT = 6

# fmt: off
STEPS = (
    "pull", "pull", "batch", "batch", "part", "one", "again", "start", "look", "empty", "pause",
)
# fmt: on

# What happens, and a number that says to which of the messages.
steps = st.lists(
    st.tuples(
        st.sampled_from(STEPS),
        st.integers(0, 40),
    ),
    max_size=40,
)


def message(offset: int) -> ReceivedMessage:
    return ReceivedMessage.outlined(b"", 0, 100 + offset, offset, "b", "T", 0, 0)


def inflated(batch: list[ReceivedMessage]) -> dict[ReceivedMessage, int]:
    """Every third message was compressed."""
    return {one: 1000 + one.queue_offset for one in batch if one.queue_offset % 3 == 0}


@given(steps)
def test_batches_and_single_messages_add_up(todo: list[tuple[str, int]]) -> None:
    budget = Inflated(MIB)
    window = Window(QUEUE, 0, ReadOptions(prefetch_messages=LIMIT), 0.0, budget)
    pulled: list[list[ReceivedMessage]] = []
    left: dict[int, ReceivedMessage] = {}
    started: set[int] = set()
    finished = 0
    for what, number in todo:
        done: list[ReceivedMessage] = []
        if what == "pull":
            first = window.next_offset + number % 2  # some offsets have no message for us
            batch = [message(first + at) for at in range(1 + number % 4)]
            window.add(batch, sum(one.size for one in batch), inflated(batch))
            window.next_offset = first + len(batch)
            pulled.append(batch)
            left |= {one.queue_offset: one for one in batch}
        elif what == "empty":
            window.add([], 0)
            window.next_offset += 1
        elif what == "start" and left:
            offset = list(left)[number % len(left)]
            window.started[offset] = 1.0
            started.add(offset)
        elif what == "pause":
            window.pause(paused=bool(number % 2))
        elif what == "look":
            assert window.unfinished == left
        elif what == "batch" and pulled:
            waiting = [one for one in pulled if one[0].queue_offset in left] or pulled
            done = list(waiting[number // 30 % len(waiting)])  # mostly the first
        elif what == "part" and pulled:
            done = pulled[number % len(pulled)][number % 3 :]
        elif what == "one" and left:
            done = [list(left.values())[number % len(left)]]
        elif what == "again" and left:
            done = [message(next(iter(left)))]  # another delivery of that offset
        if done:
            window.finish(done if number % 3 else tuple(done))
            for one in done:
                if left.get(one.queue_offset) is one:
                    del left[one.queue_offset]
                    finished += 1
                started.discard(one.queue_offset)
        assert window.done_to == next(iter(left), window.next_offset)
        bodies = sum(inflated(list(left.values())).values())
        assert window.bytes == sum(one.size for one in left.values()) + bodies
        assert budget.held == bodies * (not window.paused)
        assert (window.finished, set(window.started)) == (finished, started)
        assert window.full() is (len(left) >= LIMIT)
    for batch in pulled:
        for one in batch:
            assert window.holds(one) is (one.queue_offset in left)
    assert list(window.unfinished.items()) == list(left.items())
    window.drop()
    assert budget.held == 0


def test_a_batch_that_is_done_as_a_whole_is_not_taken_apart() -> None:
    """This is what makes polling cheap; results are the same either way."""
    window = Window(QUEUE, 0, ReadOptions(), 0.0, Inflated(MIB))
    first, second = [message(0), message(1)], [message(2), message(3)]
    window.add(first, 201)
    window.add(second, 205)
    window.finish(list(first))
    assert [batch for batch, _ in window._batches] == [second]
    window.finish(second[:1])
    assert not window._batches
    third, fourth = [message(4)], [message(5)]
    window.add(third, 104)
    window.add(fourth, 105)
    window.finish(third)  # whatever is before it
    assert [batch for batch, _ in window._batches] == [fourth]
    assert list(window.unfinished) == [3, 5]
