"""Messages that a store keeps in more than one place: delayed, transactional, retried, dead."""

from __future__ import annotations

import re
from pathlib import Path

from tests.oracle.store_checker import (
    OP_TOPIC,
    History,
    ask,
    make_topic,
    read_log,
    send,
    wait_until,
)


def delay_offsets(store: Path) -> dict[str, str]:
    """Progress of each delay level."""
    text = (store / "config" / "delayOffset.json").read_text()
    return dict(re.findall(r"(\d+):(\d+)", text))


def pending(port: int, history: History) -> None:
    """A message that waits for longer than any test lasts."""
    sent = history.letter("Orders", 0, label="pending")
    sent.properties["DELAY"] = "18"
    send(port, sent)


def delayed(port: int, history: History) -> None:
    """A message that is delivered after a second."""
    sent = history.letter("Orders", 0, label="delayed")
    sent.properties["DELAY"] = "1"
    send(port, sent, history.statuses)
    history.delivered.append(sent)


COMMIT, ROLLBACK = 8, 12


def transaction(port: int, history: History, decision: int | None) -> None:
    """A half message, and what its producer decides; None: nothing yet."""
    half = history.letter("Notes", 1, label=f"half {decision}")
    half.properties |= {"TRAN_MSG": "true", "PGROUP": "p_checker"}
    half.sys_flag = 4
    send(port, half, history.statuses)
    if decision is None:
        return
    ask(
        port,
        37,
        {
            "producerGroup": "p_checker",
            "tranStateTableOffset": str(half.queue_offset),
            "commitLogOffset": str(half.log_offset),
            "commitOrRollback": str(decision),
            "fromTransactionCheck": "false",
            "msgId": half.properties["UNIQ_KEY"],
            "transactionId": half.properties["UNIQ_KEY"],
        },
    )
    if decision == COMMIT:
        half.sys_flag = 0
        history.delivered.append(half)


def special_messages(port: int, store: Path, history: History) -> None:
    """Delayed, transactional, retried and dead messages, delivered and not."""
    pending(port, history)
    delayed(port, history)
    for decision in (COMMIT, ROLLBACK, None):
        transaction(port, history, decision)

    for level in ("1", "-1"):  # again in a second; at once among the dead
        back = history.acknowledged[7]
        ask(
            port,
            36,
            {
                "offset": str(back.log_offset),
                "group": "g_first",
                "delayLevel": level,
                "originMsgId": back.properties["UNIQ_KEY"],
                "originTopic": back.topic,
                "unitMode": "false",
                "maxReconsumeTimes": "5",
            },
        )
    # Dead letters are there for operators: not readable until one says so.
    make_topic(port, "%DLQ%g_first", 1)

    def arrived() -> bool:
        log = read_log(store, history.log_file_bytes)
        bodies = {r.body for r in log if r.topic in history.topics}
        topics = [r.topic for r in log]
        return (
            all(sent.body in bodies for sent in history.delivered)
            and topics.count(OP_TOPIC) == 2
            and topics.count("%RETRY%g_first") == 1
            and topics.count("%DLQ%g_first") == 1
        )

    wait_until(arrived, "special messages are missing")
    # What was delivered must not be delivered again after a kill.
    wait_until(
        lambda: (store / "config" / "delayOffset.json").exists(), "no progress of delays on disk"
    )
