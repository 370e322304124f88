"""Why a consumer group is idle or slow, from facts, each cause with its evidence and its remedy.

    explanation = await explain(admin.fleet, "billing", clock=clock)
    for finding in explanation.findings: ...

A cause is one small function from facts to findings. `CAUSES` lists them in the order in which a
person would look, with what each checks in words and what it has to know: without that, finding
nothing is no good news. They judge and ask nothing: `facts.py` has asked
already, so whoever keeps the facts can have them judged again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from cosmodrome.client.operate.diagnosis import causes, member_causes
from cosmodrome.client.operate.diagnosis.facts import GroupFacts, Limits, gather
from cosmodrome.client.operate.fleet import Fleet
from cosmodrome.env.base import Clock
from cosmodrome.findings import Finding, Severity
from cosmodrome.wire.bodies import EVERYTHING

Cause = Callable[[GroupFacts], Iterator[Finding]]

Needs = Callable[[GroupFacts], bool]


def _nothing(facts: GroupFacts) -> bool:
    return True


def _all_brokers(facts: GroupFacts) -> bool:
    return bool(facts.brokers) and all(broker.reachable for broker in facts.brokers.values())


def _topics(facts: GroupFacts) -> bool:
    return _all_brokers(facts) and bool(facts.looked_at)


def _members(facts: GroupFacts) -> bool:
    return _all_brokers(facts) and bool(facts.members)


def _reports(facts: GroupFacts) -> bool:
    return facts.all_reported


def _two_reports(facts: GroupFacts) -> bool:
    return facts.all_reported and all(len(one.looks) > 1 for one in facts.members.values())


def _offsets(facts: GroupFacts) -> bool:
    look = facts.after or facts.before
    return look is not None and bool(look.queues) and look.lag is not None


def _filtered(facts: GroupFacts) -> bool:
    return _members(facts) and all(
        data.sub_string.strip() in ("", EVERYTHING)
        or any(found.topic == topic for found in facts.filters)
        for topic, data in facts.subscriptions.items()
    )


def _ordered(facts: GroupFacts) -> bool:
    return facts.all_reported and facts.ordered


# What is checked, in words; what has to be known for that; the cause.
CAUSES: tuple[tuple[str, Needs, Cause], ...] = (
    ("brokers are registered", _nothing, causes.no_brokers),
    ("every broker name has its master", _nothing, causes.master_away),
    ("advertised addresses answer from here", _nothing, causes.unreachable_broker),
    ("no broker advertises a loopback address", _nothing, causes.loopback_advertised),
    ("the group exists", _all_brokers, causes.unknown_group),
    ("the topics exist", _topics, causes.unknown_topic),
    ("members are connected", _all_brokers, member_causes.no_members),
    ("members are in this namespace", _all_brokers, member_causes.other_namespace),
    ("members are connected where the topic is", _members, member_causes.other_cluster),
    ("members subscribe to the topic", _members, member_causes.not_subscribed),
    ("members agree on topics and filters", _reports, member_causes.subscriptions_differ),
    ("topics may be read", _topics, causes.topic_not_readable),
    ("brokers may be read", _all_brokers, causes.broker_not_readable),
    ("the group may consume", _all_brokers, causes.consume_disabled),
    ("brokers serve pulls of the group", _topics, causes.pull_refused),
    ("offsets are within the queues", _offsets, causes.offset_out_of_range),
    ("filters let something pass", _filtered, member_causes.filter_drops_everything),
    ("no queue is locked by an outsider", _ordered, member_causes.queue_locked),
    ("every member has a queue", _members, member_causes.more_members_than_queues),
    ("members answer", _reports, member_causes.silent_member),
    ("handlers return", _two_reports, member_causes.stuck_handler),
    ("handlers succeed", _reports, member_causes.retry_storm),
    ("members have room for more", _reports, member_causes.flow_control),
    ("lag does not grow", _offsets, member_causes.falling_behind),
    ("no dead letters wait", _all_brokers, causes.dead_letters),
    ("brokers know the offsets", _members, causes.broadcasting),
    ("there is something to consume", _offsets, causes.nothing_to_read),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    facts: GroupFacts
    findings: list[Finding]  # the worst first
    checked: list[str]  # what was looked at and found in order
    unchecked: list[str]  # what could not be looked at, or does not apply

    @property
    def problems(self) -> list[Finding]:
        """What is wrong, without what is only worth knowing."""
        return [finding for finding in self.findings if finding.severity is not Severity.INFO]


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
    unchecked: list[str] = []
    for words, needs, cause in CAUSES:
        found = list(cause(facts))
        findings += found
        if not found:
            (checked if needs(facts) else unchecked).append(words)
    findings.sort(key=lambda finding: finding.severity.rank, reverse=True)
    return Explanation(facts, findings, checked, unchecked)
