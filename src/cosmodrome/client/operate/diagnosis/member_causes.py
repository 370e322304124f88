"""Causes on the side of the members: who is there, what they want, what they do with messages.

Each function looks at the facts and yields what it finds; none of them asks anybody.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cosmodrome.client.operate.diagnosis.causes import listed
from cosmodrome.client.operate.diagnosis.facts import GroupFacts, MemberFacts
from cosmodrome.client.operate.diagnosis.probes import number, stands_still
from cosmodrome.findings import Finding, Severity
from cosmodrome.wire.bodies import PERM_READ
from cosmodrome.wire.names import RETRY_PREFIX

# Compat: what a Java consumer pulls ahead when it says nothing else.
CACHED_MESSAGES = 1_000
CACHED_MIB = 100
CACHED_SPAN = 2_000
STACK_LINES = 12
# Threads that wait for work, as stacks of Java and of this client show them.
IDLE_MARKS = ("getTask", "asyncio/queues.py", "receive/prefetch.py")
WORKER_MARK = "ConsumeMessage"


def no_members(facts: GroupFacts) -> Iterator[Finding]:
    if facts.members or not any(broker.reachable for broker in facts.brokers.values()):
        return
    if not facts.configs:
        return  # nobody knows the group at all, which is said elsewhere
    answering = [broker for broker in facts.brokers.values() if broker.reachable]
    everybody = len(answering) == len(facts.brokers)
    yield Finding(
        "NO_MEMBERS",
        facts.group,
        Severity.ERROR if everybody else Severity.WARNING,
        f"No consumer of group {facts.group} is connected to"
        + (" any broker." if everybody else f" the {len(answering)} broker(s) that answer."),
        "Start the consumers; check that they use this group name and the name servers"
        f" {listed(facts.name_servers)}.",
        f"cosmo client list --group {facts.group}",
        {"members": 0, "brokers_asked": len(answering), "lag": _lag(facts)},
    )


def other_namespace(facts: GroupFacts) -> Iterator[Finding]:
    for name, members in sorted(facts.elsewhere.items()):
        if members and not facts.members:
            yield Finding(
                "OTHER_NAMESPACE",
                facts.group,
                Severity.ERROR,
                f"The consumers of {facts.group} seem to be in another namespace: group {name}"
                f" has {members} member(s), {facts.group} has none.",
                "Give consumers and producers the same namespace, or ask about that group.",
                f"cosmo group explain '{name}'",
                {"group": name, "members": members},
            )


def other_cluster(facts: GroupFacts) -> Iterator[Finding]:
    """Members are seen, but not by the brokers that have the topic."""
    if facts.broadcasting or not facts.members:
        return
    for topic in facts.looked_at:
        homes = set(facts.topics[topic])
        seen = {name for member in facts.members.values() for name in member.brokers}
        if not homes or homes & seen:
            continue
        theirs = {
            str(member.last.properties.get("PROP_NAMESERVER_ADDR", "")).strip(";")
            for member in facts.members.values()
            if member.last is not None
        }
        clusters = {facts.brokers[name].cluster for name in seen if name in facts.brokers}
        yield Finding(
            "OTHER_CLUSTER",
            facts.group,
            Severity.ERROR,
            f"The members of {facts.group} are connected to {listed(seen)} only, and {topic} is on"
            f" {listed(homes)}: they use other name servers, or another cluster.",
            f"Give the consumers the name servers {listed(facts.name_servers)}.",
            f"cosmo topic route {topic}",
            {
                "connected_to": sorted(seen),
                "clusters": sorted(clusters),
                "topic_on": sorted(homes),
                "name_servers_of_members": sorted(theirs),
            },
        )


def not_subscribed(facts: GroupFacts) -> Iterator[Finding]:
    if facts.topic is None or not facts.members or facts.topic in facts.subscriptions:
        return
    subscribed = sorted(name for name in facts.subscriptions if not name.startswith(RETRY_PREFIX))
    yield Finding(
        "NOT_SUBSCRIBED",
        facts.group,
        Severity.ERROR,
        f"The members of {facts.group} do not subscribe to {facts.topic}, but to"
        f" {listed(subscribed) or 'nothing'}.",
        "Subscribe to it in the consumer.",
        f"cosmo group describe {facts.group}",
        {"members": len(facts.members), "subscribed": subscribed[:10]},
    )


def subscriptions_differ(facts: GroupFacts) -> Iterator[Finding]:
    """Each broker keeps one subscription per group: the last heartbeat wins."""
    kinds: dict[frozenset[tuple[str, str]], list[str]] = {}
    for member in facts.members.values():
        if member.last is not None and member.last.subscription_set:
            wants = frozenset(
                (data.topic, data.sub_string) for data in member.last.subscription_set
            )
            kinds.setdefault(wants, []).append(member.client_id)
    if len(kinds) < 2 and not facts.disagreement:
        return
    evidence: dict[str, Any] = {"kinds": max(2, len(kinds))}
    for kind, (wants, names) in enumerate(sorted(kinds.items(), key=lambda item: item[1]), 1):
        plain = sorted(f"{topic}:{text}" for topic, text in wants if topic[:1] != "%")
        evidence[f"kind_{kind}"] = {"members": sorted(names)[:5], "subscribe": plain[:10]}
    if facts.disagreement:
        evidence["broker_says"] = facts.disagreement
    yield Finding(
        "SUBSCRIPTIONS_DIFFER",
        facts.group,
        Severity.ERROR,
        f"Members of {facts.group} subscribe to different topics or filters. Brokers keep one"
        " subscription per group, so they take messages from each other and lose them.",
        "Give each kind of consumer a group of its own.",
        f"cosmo group describe {facts.group}",
        evidence,
    )


def more_members_than_queues(facts: GroupFacts) -> Iterator[Finding]:
    if facts.broadcasting:
        return
    for topic in facts.looked_at:
        configs = facts.topics[topic].values()
        queues = sum(config.read_queue_nums for config in configs if config.perm & PERM_READ)
        count = len(facts.members)
        if not queues or count <= queues or topic not in facts.subscriptions:
            continue
        idle = [
            member.client_id
            for member in facts.members.values()
            if member.last is not None
            and not any(queue.topic == topic for queue in member.last.mq_table)
        ]
        yield Finding(
            "MORE_MEMBERS_THAN_QUEUES",
            facts.group,
            Severity.WARNING,
            f"{count} members share {queues} queue(s) of {topic}, so {count - queues} of them get"
            " nothing.",
            "Give the topic as many queues as the group has members, or run fewer members.",
            f"cosmo topic alter {topic} --queues {count}",
            {"topic": topic, "members": count, "queues": queues, "idle": sorted(idle)[:10]},
        )


def queue_locked(facts: GroupFacts) -> Iterator[Finding]:
    look = facts.after or facts.before
    lags = {} if look is None else {row.queue: row.lag for row in look.queues}
    for queue in sorted(facts.foreign_locks, key=lambda one: (one.broker_name, one.queue_id)):
        yield Finding(
            "QUEUE_LOCKED",
            facts.group,
            Severity.ERROR,
            f"Queue {queue.queue_id} of {queue.topic} on {queue.broker_name} is locked for ordered"
            " consumption by a client that does not work on it.",
            "A client that died loses its lock after a minute. One that lives, with the same group,"
            " has to be stopped or to answer.",
            f"cosmo client list --group {facts.group}",
            {
                "topic": queue.topic,
                "broker": queue.broker_name,
                "queue": queue.queue_id,
                "lag": lags.get(queue),
                "members": sorted(facts.members)[:10],
            },
        )


def filter_drops_everything(facts: GroupFacts) -> Iterator[Finding]:
    for found in facts.filters:
        if found.passed or not found.looked_at:
            continue
        yield Finding(
            "FILTER_DROPS_EVERYTHING",
            facts.group,
            Severity.ERROR,
            f"None of the last {found.looked_at} messages of {found.topic} passes the filter"
            f" {found.expression!r} of {facts.group}.",
            "Correct the filter in the consumer, or the tags and properties in the producer.",
            f"cosmo consume {found.topic} --exit-at-end --from begin",
            {
                "topic": found.topic,
                "filter": found.expression,
                "filter_type": found.kind,
                "looked_at": found.looked_at,
                "passed": 0,
                "tags_seen": found.tags,
            },
        )


def flow_control(facts: GroupFacts) -> Iterator[Finding]:
    """A member that has pulled as much as it may hold pulls no more."""
    for member in facts.members.values():
        if member.last is None:
            continue
        says = member.last.properties
        messages_max = number(says, "pullThresholdForQueue", CACHED_MESSAGES)
        mib_max = number(says, "pullThresholdSizeForQueue", CACHED_MIB)
        span_max = number(says, "consumeConcurrentlyMaxSpan", CACHED_SPAN)
        full = []
        for queue, info in member.last.mq_table.items():
            count = number(info, "cachedMsgCount")
            span = number(info, "cachedMsgMaxOffset") - number(info, "cachedMsgMinOffset")
            if (
                count >= messages_max
                or number(info, "cachedMsgSizeInMiB") >= mib_max
                or (count and span >= span_max and not facts.ordered)
            ):
                full.append((count, queue, info))
        if full:
            count, queue, info = max(full, key=lambda item: item[0])
            status = member.last.status_table.get(queue.topic, {})
            yield Finding(
                "FLOW_CONTROL",
                facts.group,
                Severity.WARNING,
                f"Member {member.client_id} holds {count} messages of queue {queue.queue_id} of"
                f" {queue.topic} that it has not consumed, and pulls no more until it has: its"
                " handler is slower than messages come.",
                "Make the handler faster, give the consumer more threads (concurrency), or add"
                " members up to the number of queues.",
                f"cosmo client stack {facts.group} {member.client_id}",
                {
                    "client_id": member.client_id,
                    "queues_full": len(full),
                    "cached_messages": count,
                    "cached_messages_max": messages_max,
                    "cached_mib": number(info, "cachedMsgSizeInMiB"),
                    "threads": says.get("PROP_THREADPOOL_CORE_SIZE"),
                    "handler_ms": status.get("consumeRT"),
                },
            )


def stuck_handler(facts: GroupFacts) -> Iterator[Finding]:
    """Messages at a member, and nothing moves between two looks."""
    for member in facts.members.values():
        if len(member.looks) < 2:
            continue
        before, after = member.looks[0].mq_table, member.looks[-1].mq_table
        stuck = [
            (
                facts.now_ms
                - max(number(info, "lastConsumeTimestamp"), facts.held_since_ms[queue]),
                queue,
            )
            for queue, info in after.items()
            if queue in before
            and queue in facts.held_since_ms
            and stands_still(before[queue], info)
        ]
        stuck = [one for one in stuck if one[0] >= facts.limits.stuck_after_ms]
        if not stuck:
            continue
        idle_ms, queue = max(stuck, key=lambda one: one[0])
        info = after[queue]
        yield Finding(
            "HANDLER_STUCK",
            facts.group,
            Severity.ERROR,
            f"Member {member.client_id} has {number(info, 'cachedMsgCount')} message(s) of queue"
            f" {queue.queue_id} of {queue.topic} in hand and has finished none for"
            f" {idle_ms // 1000} s: its handler does not return.",
            "See where it waits, mend it (a timeout for every outside call), restart the member.",
            f"cosmo client stack {facts.group} {member.client_id}",
            {
                "client_id": member.client_id,
                "topic": queue.topic,
                "queue": queue.queue_id,
                "oldest_offset": number(info, "cachedMsgMinOffset"),
                "cached_messages": number(info, "cachedMsgCount"),
                "idle_s": idle_ms // 1000,
                "queues_stuck": len(stuck),
                "stack": _same_stack(member),
            },
        )


def _same_stack(member: MemberFacts) -> list[str]:
    """A worker that is busy in the same place in both looks."""
    dumps = [look.jstack for look in member.looks if isinstance(look.jstack, str)]
    if len(dumps) < 2:
        return []
    before = set(dumps[0].split("\n\n"))
    for block in dumps[-1].split("\n\n"):
        busy = WORKER_MARK in block and not any(mark in block for mark in IDLE_MARKS)
        if busy and block in before:
            return [line.strip() for line in block.strip().splitlines()][:STACK_LINES]
    return []


def silent_member(facts: GroupFacts) -> Iterator[Finding]:
    for member in facts.members.values():
        if member.why:
            yield Finding(
                "MEMBER_SILENT",
                facts.group,
                Severity.ERROR,
                f"Member {member.client_id} ({member.address}) is connected and does not answer:"
                " its process is stuck or stopped, or its client is too old to be asked.",
                "Look at that process; restart it when it hangs.",
                f"cosmo client list --group {facts.group}",
                {
                    "client_id": member.client_id,
                    "address": member.address,
                    "language": member.language,
                    "error": member.why,
                },
            )


def retry_storm(facts: GroupFacts) -> Iterator[Finding]:
    failing = ok = 0.0
    failed = 0
    for member in facts.members.values():
        for status in member.last.status_table.values() if member.last is not None else ():
            failing += float(status.get("consumeFailedTPS") or 0.0)
            ok += float(status.get("consumeOKTPS") or 0.0)
            failed += number(status, "consumeFailedMsgs")
    retries = facts.retries
    if failing <= 0 and not retries.returned_minute:
        return
    worse = failing >= ok
    yield Finding(
        "RETRY_STORM",
        facts.group,
        Severity.ERROR if worse else Severity.WARNING,
        f"Handlers of {facts.group} fail: {failing:.1f} messages per second are given back for a"
        f" retry, {ok:.1f} succeed."
        + (" Every failed message comes up to 16 times again." if worse else ""),
        "Read the consumer's log for the reason; mend the handler. What fails for ever ends as a"
        " dead letter.",
        f"cosmo group lag {facts.group}",
        {
            "failed_per_s": round(failing, 2),
            "succeeded_per_s": round(ok, 2),
            "failed_since_start": failed,
            "returned_last_minute": retries.returned_minute,
            "returned_last_hour": retries.returned_hour,
            "retry_messages_ever": retries.retry_end,
            "dead_letters": retries.dead,
        },
    )


def falling_behind(facts: GroupFacts) -> Iterator[Finding]:
    """Works, but slower than messages come."""
    before, after = facts.before, facts.after
    if before is None or after is None or not facts.members or facts.apart_ms <= 0:
        return
    old, new = before.lag, after.lag
    if old is None or new is None or new <= old or not old:
        return
    moved = {row.queue: row.offset for row in before.queues}
    read = sum(
        max(0, row.offset - (moved.get(row.queue) or row.offset))
        for row in after.queues
        if row.offset is not None
    )
    seconds = facts.apart_ms / 1000
    yield Finding(
        "FALLING_BEHIND",
        facts.group,
        Severity.WARNING,
        f"Messages come faster than {facts.group} consumes them: its lag grew from {old} to {new}"
        f" within {seconds:.1f} s.",
        "Make the handler faster, or add members up to the number of queues.",
        f"cosmo group lag {facts.group} --watch",
        {
            "lag_before": old,
            "lag_after": new,
            "seconds": round(seconds, 1),
            "consumed_per_s": round(read / seconds, 1),
            "grows_per_s": round((new - old) / seconds, 1),
        },
    )


def _lag(facts: GroupFacts) -> int | None:
    look = facts.after or facts.before
    return None if look is None else look.lag
