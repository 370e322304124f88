"""What became of one message: which groups have consumed it, and what clients traced about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.fleet import NotThere
from cosmodrome.client.operate.standing import AT_CLIENTS, standing
from cosmodrome.client.values import NoRoute, ReceivedMessage
from cosmodrome.errors import Code, ConfigError, ProtocolError, Refused
from cosmodrome.layout import NAME_END, PAIR_END
from cosmodrome.wire.bodies import TAG
from cosmodrome.wire.message import UNIQ_KEY, host_text, parse_offset_message_id, whole_number
from cosmodrome.wire.names import TRACE_TOPIC, dlq_topic, retry_topic

TRACE_COUNT_MAX = 256
_MESSAGE_KINDS = {"0": "normal", "1": "half", "2": "committed", "3": "delayed"}
_CODES = {"0": "success", "1": "too late", "2": "exception", "3": "no answer", "4": "failed"}
_PUB_FIELDS_MIN = 13  # older clients write no offset_msg_id


# --- finding ---------------------------------------------------------------------------------


async def find_message(admin: Admin, msg_id: str, topic: str | None = None) -> ReceivedMessage:
    """By its offset id, or with its topic by the unique id that its sender gave it.

    Both ids may look alike, so only brokers of the cluster are asked for an offset id.
    """
    if topic is not None:
        found = await admin.messages.by_unique_key(topic, msg_id)
        if found is not None:
            return found
    try:
        address = host_text(parse_offset_message_id(msg_id)[0])
    except ProtocolError:
        address = ""
    known = {
        one
        for data in (await admin.brokers.cluster()).broker_addr_table.values()
        for one in data.broker_addrs.values()
    }
    if address not in known:
        where = f"in topic {topic} " if topic is not None else ""
        more = "" if topic is not None else "; a unique id is found with the topic: --topic TOPIC"
        raise NotThere(
            f"no message {msg_id[:64]!r} {where}and no broker at the address in that id{more}"
        )
    try:
        return await admin.messages.by_id(msg_id)
    except Refused as refusal:
        if refusal.code in (Code.SYSTEM_ERROR, Code.QUERY_NOT_FOUND):
            raise NotThere(f"no message {msg_id}: {refusal.remark}") from None
        raise
    except (ProtocolError, ConfigError) as error:
        raise NotThere(f"no message {msg_id}: {error}") from None


# --- groups ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Track:
    group: str
    state: str  # consumed, filtered, waiting, dead letter, retried, broadcast, unknown
    online: bool
    offset: int | None  # of the group in the message's queue
    why: str = ""


async def tracks(admin: Admin, message: ReceivedMessage) -> list[Track]:
    """One for each group that consumes the topic of a message."""
    topic = message.record.topic
    return [
        await _track(admin, message, group) for group in sorted(await admin.topics.consumers(topic))
    ]


async def _track(admin: Admin, message: ReceivedMessage, group: str) -> Track:
    where = await standing(admin.fleet, group, message.record.topic)
    online = bool(where.members)
    row = next((one for one in where.queues if one.queue == message.queue), None)
    if row is None or row.offset is None:
        why = row.why if row is not None else "the queue is not read"
        state = "broadcast" if why == AT_CLIENTS else "unknown"
        return Track(group, state, online, None, why)
    if row.offset <= message.queue_offset:
        return Track(group, "waiting", online, row.offset)
    if online and not await _passes_filter(admin, group, message):
        return Track(group, "filtered", online, row.offset, "its subscription leaves it out")
    unique = message.properties.get(UNIQ_KEY)
    if unique is not None:
        for name, state in ((dlq_topic(group), "dead letter"), (retry_topic(group), "retried")):
            try:
                again = await admin.messages.by_unique_key(name, unique)
            except NoRoute:
                continue
            if again is not None:
                why = f"{again.reconsume_times} attempts; {again.offset_msg_id} in {name}"
                return Track(group, state, online, row.offset, why)
    return Track(group, "consumed", online, row.offset)


async def _passes_filter(admin: Admin, group: str, message: ReceivedMessage) -> bool:
    topic = message.record.topic
    for connection in (await admin.groups.connections(group)).values():
        chosen = connection.subscription_table.get(topic)
        if chosen is None:
            continue
        if chosen.expression_type != TAG or not chosen.tags_set:
            return True
        return message.tags in chosen.tags_set
    return True


# --- traces ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    """One thing that a client wrote down."""

    time_ms: int | None
    event: str
    group: str | None
    client: str  # host:port that the record came from
    status: str
    cost_ms: int | None = None
    topic: str | None = None
    msg_id: str = ""
    keys: str | None = None
    place: str | None = None  # where the message went, or how often it came
    request: str | None = None  # what joins the begin and the end of one consumption


async def traces(admin: Admin, msg_id: str, topic: str = TRACE_TOPIC) -> list[Traced]:
    """What clients traced about a message, by unique id or key, in the order of time.

    A producer notes the time when it has its answer, and consumers may be faster: the send still
    comes first.
    """
    found: list[Traced] = []
    for message in await admin.messages.by_key(topic, msg_id, max_count=TRACE_COUNT_MAX):
        if message.damage is not None:
            continue
        text = message.body.decode(errors="replace")
        for line in text.split(PAIR_END):
            fields = [None if part == "null" else part for part in line.split(NAME_END)]
            for one in _read(fields, message.born_host):
                if msg_id == one.msg_id or msg_id in (one.keys or "").split():
                    found.append(one)
    groups = {one.request: one.group for one in found if one.event == "consume" and one.request}
    begins = {one.request: one.time_ms for one in found if one.event == "consume" and one.request}
    whole = []
    for one in dict.fromkeys(found):  # a batch that was sent twice says nothing new
        if one.event == "consumed" and one.request in groups:
            # Compat: older clients do not repeat the group, nor say when it ended.
            begun = begins[one.request]
            ended = one.time_ms
            if ended is None and begun is not None:
                ended = begun + (one.cost_ms or 0)
            one = dataclasses.replace(one, group=one.group or groups[one.request], time_ms=ended)
        whole.append(one)
    return in_order(whole)


def in_order(found: Sequence[Traced]) -> list[Traced]:
    """By time, and what causes before what it causes; without a time last."""
    first_ms: dict[str, int] = {}  # of anything about a message
    for one in found:
        if one.time_ms is not None:
            first_ms[one.msg_id] = min(first_ms.get(one.msg_id, one.time_ms), one.time_ms)

    def order(one: Traced) -> tuple[bool, int, int, int]:
        at_ms = one.time_ms or 0
        if one.event == "sent":
            return one.time_ms is None, first_ms.get(one.msg_id, 0), 0, at_ms
        return one.time_ms is None, at_ms, 2 if one.event == "consumed" else 1, at_ms

    return sorted(found, key=order)


def _read(fields: list[str | None], client: str) -> Iterator[Traced]:
    kind = fields[0]
    if kind == "Pub" and len(fields) >= _PUB_FIELDS_MIN:
        ok = fields[13] if len(fields) > _PUB_FIELDS_MIN else fields[12]
        sort = _MESSAGE_KINDS.get(fields[11] or "", "")
        yield Traced(
            time_ms=_number(fields[1]),
            event="sent",
            group=fields[3],
            client=client,
            status="stored" if ok == "true" else "failed",
            cost_ms=_number(fields[10]),
            topic=fields[4],
            msg_id=fields[5] or "",
            keys=fields[7],
            place=" ".join(part for part in (sort, fields[8]) if part),
        )
    elif kind == "SubBefore" and len(fields) >= 8:
        yield Traced(
            time_ms=_number(fields[1]),
            event="consume",
            group=fields[3],
            client=client,
            status="begun",
            msg_id=fields[5] or "",
            keys=fields[7],
            place=f"attempt {(_number(fields[6]) or 0) + 1}",
            request=fields[4],
        )
    elif kind == "SubAfter" and len(fields) >= 6:
        late = len(fields) >= 9
        code = _CODES.get(fields[6] or "", "") if len(fields) > 6 else ""
        yield Traced(
            time_ms=_number(fields[7]) if late else None,
            event="consumed",
            group=fields[8] if late else None,
            client=client,
            status="success" if fields[4] == "true" else code or "failed",
            cost_ms=_number(fields[3]),
            msg_id=fields[2] or "",
            keys=fields[5],
            request=fields[1],
        )
    elif kind == "EndTransaction" and len(fields) >= 13:
        yield Traced(
            time_ms=_number(fields[1]),
            event="transaction",
            group=fields[3],
            client=client,
            status=(fields[11] or "").lower(),
            topic=fields[4],
            msg_id=fields[5] or "",
            keys=fields[7],
            place="answer to a check" if fields[12] == "true" else fields[8],
        )


def _number(text: str | None) -> int | None:
    return whole_number(text or "")
