"""The order in which the life of a message is told."""

from __future__ import annotations

from cosmodrome.client.operate.tracks import Traced, in_order


def traced(event: str, time_ms: int | None, msg_id: str = "A") -> Traced:
    return Traced(time_ms, event, "group", "127.0.0.1:1", "fine", msg_id=msg_id)


def test_a_send_comes_before_what_it_caused() -> None:
    sent, begun, ended = traced("sent", 107), traced("consume", 103), traced("consumed", 103)
    assert in_order([ended, begun, sent]) == [sent, begun, ended]


def test_messages_stay_in_the_order_of_time() -> None:
    early, late = traced("sent", 10, "A"), traced("sent", 20, "B")
    between, after = traced("consume", 15, "A"), traced("consume", 19, "B")
    assert in_order([after, late, between, early]) == [early, between, late, after]


def test_attempts_of_a_send_and_what_has_no_time() -> None:
    first, second = traced("sent", 5), traced("sent", 9)
    begun, unknown = traced("consume", 7), traced("consumed", None)
    assert in_order([unknown, second, begun, first]) == [first, second, begun, unknown]
