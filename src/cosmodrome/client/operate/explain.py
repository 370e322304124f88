"""Why a consumer group is idle or slow, from facts, each cause with its evidence and its remedy.

    explanation = await explain(admin.fleet, "billing", clock=clock)
    for finding in explanation.findings: ...

A cause is one small function from facts to findings. `CAUSES` lists them in the order in which a
person would look, with what each checks in words. They judge and ask nothing: `facts.py` has asked
already, so whoever keeps the facts can have them judged again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from cosmodrome.client.operate import causes, member_causes
from cosmodrome.client.operate.facts import GroupFacts, Limits, gather
from cosmodrome.client.operate.finding import INFO, SEVERITIES, Finding
from cosmodrome.client.operate.fleet import Fleet
from cosmodrome.env.base import Clock

Cause = Callable[[GroupFacts], Iterator[Finding]]

CAUSES: tuple[tuple[str, Cause], ...] = (
    ("brokers are registered", causes.no_brokers),
    ("advertised addresses answer from here", causes.unreachable_broker),
    ("no broker advertises a loopback address to others", causes.loopback_advertised),
    ("the group exists", causes.unknown_group),
    ("the topics exist", causes.unknown_topic),
    ("members are connected", member_causes.no_members),
    ("members are in this namespace", member_causes.other_namespace),
    ("members are connected to the brokers that have the topic", member_causes.other_cluster),
    ("members subscribe to the topic", member_causes.not_subscribed),
    ("members agree on topics and filters", member_causes.subscriptions_differ),
    ("topics may be read", causes.topic_not_readable),
    ("brokers may be read", causes.broker_not_readable),
    ("the group may consume", causes.consume_disabled),
    ("brokers serve pulls of the group", causes.pull_refused),
    ("offsets are within the queues", causes.offset_out_of_range),
    ("filters let something pass", member_causes.filter_drops_everything),
    ("no queue is locked by an outsider", member_causes.queue_locked),
    ("every member has a queue", member_causes.more_members_than_queues),
    ("members answer", member_causes.silent_member),
    ("handlers return", member_causes.stuck_handler),
    ("handlers succeed", member_causes.retry_storm),
    ("members have room for more", member_causes.flow_control),
    ("lag does not grow", member_causes.falling_behind),
    ("no dead letters wait", causes.dead_letters),
    ("the broker knows the offsets", causes.broadcasting),
    ("there is something to consume", causes.nothing_to_read),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    facts: GroupFacts
    findings: list[Finding]  # the worst first
    checked: list[str]  # what was looked at and found in order

    @property
    def problems(self) -> list[Finding]:
        """What is wrong, without what is only worth knowing."""
        return [finding for finding in self.findings if finding.severity != INFO]


async def explain(
    fleet: Fleet,
    group: str,
    topic: str | None = None,
    *,
    clock: Clock,
    limits: Limits | None = None,
) -> Explanation:
    """Ask and judge; takes a little longer than `limits.sample_ms`."""
    return judge(await gather(fleet, group, topic, clock=clock, limits=limits))


def judge(facts: GroupFacts) -> Explanation:
    findings: list[Finding] = []
    checked: list[str] = []
    for words, cause in CAUSES:
        found = list(cause(facts))
        findings += found
        if not found:
            checked.append(words)
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Explanation(facts, findings, checked)
