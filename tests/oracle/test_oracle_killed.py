"""The node ends in the middle of delays, retries and transactions, at several moments.

All flows run at once against one node of their own, which ends four times: while sends are under
way, when the first delays are over, between those and the later ones, and soon after a start. The
clients live through all of it. Delivery is at least once: repetitions are counted, not refused.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from peers.clients import JAVA_HURRIED, Client, Consumer, Letter, Line, run
from peers.flows import Flow
from peers.java import JavaCluster
from peers.node import CosmoNode
from peers.process import free_port
from peers.raw import call, create_topic
from tests.oracle.oracle_checks import Cluster, body

Record = Callable[[str, object], None]

SETTINGS = {"transactionCheckInterval": "1000", "transactionTimeOut": "1000"}
LEVEL_MS = {1: 1_000, 2: 5_000}
TIMED = os.environ.get("ORACLE_TARGET") != "java"  # the Java servers here are too old for timers
ROUNDS = 4
MAX_RETRIES = 2


def delayed(number: int) -> list[Letter]:
    """Letters that say when they are due: in so many ms, or at a time."""
    made = [
        Letter(f"{number} {copy} in {LEVEL_MS[level]}".encode(), delay=level)
        for copy, level in enumerate([1, 1, 2, 1])
    ]
    if TIMED:
        at_ms = int(time.time() * 1000) + 2_700
        made += [
            Letter(f"{number} a in 1500".encode(), properties={"TIMER_DELAY_MS": "1500"}),
            Letter(f"{number} b in 4000".encode(), properties={"TIMER_DELAY_SEC": "4"}),
            Letter(f"{number} c at {at_ms}".encode(), properties={"TIMER_DELIVER_MS": str(at_ms)}),
        ]
    return made


def hard(number: int) -> list[Letter]:
    return [Letter(f"{kind} {number}".encode()) for kind in ("bad", "second", "good", "bad too")]


def paid(number: int) -> list[Letter]:
    outcomes = ("commit", "rollback", "later:commit", "later:rollback", "commit", "rollback")
    return [
        Letter(f"{number} {copy} {outcome}".encode(), properties={"outcome": outcome})
        for copy, outcome in enumerate(outcomes)
    ]


@dataclass(frozen=True, slots=True)
class Story:
    """What was answered, and what came, while the node ended four times."""

    delays: Flow
    retries: Flow
    transactions: Flow
    delayed: list[Line]
    retried: list[Line]
    paid: list[Line]
    dead: list[Line]


@pytest.fixture(scope="module", params=["kill9", "stop"])
def story(
    request: pytest.FixtureRequest,
    ready: Callable[[Client], Client],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Story]:
    java = ready(JAVA_HURRIED)
    folder = tmp_path_factory.mktemp("killed")
    server = _server(folder)
    end = server.kill9 if request.param == "kill9" else server.stop
    server.start()
    try:
        yield _tell(java, Cluster(server), end)
    finally:
        server.stop()


def _server(folder: Path) -> CosmoNode | JavaCluster:
    if os.environ.get("ORACLE_TARGET") == "java":
        return JavaCluster(folder, free_port(), free_port(-2, 1), settings=SETTINGS)
    words = [word for pair in SETTINGS.items() for word in ("--set", "=".join(pair))]
    return CosmoNode(folder / "data", options=words)


def _tell(java: Client, cluster: Cluster, end: Callable[[], object]) -> Story:
    for topic in ("Later", "Hard", "Paid"):
        create_topic(cluster.namesrv_port, cluster.broker_port, topic, 2)
    at = cluster.namesrv
    with ExitStack() as stack:
        later = stack.enter_context(Consumer(java, at, "Later", "g_later"))
        judge = stack.enter_context(
            Consumer(java, at, "Hard", "g_hard", mode=f"judging:{MAX_RETRIES}:1")
        )
        buyer = stack.enter_context(Consumer(java, at, "Paid", "g_paid"))
        delays = stack.enter_context(Flow(java, at, "Later", "p_later", pause_ms=20))
        retries = stack.enter_context(Flow(java, at, "Hard", "p_hard", pause_ms=20))
        transactions = stack.enter_context(
            Flow(java, at, "Paid", "p_paid", verb="flow-transact", pause_ms=20)
        )
        flows = {delays: delayed, retries: hard, transactions: paid}
        fed = dict.fromkeys(flows, 0)
        for number, pause_s in zip(range(ROUNDS), (0, 1.0, 2.2, 0), strict=True):
            for flow, make in flows.items():
                made = make(number)
                fed[flow] += len(made)
                flow.feed(made)
            if pause_s:
                for flow, count in fed.items():
                    flow.wait_answers(count)
            else:
                transactions.wait_answers(fed[transactions] - 3)  # some are still to be sent
            time.sleep(pause_s)
            end()
            cluster.server.start()
        for flow, count in fed.items():
            flow.wait_answers(count)

        later.wait(lambda: _bodies(delays.acknowledged) <= _bodies(later.messages), 60, "get all")
        decided = _bodies(transactions.acknowledged, "commit")
        buyer.wait(lambda: decided <= _bodies(buyer.messages), 60, "get all that was committed")
        hopeless = _bodies(retries.acknowledged, "bad")
        deadline = time.monotonic() + 60
        while not hopeless <= _bodies(dead := _dead_letters(java, cluster)):
            assert time.monotonic() < deadline, f"dead: {_bodies(dead)}, not {hopeless}"
            time.sleep(1)
        for consumer in (later, judge, buyer):
            consumer.listen(2)  # nothing comes that should not
    return Story(
        delays, retries, transactions, later.messages, judge.messages, buyer.messages, dead
    )


def _dead_letters(java: Client, cluster: Cluster) -> list[Line]:
    if not _has_topic(cluster, "%DLQ%g_hard"):
        return []
    lines = run(java, ["pull", cluster.namesrv, "%DLQ%g_hard", "g_dead", "*"])
    return [line for line in lines if line["event"] == "message"]


def _has_topic(cluster: Cluster, topic: str) -> bool:
    return call(cluster.namesrv_port, 105, {"topic": topic})[0] == 0


def _bodies(lines: list[Line], word: str = "") -> set[str]:
    return {text for line in lines if word in (text := body(line).decode())}


def _repeated(lines: list[Line]) -> int:
    return len(lines) - len(_bodies(lines))


def test_delayed_messages_are_neither_lost_nor_early(story: Story, record_property: Record) -> None:
    handed_over = {body(line).decode(): line["before_ms"] for line in story.delays.answers}
    record_property("failed", len(story.delays.failed))
    record_property("repeated", _repeated(story.delayed))
    assert _bodies(story.delays.acknowledged) <= _bodies(story.delayed)
    assert len(story.delays.acknowledged) >= len(story.delays.answers) // 2
    late_ms = []
    for line in story.delayed:
        text = body(line).decode()
        *_, how, number = text.split()
        due_ms = int(number) if how == "at" else handed_over[text] + int(number)
        late_ms.append(line["at_ms"] - due_ms)
        assert late_ms[-1] >= 0, f"{text!r} came {-late_ms[-1]} ms too early"
    record_property("latest_ms", max(late_ms))


def test_failing_messages_come_again_or_are_put_aside(
    story: Story, record_property: Record
) -> None:
    record_property("failed", len(story.retries.failed))
    record_property("repeated dead", _repeated(story.dead))
    attempts: dict[str, list[int]] = {}
    for line in story.retried:
        attempts.setdefault(body(line).decode(), []).append(line["reconsume_times"])
    acknowledged = _bodies(story.retries.acknowledged)
    assert len(acknowledged) >= len(story.retries.answers) // 2
    assert acknowledged <= set(attempts)
    for text in acknowledged:
        if text.startswith("bad"):
            assert set(attempts[text]) >= set(range(MAX_RETRIES + 1)), text
            assert text in _bodies(story.dead)
        elif text.startswith("second"):
            assert max(attempts[text]) >= 1, text
        else:
            assert 0 in attempts[text], text
    record_property("deliveries", dict(Counter(n for of in attempts.values() for n in of)))
    assert not {text for text in _bodies(story.dead) if not text.startswith("bad")}
    assert {line["reconsume_times"] for line in story.dead} == {MAX_RETRIES + 1}


def test_exactly_the_committed_transactions_are_delivered(
    story: Story, record_property: Record
) -> None:
    flow = story.transactions
    record_property("failed", len(flow.failed))
    record_property("checked", len(flow.checked))
    record_property("repeated", _repeated(story.paid))
    assert len(flow.acknowledged) >= len(flow.answers) // 2
    assert _bodies(story.paid) == _bodies(flow.acknowledged, "commit")
    undecided = _bodies(flow.acknowledged, "later:")
    assert undecided <= _bodies(flow.checked)
