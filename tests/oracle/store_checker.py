"""Judges a store by its files, by what a broker serves from them, and by what was sent.

Three accounts must agree: the history of what senders were told, the commit log as read here
from its files, and the answers of the broker that runs on them, whichever that is. Nothing here
shares code with the store under test; layouts are written down again.
"""

from __future__ import annotations

import json
import shutil
import struct
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from peers.raw import CallFailed, call

# Small, so that a few hundred messages fill several files of each kind.
GEOMETRY = {
    "mappedFileSizeCommitLog": "32768",
    "mappedFileSizeConsumeQueue": "500",
    "maxHashSlotNum": "100",
    "maxIndexNum": "200",
}
LOG_FILE_BYTES = 32768
QUEUE_FILE_BYTES = 500
INDEX_FILE_BYTES = 40 + 4 * 100 + 20 * 200

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_TOPIC = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
CHECKPOINT_MARGIN_MS = 3000  # upstream trusts its checkpoint only that far
CHECKER_GROUP = "g_checker"

_MAGIC = 0xDAA320A7
_MAGIC_BLANK = 0xCBD43194
_PREPARED, _ROLLBACK = 4, 12
_FILLER = (0, 0x7FFFFFFF, 0)  # queue entry of a message that the log no longer has
_DELAYS_S = (1, 5, 10, 30, *(60 * n for n in range(1, 11)), 1200, 1800, 3600, 7200)

_USER = {"TAGS", "KEYS", "UNIQ_KEY", "colour"}

QueueKey = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Record:
    """One record of the log, as its bytes say."""

    data: bytes
    topic: str
    queue_id: int
    queue_offset: int
    log_offset: int
    sys_flag: int
    flag: int
    store_ms: int
    body: bytes
    properties: dict[str, str]

    @property
    def queue(self) -> QueueKey:
        return self.topic, self.queue_id

    @property
    def queued(self) -> bool:
        return self.sys_flag & 12 not in (_PREPARED, _ROLLBACK)

    @property
    def keys(self) -> list[str]:
        return [
            key
            for name in ("UNIQ_KEY", "KEYS")
            for key in self.properties.get(name, "").split(" ")
            if key
        ]

    @property
    def tags_code(self) -> int:
        if self.topic == SCHEDULE_TOPIC:
            return self.store_ms + 1000 * _DELAYS_S[int(self.properties["DELAY"]) - 1]
        return _java_hash(self.properties.get("TAGS", ""))


def parse_record(data: bytes) -> Record:
    """Reads a record that must fill `data`, checking all that can be checked."""
    size, magic, crc, queue_id, flag, queue_offset, log_offset, sys_flag = struct.unpack_from(
        ">IIIiiqqi", data
    )
    assert (size, magic) == (len(data), _MAGIC)
    at = 48 + (20 if sys_flag & 0x10 else 8)
    (store_ms,) = struct.unpack_from(">q", data, at)
    at += 8 + (20 if sys_flag & 0x20 else 8) + 12
    (length,) = struct.unpack_from(">i", data, at)
    body = data[at + 4 : at + 4 + length]
    at += 4 + length
    topic = data[at + 1 : at + 1 + data[at]].decode()
    at += 1 + data[at]
    (length,) = struct.unpack_from(">h", data, at)
    text = data[at + 2 :].decode()
    assert at + 2 + length == size
    assert zlib.crc32(body) & 0x7FFFFFFF == crc
    pairs = dict(pair.split("\1", 1) for pair in text.split("\2") if pair)
    return Record(
        data,
        topic,
        queue_id,
        queue_offset,
        log_offset,
        sys_flag,
        flag,
        store_ms,
        zlib.decompress(body) if sys_flag & 1 else body,
        pairs,
    )


def split_records(data: bytes) -> Iterator[Record]:
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        yield parse_record(data[at : at + size])
        at += size


def read_log(store: Path, file_bytes: int = LOG_FILE_BYTES, *, torn: bool = False) -> list[Record]:
    """Every record of the commit log, up to the first place that was never written.

    Where it may be `torn`, the last record may be half there: upstream copies it into a map.
    """
    records: list[Record] = []
    for file in sorted((store / "commitlog").iterdir()):
        data = file.read_bytes()
        assert len(data) == file_bytes, f"{file} has {len(data)} bytes"
        at = 0
        while at + 8 <= len(data):
            size, magic = struct.unpack_from(">II", data, at)
            if magic == _MAGIC_BLANK:
                assert size == len(data) - at
                break
            if size == 0:
                return records
            try:
                record = parse_record(data[at : at + size])
            except (AssertionError, UnicodeDecodeError):
                if torn and not any(data[at + size :]):
                    return records
                raise
            assert record.log_offset == int(file.name) + at
            records.append(record)
            at += size
    return records


def read_checkpoint(store: Path) -> tuple[int, int, int]:
    """Store times up to which log, queues and index are vouched for."""
    file = store / "checkpoint"
    log_ms, queue_ms, index_ms = struct.unpack_from(
        ">qqq", file.read_bytes() if file.exists() else bytes(24)
    )
    return log_ms, queue_ms, index_ms


def by_queue(records: Sequence[Record]) -> dict[QueueKey, list[Record]]:
    """Records per queue, whose offsets must be dense."""
    queues: dict[QueueKey, list[Record]] = defaultdict(list)
    for record in records:
        if record.queued:
            queue = queues[record.queue]
            assert not queue or record.queue_offset == queue[-1].queue_offset + 1, record
            queue.append(record)
    return dict(queues)


def check_files(store: Path, *, complete: bool) -> None:
    """Sizes of all files, and that queue files say what the log says.

    After a kill (`complete` is False) the newest entries may be missing, and nothing else.
    """
    for file in (store / "index").glob("*"):
        assert file.stat().st_size == INDEX_FILE_BYTES, file
    queues = by_queue(read_log(store, torn=not complete))
    found = {
        (folder.parent.name, int(folder.name)): folder
        for folder in (store / "consumequeue").glob("*/*")
        if any(folder.iterdir())
    }
    assert set(found) <= set(queues)
    if complete:
        assert set(found) == set(queues)
    for key, folder in found.items():
        entries: list[tuple[int, int, int]] = []
        for file in sorted(folder.iterdir()):
            data = file.read_bytes()
            assert len(data) == QUEUE_FILE_BYTES, f"{file} has {len(data)} bytes"
            assert int(file.name) % QUEUE_FILE_BYTES == 0
            if not entries:
                entries = [_FILLER] * (int(file.name) // 20)
            entries += [entry for entry in struct.iter_unpack(">qiq", data) if entry[1]]
        expected = [_FILLER] * queues[key][0].queue_offset
        expected += [(r.log_offset, len(r.data), r.tags_code) for r in queues[key]]
        assert entries == (expected if complete else expected[: len(entries)]), key


@dataclass(slots=True)
class Sent:
    """A message and what its sender was told."""

    topic: str
    queue_id: int
    body: bytes
    properties: dict[str, str]
    flag: int = 0
    sys_flag: int = 0
    queue_offset: int | None = None
    log_offset: int | None = None
    status: int = 0


@dataclass(slots=True)
class History:
    """What was sent to user topics, where it was acknowledged to be, what progress was kept."""

    acknowledged: list[Sent] = field(default_factory=list)
    unanswered: list[Sent] = field(default_factory=list)
    delivered: list[Sent] = field(default_factory=list)  # later, once, at an offset nobody was told
    committed: dict[tuple[str, str, int], int] = field(default_factory=dict)
    topics: dict[str, int] = field(default_factory=dict)
    groups: dict[str, dict[str, object]] = field(default_factory=dict)
    excused: set[int] = field(default_factory=set)  # log offsets whose keys Java gave up
    statuses: frozenset[int] = frozenset({0})  # answers that a sender takes for an acknowledgement
    log_file_bytes: int = LOG_FILE_BYTES
    _numbers: count[int] = field(default_factory=count)

    # --- acting ------------------------------------------------------------------------------
    def letter(self, topic: str, queue_id: int, *, label: str = "") -> Sent:
        """A message unlike any other, different in all that a store has to keep."""
        n = next(self._numbers)
        body = f"{label} {n} — déjà vu 消息 🚀".encode()
        sys_flag = 0
        if n % 11 == 3:
            body += bytes((n * i * i + i) % 251 for i in range(3000))
        if n % 10 == 5:
            body, sys_flag = body + b"pressed flat " * 400, 1 if n % 20 == 5 else 0x301
        properties = {"UNIQ_KEY": f"{n:032X}", "WAIT": "true"}
        tags = (None, "TagA", "标签", "Aa", "BB")[n % 5]
        keys = (None, f"key{n}", f"key{n} 键{n} shared{n // 20}")[n % 3]
        properties |= {"TAGS": tags} if tags else {}
        properties |= {"KEYS": keys} if keys else {}
        properties |= {"colour": f"blå-{n}-色"} if n % 2 else {}
        return Sent(topic, queue_id, body, properties, n % 7, sys_flag)

    def send(self, port: int, sent: Sent) -> Sent:
        """Sends one message; without an answer it is neither lost nor kept."""
        try:
            send(port, sent, self.statuses)
        except (OSError, ValueError):
            self.unanswered.append(sent)
            raise
        self.acknowledged.append(sent)
        return sent

    def send_batch(self, port: int, sents: Sequence[Sent]) -> None:
        items = []
        for sent in sents:
            sent.sys_flag = 0
            text = _text(sent.properties).encode()
            size = 22 + len(sent.body) + len(text)
            items.append(
                struct.pack(">iiiii", size, 0, 0, sent.flag, len(sent.body))
                + sent.body
                + struct.pack(">h", len(text))
                + text
            )
        whole = _text({"WAIT": "true"})
        fields = _send(port, 320, sents[0], whole, b"".join(items), self.statuses)
        ids = fields["msgId"].split(",")
        assert len(ids) == len(sents)
        for at, sent in enumerate(sents):
            sent.queue_offset = int(fields["queueOffset"]) + at
            sent.log_offset = int(ids[at][16:], 16)
            self.acknowledged.append(sent)

    def fill(self, port: int, label: str, messages: int = 120) -> None:
        """Topics and a group on first use, then messages of all kinds, then progress."""
        for topic, queues in (("Orders", 3), ("Notes", 2)):
            if topic not in self.topics:
                make_topic(port, topic, queues)
                self.topics[topic] = queues
        for n in range(messages):
            topic = "Orders" if n % 3 else "Notes"
            self.send(port, self.letter(topic, n % self.topics[topic], label=label))
        for topic in ("Orders", "Notes"):
            self.send_batch(port, [self.letter(topic, 1, label=f"{label} batch") for _ in range(7)])
        self.make_group(port, f"g_{label}", retries=len(label))
        for queue_id in range(3):
            self.commit(port, f"g_{label}", "Orders", queue_id, 5 + queue_id)
        self.commit(port, "g_always", "Notes", 0, messages // 10 + len(self.committed))

    def load(self, port: int, label: str, threads: int = 3) -> list[threading.Thread]:
        """Senders that go on until the broker is gone."""

        def run(queue_id: int) -> None:
            while True:
                try:
                    self.send(port, self.letter("Orders", queue_id, label=f"{label} load"))
                except (OSError, ValueError):
                    return

        running = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(threads)]
        for thread in running:
            thread.start()
        return running

    def make_group(self, port: int, group: str, *, retries: int) -> None:
        config: dict[str, object] = {
            "groupName": group,
            "consumeEnable": True,
            "consumeFromMinEnable": True,
            "consumeBroadcastEnable": False,
            "retryQueueNums": 1,
            "retryMaxTimes": retries,
            "brokerId": 0,
            "whichBrokerWhenConsumeSlowly": 1,
            "notifyConsumerIdsChangedEnable": True,
        }
        ask(port, 200, body=json.dumps(config).encode())
        self.groups[group] = config

    def commit(self, port: int, group: str, topic: str, queue_id: int, offset: int) -> None:
        ask(
            port,
            15,
            {
                "consumerGroup": group,
                "topic": topic,
                "queueId": str(queue_id),
                "commitOffset": str(offset),
            },
        )
        self.committed[group, topic, queue_id] = offset

    def expire(self, store: Path, files: int) -> None:
        """The oldest files of a stopped store go, and all that can be built again from the rest."""
        kept = sorted((store / "commitlog").iterdir())
        for file in kept[:files]:
            file.unlink()
        shutil.rmtree(store / "consumequeue")
        shutil.rmtree(store / "index")
        start = int(kept[files].name)
        self.acknowledged = [s for s in self.acknowledged if (s.log_offset or 0) >= start]

    # --- judging -----------------------------------------------------------------------------
    def check(self, port: int, store: Path) -> list[Record]:
        """History, log and answers agree; returns the log."""
        log = read_log(store, self.log_file_bytes)
        self.check_log(log)
        self._check_served(port, log)
        self.check_tables(port)
        return log

    def excuse_keys(self, store: Path) -> int:
        """Call between a kill and the start of upstream's broker; returns where it will begin.

        That broker deletes index files newer than its checkpoint but walks the log only from
        the newest file that is surely older, so keys in between are given up, whoever wrote them.
        """
        log_ms, queue_ms, index_ms = read_checkpoint(store)
        log = read_log(store)
        firsts = [r for n, r in enumerate(log) if not n or _file(r) != _file(log[n - 1])]
        old = [
            _file(r) for r in firsts if r.store_ms <= min(log_ms, queue_ms) - CHECKPOINT_MARGIN_MS
        ]
        resume = max(old, default=0) * LOG_FILE_BYTES
        for file in sorted((store / "index").glob("*")):
            _, end_ms, begin_offset, _ = struct.unpack_from(">qqqq", file.read_bytes())
            if end_ms > index_ms:
                self.excused |= {r.log_offset for r in log if begin_offset <= r.log_offset < resume}
        return resume

    def check_log(self, log: Sequence[Record]) -> None:
        """Acknowledged messages are where they were said to be, and nothing was invented."""
        by_place = {(*r.queue, r.queue_offset): r for r in log if r.queued}
        for sent in self.acknowledged:
            record = by_place.get((sent.topic, sent.queue_id, sent.queue_offset or 0))
            assert record is not None, f"lost: {sent}"
            assert record.log_offset == sent.log_offset
            _check_same(record, sent)
        ours = [r for r in log if r.topic in self.topics and r.queued]
        bodies = [r.body for r in ours]
        assert len(bodies) == len(set(bodies)), "a message is there twice"
        told = {sent.log_offset for sent in self.acknowledged}
        by_body = {sent.body: sent for sent in (*self.unanswered, *self.delivered)}
        for record in ours:
            if record.log_offset not in told:
                assert record.body in by_body, f"invented: {record}"
                _check_same(record, by_body[record.body])
        assert {sent.body for sent in self.delivered} <= set(bodies)

    def _check_served(self, port: int, log: Sequence[Record]) -> None:
        queues = by_queue(log)
        for (topic, queue_id), records in queues.items():
            where = {"topic": topic, "queueId": str(queue_id)}
            start, end = records[0].queue_offset, records[-1].queue_offset + 1
            wait_for_end(port, topic, queue_id, end)
            assert int(ask(port, 31, where)[0]["offset"]) == start
            # These have no topic configuration, so nobody can pull them.
            if topic not in (HALF_TOPIC, OP_TOPIC):
                assert pull(port, topic, queue_id, start, end) == records
            if topic in self.topics:
                tagged = [r for r in records if r.properties.get("TAGS") == "标签"]
                assert pull(port, topic, queue_id, start, end, "标签") == tagged
        keys: dict[tuple[str, str], set[int]] = defaultdict(set)
        for record in log:
            _, body = ask(port, 33, {"offset": str(record.log_offset)})
            assert body == record.data
            if record.sys_flag & 12 != _ROLLBACK and record.log_offset not in self.excused:
                for key in record.keys:
                    keys[record.topic, key].add(record.log_offset)
        for (topic, key), offsets in keys.items():
            assert offsets <= find(port, topic, key), f"key {key} of {topic}"

    def check_tables(self, port: int) -> None:
        """Topics, groups and progress are as they were made."""
        topics = json.loads(ask(port, 21)[1])["topicConfigTable"]
        for topic, queues in self.topics.items():
            config = topics[topic]
            assert (config["readQueueNums"], config["writeQueueNums"]) == (queues, queues)
            assert config["perm"] == 6
        groups = json.loads(ask(port, 201)[1])["subscriptionGroupTable"]
        for group, config in self.groups.items():
            assert {key: groups[group][key] for key in config} == config
        for (group, topic, queue_id), offset in self.committed.items():
            where = {"consumerGroup": group, "topic": topic, "queueId": str(queue_id)}
            assert int(ask(port, 14, where)[0]["offset"]) == offset, (group, topic, queue_id)


def ask(
    port: int, code: int, fields: dict[str, str] | None = None, body: bytes = b""
) -> tuple[dict[str, str], bytes]:
    """A request that must succeed; returns fields and body of the answer."""
    answer, found, remark, data = call(port, code, fields, body)
    if answer != 0:
        raise CallFailed(f"request {code} {fields} was answered {answer} {remark}")
    return found, data


def pull(
    port: int, topic: str, queue_id: int, start: int, end: int, tags: str = "*"
) -> list[Record]:
    """All messages of a queue from `start` to `end`."""
    records: list[Record] = []
    offset = start
    while offset < end:
        code, fields, remark, body = call(
            port,
            11,
            {
                "consumerGroup": CHECKER_GROUP,
                "topic": topic,
                "queueId": str(queue_id),
                "queueOffset": str(offset),
                "maxMsgNums": "32",
                "sysFlag": "4",  # the subscription is in this request
                "commitOffset": "0",
                "suspendTimeoutMillis": "0",
                "subscription": tags,
                "subVersion": "0",
                "expressionType": "TAG",
            },
        )
        # 20: nothing up to the next offset matches.
        if code not in (0, 20) or int(fields["nextBeginOffset"]) <= offset:
            raise CallFailed(f"pulling {topic}/{queue_id} from {offset}: {code} {remark} {fields}")
        records += split_records(body)
        offset = int(fields["nextBeginOffset"])
    return records


def find(port: int, topic: str, key: str) -> set[int]:
    """Log offsets of the messages that a broker finds by key."""
    window = {"beginTimestamp": "0", "endTimestamp": str(2**62)}
    code, _, remark, body = call(port, 12, {"topic": topic, "key": key, "maxNum": "64", **window})
    if code not in (0, 22):
        raise CallFailed(f"querying {key} of {topic} was answered {code} {remark}")
    # Hashes may collide, so the key is compared again, as clients do.
    return {r.log_offset for r in split_records(body) if r.topic == topic and key in r.keys}


def make_topic(port: int, topic: str, queues: int, perm: int = 6) -> None:
    ask(
        port,
        17,
        {
            "topic": topic,
            "defaultTopic": "TBW102",
            "readQueueNums": str(queues),
            "writeQueueNums": str(queues),
            "perm": str(perm),
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": "0",
            "order": "false",
        },
    )


def send(port: int, sent: Sent, statuses: frozenset[int] = frozenset({0})) -> None:
    """Sends one message and notes where it was put."""
    body = zlib.compress(sent.body) if sent.sys_flag & 1 else sent.body
    fields = _send(port, 310, sent, _text(sent.properties), body, statuses)
    sent.queue_offset = int(fields["queueOffset"])
    sent.log_offset = int(fields["msgId"][16:], 16)


def wait_for_end(port: int, topic: str, queue_id: int, end: int) -> None:
    """Upstream puts messages into queues a moment after it has acknowledged them."""
    where = {"topic": topic, "queueId": str(queue_id)}
    wait_until(
        lambda: int(ask(port, 30, where)[0]["offset"]) == end,
        f"the end of {topic}/{queue_id} is not {end}",
    )


def wait_until(done: Callable[[], bool], what: str, timeout_s: float = 15) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"after {timeout_s} s: {what}"
        time.sleep(0.05)


def _send(
    port: int, code: int, sent: Sent, text: str, body: bytes, statuses: frozenset[int]
) -> dict[str, str]:
    fields = {
        "a": "p_checker",
        "b": sent.topic,
        "c": "TBW102",
        "d": "4",
        "e": str(sent.queue_id),
        "f": str(sent.sys_flag),
        "g": str(int(time.time() * 1000)),
        "h": str(sent.flag),
        "i": text,
        "j": "0",
        "k": "false",
        "l": "16",
        "m": "true" if code == 320 else "false",
    }
    sent.status, found, remark, _ = call(port, code, fields, body)
    if sent.status not in statuses:
        raise CallFailed(f"send {code} {fields} was answered {sent.status} {remark}")
    return found


def _check_same(record: Record, sent: Sent) -> None:
    assert record.body == sent.body
    assert record.flag == sent.flag or record.properties.get("REAL_TOPIC")
    assert record.sys_flag & 0x701 == sent.sys_flag & 0x701
    assert _user(record.properties) == _user(sent.properties)


def _user(properties: dict[str, str]) -> dict[str, str]:
    """What nobody on the way may change."""
    return {name: value for name, value in properties.items() if name in _USER}


def _text(properties: dict[str, str]) -> str:
    return "\2".join(f"{key}\1{value}" for key, value in properties.items())


def _file(record: Record) -> int:
    return record.log_offset // LOG_FILE_BYTES


def _java_hash(text: str) -> int:
    value = 0
    for (unit,) in struct.iter_unpack(">H", text.encode("utf-16-be")):
        value = (31 * value + unit) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value
