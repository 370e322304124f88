"""Messages as the pure lane reads them: properties, keys and tags, the items of a batch.

Dispatch needs the code of a message's tags and the hashes of its keys; they are told here, while
the properties are in hand, just as `pure.gather` would read them out of the stored record.
"""

from __future__ import annotations

import functools

from cosmodrome.layout import (
    BATCH_ITEM_HEAD,
    HOST_V4_BYTES,
    NAME_END,
    PAIR_END,
    PROPERTIES_BYTES_MAX,
    RECORD_BYTES_MIN,
    TOPIC_BYTES_MAX,
)
from cosmodrome.speed.core.pure import java_hash, key_hash
from cosmodrome.speed.lane.heads import is_null

FRONTS_MAX = 1024
FRAMES_MAX = 1024
FRAME_CHARACTERS_MAX = 1024
TAIL_BYTES = 8  # of a key, hashed anew for each

_HEAD_BYTES = BATCH_ITEM_HEAD.size
_ITEM_BYTES_MIN = _HEAD_BYTES + 2
# Names of properties that the slow lane acts on.
_ACTS = frozenset({"DELAY", "TRAN_MSG", "CLUSTER"})
_TIMER = "TIMER_"
_ITEM_ACTS = (f"DELAY{NAME_END}", f"TRAN_MSG{NAME_END}", _TIMER)  # or what looks like them
_WAIT = "WAIT"
_UNIQUE = f"UNIQ_KEY{NAME_END}"

# flag, body, properties, tags code, hashes of its keys
Message = tuple[int, bytes, bytes, int, tuple[int, ...]]

_tags_code = functools.lru_cache(maxsize=1024)(java_hash)


class Plan:
    """What the lane knows about a topic that takes messages without a second thought."""

    def __init__(self, topic: str, queues: int, sys_flag: int) -> None:
        name = topic.encode()
        if not 0 < len(name) <= TOPIC_BYTES_MAX:
            raise ValueError(f"{topic!r} cannot be a topic")
        self.topic = topic
        self.queues = queues
        self.sys_flag = sys_flag  # bits that its messages get
        self.stored_name = len(name).to_bytes(1, "big") + name
        self.fixed_bytes = RECORD_BYTES_MIN - 2 * HOST_V4_BYTES + len(name)  # without hosts
        self.requests = self.messages = self.size = 0  # of a ticket that is being answered
        self._fronts: dict[bytes, int] = {}

    def key_hash(self, key: str) -> int:
        """The hash under which the index keeps a key of this topic."""
        return self.unique_hash(key.encode()) if key.isascii() else key_hash(self.topic, key)

    def unique_hash(self, key: bytes) -> int:
        """The same for a key of ASCII letters."""
        if len(key) < TAIL_BYTES:
            return key_hash(self.topic, key.decode())
        front = key[:-TAIL_BYTES]
        value = self._fronts.get(front)
        if value is None:
            if len(self._fronts) >= FRONTS_MAX:
                self._fronts.clear()
            # Times 31 to the power of 8: what follows has so many letters.
            value = java_hash(f"{self.topic}#{front.decode()}") * 852_891_037_441
            self._fronts[front] = value
        a, b, c, d, e, f, g, h = key[-TAIL_BYTES:]
        value += a * 27_512_614_111 + b * 887_503_681 + c * 28_629_151 + d * 923_521
        value = (value + e * 29_791 + f * 961 + g * 31 + h) & 0xFFFFFFFF
        if value < 0x80000000:
            return value
        return 0x100000000 - value if value != 0x80000000 else 0


# bytes as stored, whether the send waits, tags code, hashes of the keys
Properties = tuple[bytes, bool, int, tuple[int, ...]]


class PropertyReader:
    """Reads the properties of sends.

    Those of one producer mostly differ in their unique key only, so what the text around it means
    is remembered.
    """

    def __init__(self, cluster: str) -> None:
        self._cluster = f"CLUSTER{NAME_END}{cluster}"
        self._frames: dict[tuple[str, str], tuple[str, str, bool, int]] = {}

    def read(self, plan: Plan, text: str) -> Properties | None:
        """The properties of a plain send; None when the slow lane has to look at it."""
        front, found, rest = text.partition(_UNIQUE)
        if found and (not front or front[-1] == PAIR_END):
            unique, _, rest = rest.partition(PAIR_END)
            frame = self._frames.get((front, rest))
            if frame is None:
                frame = self._frame(front, rest)
            if frame is not None and unique and "\0" not in unique:
                before, behind, wait, tags_code = frame
                stored = f"{before}{unique}{behind}".encode()
                return stored, wait, tags_code, (plan.key_hash(unique),)
        pairs = _pairs(text)
        if pairs is None:
            return None
        wait = _waits(pairs)
        tags_code, hashes = read_facts(plan, pairs)
        pairs.pop(_WAIT, None)
        kept = [f"{name}{NAME_END}{value}" for name, value in pairs.items()]
        kept.append(self._cluster)
        return PAIR_END.join(kept).encode(), wait, tags_code, hashes

    def read_shared(self, text: str) -> tuple[str, bool] | None:
        """The properties of a batch and whether it waits; None for the slow lane."""
        pairs = _pairs(text)
        if pairs is None:
            return None
        kept = [f"{name}{NAME_END}{value}" for name, value in pairs.items()]
        kept.append(self._cluster)
        return PAIR_END.join(kept), _waits(pairs)

    def _frame(self, front: str, rest: str) -> tuple[str, str, bool, int] | None:
        """What stands before and behind the unique key, wait and tags code; None: it depends."""
        if len(front) + len(rest) > FRAME_CHARACTERS_MAX:
            return None
        before, behind = _pairs(front), _pairs(rest)
        if before is None or behind is None or not before.keys().isdisjoint(behind):
            return None
        pairs = before | behind
        if "KEYS" in pairs or "UNIQ_KEY" in pairs:
            return None
        wait, tags = _waits(pairs), pairs.get("TAGS")
        for part in (before, behind):
            part.pop(_WAIT, None)
        frame = (
            "".join(f"{name}{NAME_END}{value}{PAIR_END}" for name, value in before.items())
            + _UNIQUE,
            "".join(f"{PAIR_END}{name}{NAME_END}{value}" for name, value in behind.items())
            + PAIR_END
            + self._cluster,
            wait,
            0 if tags is None else java_hash(tags),
        )
        if len(self._frames) >= FRAMES_MAX:
            self._frames.clear()
        self._frames[front, rest] = frame
        return frame


def _pairs(text: str) -> dict[str, str] | None:
    """The pairs of a text, None when the slow lane has to look at them."""
    if "\0" in text or is_null(text):
        return None
    pairs: dict[str, str] = {}
    for pair in text.split(PAIR_END):
        name, _, value = pair.partition(NAME_END)
        if name and value:
            if name in pairs:
                return None
            pairs[name] = value
    if not _ACTS.isdisjoint(pairs):
        return None
    if _TIMER in text and any(name.startswith(_TIMER) for name in pairs):
        return None
    return pairs


def _waits(pairs: dict[str, str]) -> bool:
    wait = pairs.get(_WAIT)
    return wait is None or wait.lower() == "true"


def read_facts(plan: Plan, pairs: dict[str, str]) -> tuple[int, tuple[int, ...]]:
    """The code of the tags and the hashes of the keys among these pairs."""
    tags, unique, words = pairs.get("TAGS"), pairs.get("UNIQ_KEY"), pairs.get("KEYS")
    tags_code = 0 if tags is None else _tags_code(tags)
    if words is not None:
        keys = [unique] if unique is not None else []
        keys += [word for word in words.split(" ") if word]
        return tags_code, tuple([plan.key_hash(key) for key in keys])
    return tags_code, () if unique is None else (plan.key_hash(unique),)


def split_batch(plan: Plan, body: bytes, shared: str) -> list[Message] | None:
    """The messages of a batch, each with the properties that they share.

    None when the slow lane has to look at it.
    """
    messages: list[Message] = []
    unpack = BATCH_ITEM_HEAD.unpack_from
    at, end = 0, len(body)
    while at < end:
        if end - at < _ITEM_BYTES_MIN:
            return None
        size, _, _, flag, inner = unpack(body, at)
        stop = at + size
        if size < _ITEM_BYTES_MIN or stop > end or not 0 <= inner <= size - _ITEM_BYTES_MIN:
            return None
        text_at = at + _ITEM_BYTES_MIN + inner
        own = body[text_at:stop]
        if len(own) > PROPERTIES_BYTES_MAX:
            return None
        if int.from_bytes(body[text_at - 2 : text_at], "big") != len(own):
            return None
        try:
            text = own.decode()
        except UnicodeDecodeError:
            return None
        if "\0" in text or any(act in text for act in _ITEM_ACTS):
            return None
        if text and text[-1] != PAIR_END:
            text += PAIR_END
        text += shared
        found: dict[str, str] = {}
        for pair in text.split(PAIR_END):
            name, _, value = pair.partition(NAME_END)
            if value:
                found[name] = value
        tags_code, hashes = read_facts(plan, found)
        item = body[at + _HEAD_BYTES : text_at - 2]
        messages.append((flag, item, text.encode(), tags_code, hashes))
        at = stop
    return messages
