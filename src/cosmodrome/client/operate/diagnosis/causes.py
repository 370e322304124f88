"""Causes on the side of the cluster: names, permissions, addresses, offsets, refused pulls.

Each function looks at the facts and yields what it finds; none of them asks anybody.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from cosmodrome.client.operate.diagnosis.facts import GroupFacts, is_loopback
from cosmodrome.client.operate.pairs import PROMOTION
from cosmodrome.client.operate.standing import QueueStanding
from cosmodrome.findings import Finding, Severity
from cosmodrome.wire.bodies import MASTER_ID, PERM_READ
from cosmodrome.wire.names import DLQ_PREFIX, RETRY_PREFIX


def unreachable_broker(facts: GroupFacts) -> Iterator[Finding]:
    for broker in facts.brokers.values():
        if not broker.reachable:
            yield Finding(
                "BROKER_UNREACHABLE",
                facts.group,
                Severity.ERROR,
                f"Broker {broker.name} advertises {broker.address}, which does not answer from"
                " here; consumers that cannot reach it either get nothing of its queues.",
                "Start the broker, open the port, or set brokerIP1 to an address that consumers"
                " can reach and restart it.",
                f"cosmo broker run --set brokerIP1=ADDRESS --set brokerName={broker.name}",
                {"broker": broker.name, "address": broker.address, "error": broker.why},
            )


def master_away(facts: GroupFacts) -> Iterator[Finding]:
    for broker in facts.brokers.values():
        if broker.broker_id != MASTER_ID:
            ordered = " This group consumes in order, so it waits." if facts.ordered else ""
            yield Finding(
                "MASTER_AWAY",
                facts.group,
                Severity.ERROR if facts.ordered else Severity.WARNING,
                f"The master of broker {broker.name} is away; its slave {broker.broker_id} at"
                f" {broker.address} stands in. Consumers read and commit there. Sends, retries,"
                f" delayed messages, transactions and ordered consumers wait.{ordered}",
                f"Start the master. If its machine is lost, {PROMOTION}: the slave starts again"
                " with brokerId=0 and the brokerRole that its master had, SYNC_MASTER or"
                " ASYNC_MASTER.",
                "cosmo cluster status",
                {"broker": broker.name, "slave": broker.broker_id, "address": broker.address},
            )


def loopback_advertised(facts: GroupFacts) -> Iterator[Finding]:
    """An address that means "this machine" to everybody, though others are involved."""
    hosts = [address.rpartition(":")[0] for address in facts.name_servers]
    hosts += [member.address.rpartition(":")[0] for member in facts.members.values()]
    distant = sorted({host for host in hosts if not is_loopback(host)})
    if not distant:
        return
    for broker in facts.brokers.values():
        if broker.loopback:
            yield Finding(
                "LOOPBACK_ADVERTISED",
                facts.group,
                Severity.ERROR,
                f"Broker {broker.name} advertises {broker.address}, which every consumer takes"
                " for its own machine.",
                "Set brokerIP1 to an address that consumers can reach and restart the broker.",
                f"cosmo broker run --set brokerIP1=ADDRESS --set brokerName={broker.name}",
                {"broker": broker.name, "address": broker.address, "others_at": distant[:5]},
            )


def no_brokers(facts: GroupFacts) -> Iterator[Finding]:
    if not facts.brokers:
        yield Finding(
            "NO_BROKERS",
            facts.group,
            Severity.ERROR,
            f"The name servers {listed(facts.name_servers)} know no broker.",
            "Start a broker with these name servers, or use the name servers of the cluster.",
            f"cosmo broker run -n '{';'.join(facts.name_servers)}'",
            {"name_servers": list(facts.name_servers)},
        )


def unknown_group(facts: GroupFacts) -> Iterator[Finding]:
    if facts.configs or facts.members or not facts.brokers:
        return
    if not all(broker.reachable for broker in facts.brokers.values()):
        return  # one that is silent may know it
    known = {name for name in facts.group_names if not name.startswith("CID_")}
    close = _nearest(facts.group, known)
    hint = f"; did you mean {close[0]}?" if close else ""
    yield Finding(
        "GROUP_UNKNOWN",
        facts.group,
        Severity.ERROR,
        f"No broker knows a group {facts.group}{hint}",
        "Check the name. A group appears when its first consumer connects, and a consumer whose"
        " topics all do not exist connects to no broker.",
        f"cosmo group explain {close[0]}" if close else "cosmo group list",
        {"groups_known": len(facts.group_names), "similar": close},
    )


def unknown_topic(facts: GroupFacts) -> Iterator[Finding]:
    for topic in facts.looked_at:
        if topic in facts.routed or topic.startswith(DLQ_PREFIX):
            continue
        close = _nearest(topic, facts.topic_names - {topic})
        hint = f"; did you mean {close[0]}?" if close else ""
        subscribed = topic in facts.subscriptions
        yield Finding(
            "TOPIC_UNKNOWN",
            facts.group,
            Severity.ERROR,
            f"No broker has a topic {topic}{hint}",
            "Correct the name in the consumer, or create the topic.",
            f"cosmo topic create {topic}",
            {"topic": topic, "subscribed": subscribed, "similar": close},
        )


def topic_not_readable(facts: GroupFacts) -> Iterator[Finding]:
    for topic, configs in facts.topics.items():
        for broker, config in configs.items():
            if not config.perm & PERM_READ:
                yield Finding(
                    "TOPIC_NOT_READABLE",
                    facts.group,
                    Severity.ERROR,
                    f"Topic {topic} may not be read on {broker}: its permission is {config.perm}.",
                    "Give it read permission.",
                    f"cosmo topic alter {topic} --perm {config.perm | PERM_READ}",
                    {"topic": topic, "broker": broker, "perm": config.perm},
                )


def broker_not_readable(facts: GroupFacts) -> Iterator[Finding]:
    for broker in facts.brokers.values():
        if broker.permission is not None and not broker.permission & PERM_READ:
            yield Finding(
                "BROKER_NOT_READABLE",
                facts.group,
                Severity.ERROR,
                f"Broker {broker.name} serves no pulls: its brokerPermission is"
                f" {broker.permission}.",
                "Give it read permission.",
                f"cosmo broker config set --broker {broker.name}"
                f" brokerPermission={broker.permission | PERM_READ}",
                {"broker": broker.name, "brokerPermission": broker.permission},
            )


def consume_disabled(facts: GroupFacts) -> Iterator[Finding]:
    for name, config in facts.configs.items():
        if not config.consume_enable:
            yield Finding(
                "CONSUME_DISABLED",
                facts.group,
                Severity.ERROR,
                f"Group {facts.group} may not consume on {name}: its consumeEnable is off.",
                "Switch it on.",
                f"cosmo group alter {facts.group} --consume on",
                {"broker": name, "consumeEnable": False},
            )
        if facts.broadcasting and not config.consume_broadcast_enable:
            yield Finding(
                "BROADCAST_DISABLED",
                facts.group,
                Severity.ERROR,
                f"Group {facts.group} consumes as broadcast, which {name} does not allow it.",
                "Allow it, or consume as a cluster.",
                f"cosmo group alter {facts.group} --broadcast on",
                {"broker": name, "consumeBroadcastEnable": False},
            )


def pull_refused(facts: GroupFacts) -> Iterator[Finding]:
    """Whatever no other cause has named already."""
    unreadable = {
        (topic, broker)
        for topic, configs in facts.topics.items()
        for broker, config in configs.items()
        if not config.perm & PERM_READ
    }
    for refusal in facts.refusals:
        queue = refusal.queue
        broker = facts.brokers[queue.broker_name]
        config = facts.configs.get(queue.broker_name)
        if (
            (queue.topic, queue.broker_name) in unreadable
            or (broker.permission is not None and not broker.permission & PERM_READ)
            or (config is not None and not config.consume_enable)
        ):
            continue
        yield Finding(
            "PULL_REFUSED",
            facts.group,
            Severity.ERROR,
            f"Broker {queue.broker_name} refuses pulls of {queue.topic}: {refusal.remark}",
            "Do what the broker says.",
            f"cosmo topic describe {queue.topic}",
            {"broker": queue.broker_name, "queue": queue.queue_id, "code": refusal.code},
        )


def offset_out_of_range(facts: GroupFacts) -> Iterator[Finding]:
    beyond, before = [], []
    look = facts.after or facts.before
    for row in look.queues if look is not None else ():
        if row.offset is None or row.first is None or row.end is None:
            continue
        if row.offset > row.end:
            beyond.append(row)
        elif row.offset < row.first:
            before.append(row)
    for topic in sorted({row.queue.topic for row in beyond}):
        rows = [row for row in beyond if row.queue.topic == topic]
        worst = max(rows, key=lambda row: (row.offset or 0) - (row.end or 0))
        yield Finding(
            "OFFSET_BEYOND_END",
            facts.group,
            Severity.ERROR,
            f"Group {facts.group} waits behind the end of {len(rows)} queue(s) of {topic}: queue"
            f" {worst.queue.queue_id} on {worst.queue.broker_name} ends at {worst.end}, the group"
            f" is at {worst.offset}. The topic was deleted and made again, or the store was lost.",
            "Move the group back to what is there.",
            f"cosmo group reset {facts.group} --topic {topic} --to earliest",
            _position(worst, queues=len(rows)),
        )
    for topic in sorted({row.queue.topic for row in before}):
        rows = [row for row in before if row.queue.topic == topic]
        worst = max(rows, key=lambda row: (row.first or 0) - (row.offset or 0))
        lost = sum((row.first or 0) - (row.offset or 0) for row in rows)
        yield Finding(
            "OFFSET_BEFORE_BEGINNING",
            facts.group,
            Severity.WARNING,
            f"Group {facts.group} has not read {lost} message(s) of {topic} that are deleted by"
            f" now: queue {worst.queue.queue_id} on {worst.queue.broker_name} begins at"
            f" {worst.first}, the group is at {worst.offset}.",
            "Consume faster, or keep messages longer (fileReservedTime). The group goes on at the"
            " oldest message by itself.",
            f"cosmo group reset {facts.group} --topic {topic} --to earliest",
            _position(worst, queues=len(rows), lost=lost),
        )


def broadcasting(facts: GroupFacts) -> Iterator[Finding]:
    if facts.broadcasting:
        yield Finding(
            "BROADCASTING",
            facts.group,
            Severity.INFO,
            f"Group {facts.group} consumes as broadcast: every member gets every message, offsets"
            " live at the clients, and brokers know no lag.",
            "Ask the members themselves.",
            f"cosmo client list --group {facts.group}",
            {"members": len(facts.members)},
        )


def dead_letters(facts: GroupFacts) -> Iterator[Finding]:
    if facts.retries.dead:
        yield Finding(
            "DEAD_LETTERS",
            facts.group,
            Severity.WARNING,
            f"{facts.retries.dead} message(s) of group {facts.group} were given up and wait as"
            " dead letters.",
            "Look why, mend the consumer, then send them again.",
            f"cosmo dlq peek {facts.group}",
            {"dead_letters": facts.retries.dead},
        )


def nothing_to_read(facts: GroupFacts) -> Iterator[Finding]:
    """Idle because there is nothing: worth saying when somebody asks why."""
    look = facts.after or facts.before
    rows = [] if look is None else look.queues
    for topic in facts.looked_at:
        mine = [row for row in rows if row.queue.topic == topic]
        if not mine or topic.startswith(RETRY_PREFIX) or topic not in facts.subscriptions:
            continue
        if all(row.end is not None and row.end == row.first for row in mine):
            yield Finding(
                "TOPIC_EMPTY",
                facts.group,
                Severity.INFO,
                f"Topic {topic} holds no message.",
                "Look whether producers send to it.",
                f"cosmo topic stats {topic}",
                {"topic": topic, "queues": len(mine), "messages": 0},
            )
        elif all(row.lag == 0 for row in mine):
            yield Finding(
                "CAUGHT_UP",
                facts.group,
                Severity.INFO,
                f"Group {facts.group} has consumed everything that is in {topic}.",
                "Look whether producers send to it.",
                f"cosmo topic stats {topic}",
                {"topic": topic, "queues": len(mine), "lag": 0},
            )


def listed(names: Iterable[str], most: int = 5) -> str:
    """A few names and how many more there are."""
    every = sorted(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def _nearest(name: str, known: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)


def _position(row: QueueStanding, **more: int) -> dict[str, object]:
    return {
        "topic": row.queue.topic,
        "broker": row.queue.broker_name,
        "queue": row.queue.queue_id,
        "first": row.first,
        "end": row.end,
        "offset": row.offset,
        **more,
    }
