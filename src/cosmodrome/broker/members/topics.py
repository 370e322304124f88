"""The topics of this broker: the table, its file, and who may create what.

`topics.json` is upstream's file. A `TopicConfig` in the table is never changed in place, only
replaced, so snapshots need no copying. Every change moves the data version (counter + 1,
timestamp = now), which is how name servers and slaves see that something is new.

Changes made by an administrator are on disk before they are answered. Topics that a send creates
are saved in the background, because the log, not this file, holds the data.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from cosmodrome.broker.members.creation_limit import CreationLimit
from cosmodrome.broker.members.table_file import Document, TableKind, VersionedTable
from cosmodrome.broker.role import MASTER, Role
from cosmodrome.env.base import Env
from cosmodrome.env.options import BrokerOptions
from cosmodrome.env.signal import Signal
from cosmodrome.errors import Code, Refused
from cosmodrome.transport.audit_log import changed as audited
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import (
    PERM_INHERIT,
    PERM_READ,
    PERM_WRITE,
    QUEUES_MAX,
    TOPICS_MAX,
    DataVersion,
    TopicConfig,
    TopicConfigSerializeWrapper,
    TopicList,
)
from cosmodrome.wire.commands.topic import (
    DeleteTopicInBroker,
    GetAllTopicConfig,
    GetSystemTopicListFromBroker,
    GetTopicConfig,
    UpdateAndCreateTopic,
)
from cosmodrome.wire.names import (
    AUTO_CREATE_TOPIC,
    BENCHMARK_TOPIC,
    OFFSET_MOVED_TOPIC,
    REPLY_TOPIC_SUFFIX,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    SELF_TEST_TOPIC,
    SYSTEM_TOPICS,
    check_topic,
    is_system_topic,
)
from cosmodrome.wire.table import Call, Reply

log = logging.getLogger(__name__)

PERM_READ_WRITE = PERM_READ | PERM_WRITE
PERM_MAX = PERM_READ | PERM_WRITE | PERM_INHERIT
PERM_KNOWN = 15  # upstream has one bit more, which nothing uses

FILTER_TYPES = ("SINGLE_TAG", "MULTI_TAG")


async def _nothing() -> None:
    return None


class Topics:
    """`changed` fires with the configurations that are new or different, and with none when a topic
    was removed. `gone` fires with the name of a topic that is there no more; `deleted` before it,
    where it was deleted here, so that its queues and offsets have to go too."""

    def __init__(self, options: BrokerOptions, path: str, env: Env, *, role: Role = MASTER) -> None:
        self._options = options
        self._role = role
        self._table = VersionedTable(path, env, _KIND)
        self._creations = CreationLimit(
            env.clock.now_ms,
            lambda: options.auto_create_topics_per_minute_by_address,
            lambda: options.auto_create_topics_per_minute,
        )
        self._system = {
            options.broker_cluster_name,
            options.broker_name,
            options.broker_cluster_name + REPLY_TOPIC_SUFFIX,
            *SYSTEM_TOPICS,
        }
        if options.trace_topic_enable:
            self._system.add(options.msg_trace_topic_name)
        self.changed: Signal[Sequence[TopicConfig]] = Signal()
        self.deleted: Signal[str] = Signal()
        self.gone: Signal[str] = Signal()
        # Awaited before an administrator's change is answered, so that a route lookup that
        # follows the answer already finds the topic.
        self.announced: Callable[[], Awaitable[None]] = _nothing

    async def start(self) -> None:
        loaded = await self._table.load()
        added = self._add_built_in()
        if added and loaded:
            self._table.changed(added)

    async def stop(self) -> None:
        await self._table.stop()

    def follow_settings(self) -> None:
        """Settings that decide about registrations or the broker's own topics have changed."""
        if self._role.takes_sends:  # a slave has the topics of its master, and their version
            # A new version also when the table is as it was: name servers look at nothing else.
            self._table.changed(self._add_built_in())
        self.changed.fire(())

    @property
    def table(self) -> Mapping[str, TopicConfig]:
        return self._table.rows

    @property
    def changes(self) -> Signal[Collection[str]]:
        """Fires with the names of topics that are new, different or gone."""
        return self._table.changes

    def documents(self, names: Collection[str] | None = None) -> Document:
        """Topics as a slave takes them over; see `VersionedTable.documents`."""
        return self._table.documents(names)

    def follow(self, documents: Mapping[str, Any], *, whole: bool) -> None:
        """Take over topics of the master.

        Queues and offsets of a topic that is gone are not touched: the master says itself up to
        where of the log a topic was deleted, and which offsets it still has.
        """
        new = self._table.follow(documents, whole=whole)
        for name in new.gone:
            self.gone.fire(name)
        if new.rows:
            self.changed.fire(new.rows)
        if new.gone or (new.version and not new.rows):
            self.changed.fire(())

    @property
    def version(self) -> DataVersion:
        return self._table.version

    def get(self, name: str) -> TopicConfig | None:
        return self._table.rows.get(name)

    def is_system(self, name: str) -> bool:
        return name in self._system or is_system_topic(name)

    def create_on_send(
        self,
        topic: str,
        default_topic: str,
        queue_nums: int,
        sys_flag: int,
        call: Call | None = None,
    ) -> TopicConfig:
        """The topic of a message that names an unknown one, made from a template topic. `call` is
        the request that brings the message: who sends it is limited and audited."""
        known = self._table.rows.get(topic)
        if known is not None:
            return known
        check_topic(topic)
        template, why = self._template(default_topic)
        if template is None or queue_nums < 1:
            if topic.startswith(RETRY_PREFIX):
                return self.ensure(topic, 1, PERM_READ_WRITE, call=call)
            why = why or f"the client asked for {queue_nums} queues"
            raise Refused(
                Code.TOPIC_NOT_EXIST,
                f"Topic {topic} does not exist and is not created on the fly: {why}."
                " Create it first, for example with `mqadmin updateTopic`.",
            )
        self._creations.take(topic, _address_of(call))
        config = TopicConfig(
            topic_name=topic,
            read_queue_nums=min(queue_nums, template.write_queue_nums),
            write_queue_nums=min(queue_nums, template.write_queue_nums),
            perm=template.perm & ~PERM_INHERIT,
            topic_filter_type=template.topic_filter_type,
            topic_sys_flag=sys_flag,
        )
        self.put(config)
        audited(call, "topic_created", topic=topic, by="send", after=config)
        return config

    def ensure(
        self, topic: str, queues: int, perm: int, sys_flag: int = 0, *, call: Call | None = None
    ) -> TopicConfig:
        """The topic as it is, or a new one that the broker needs, for itself or to serve `call`."""
        known = self._table.rows.get(topic)
        if known is not None:
            return known
        check_topic(topic)
        config = TopicConfig(
            topic_name=topic,
            read_queue_nums=queues,
            write_queue_nums=queues,
            perm=perm,
            topic_sys_flag=sys_flag,
        )
        self.put(config)
        audited(call, "topic_created", topic=topic, by="broker", after=config)
        return config

    def put(self, config: TopicConfig) -> None:
        """Add or replace; saved in the background."""
        self._table.put(config.topic_name, config)
        self.changed.fire((config,))

    def delete(self, name: str) -> bool:
        """Remove the topic; its queues and offsets follow through `deleted`."""
        if not self._table.remove(name):
            return False
        self.deleted.fire(name)
        self.gone.fire(name)
        self.changed.fire(())
        return True

    def mark_ordered(self, names: Collection[str]) -> None:
        """Exactly these topics are order topics, as the name servers' table says."""
        if not self._role.takes_sends:
            return  # its master hears the same
        # Compat: upstream resets the flag of every topic that the table does not name.
        fresh = [
            msgspec.structs.replace(config, order=name in names)
            for name, config in self._table.rows.items()
            if config.order != (name in names)
        ]
        if fresh:
            self._table.rows.update((config.topic_name, config) for config in fresh)
            self._table.changed([config.topic_name for config in fresh])

    # --- requests ---------------------------------------------------------------------------

    @UpdateAndCreateTopic.handler
    async def update_and_create(self, ask: UpdateAndCreateTopic, call: Call) -> Reply:
        self._role.check_takes_changes("create or change topics")
        self._check_free(ask.topic)
        for name, count in (
            ("readQueueNums", ask.read_queue_nums),
            ("writeQueueNums", ask.write_queue_nums),
        ):
            if not 1 <= count <= QUEUES_MAX:
                raise Refused(
                    Code.SYSTEM_ERROR,
                    f"{name} is {count}; give the topic between 1 and {QUEUES_MAX} queues.",
                )
        if not 0 <= ask.perm <= PERM_MAX:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"perm is {ask.perm}; use 6 (read and write), 4 (read), 2 (write) or 0.",
            )
        filter_type = ask.topic_filter_type or FILTER_TYPES[0]
        if filter_type not in FILTER_TYPES:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"topicFilterType is {filter_type[:64]!r}; use {' or '.join(FILTER_TYPES)}.",
            )
        before = self._table.rows.get(ask.topic)
        config = TopicConfig(
            topic_name=ask.topic,
            read_queue_nums=ask.read_queue_nums,
            write_queue_nums=ask.write_queue_nums,
            perm=ask.perm,
            topic_filter_type=filter_type,
            topic_sys_flag=ask.topic_sys_flag or 0,
            order=ask.order,
        )
        self.put(config)
        audited(call, "topic_updated", topic=ask.topic, before=before, after=config)
        await self._table.saved(ask.topic)
        await self.announced()
        return Reply()

    @DeleteTopicInBroker.handler
    async def delete_in_broker(self, ask: DeleteTopicInBroker, call: Call) -> Reply:
        self._role.check_takes_changes("delete topics")
        self._check_free(ask.topic)
        before = self._table.rows.get(ask.topic)
        # Compat: deleting what is not there is a success.
        if self.delete(ask.topic):
            audited(call, "topic_deleted", topic=ask.topic, before=before)
            await self._table.saved(ask.topic)
            await self.announced()
        return Reply()

    @GetAllTopicConfig.handler
    async def get_all(self, ask: GetAllTopicConfig, call: Call) -> Reply:
        return Reply(body=await self._table.reply_body())

    @GetTopicConfig.handler
    def get_one(self, ask: GetTopicConfig, call: Call) -> Reply:
        check_topic(ask.topic)
        config = self._table.rows.get(ask.topic)
        if config is None:
            raise Refused(Code.TOPIC_NOT_EXIST, f"Topic {ask.topic} does not exist on this broker.")
        return Reply(body=bodies.encode(config))

    @GetSystemTopicListFromBroker.handler
    def get_system(self, ask: GetSystemTopicListFromBroker, call: Call) -> Reply:
        return Reply(body=bodies.encode(TopicList(topic_list=sorted(self._system))))

    def wrapper(self, names: Collection[str] | None = None) -> TopicConfigSerializeWrapper:
        """The table, or these topics of it, with the version of the whole."""
        table = (
            dict(self._table.rows)
            if names is None
            else {name: self._table.rows[name] for name in names if name in self._table.rows}
        )
        return TopicConfigSerializeWrapper(data_version=self.version, topic_config_table=table)

    # --- inside -----------------------------------------------------------------------------

    def _check_free(self, topic: str) -> None:
        check_topic(topic)
        if self.is_system(topic):
            raise Refused(
                Code.SYSTEM_ERROR,
                f"Topic {topic} is a system topic that only the broker itself manages;"
                " choose another name.",
            )

    def _template(self, default_topic: str) -> tuple[TopicConfig | None, str]:
        if default_topic == AUTO_CREATE_TOPIC and not self._options.auto_create_topic_enable:
            return None, "autoCreateTopicEnable is off"
        template = self._table.rows.get(default_topic)
        if template is None:
            return None, f"its template topic {default_topic[:64]!r} does not exist"
        if not template.perm & PERM_INHERIT:
            return None, f"topic {default_topic} may not be used as a template"
        return template, ""

    def _add_built_in(self) -> list[str]:
        """Bring the broker's own topics in line with the settings; the names of those that this
        changed."""
        changed = []
        for config in self._built_in():
            known = self._table.rows.get(config.topic_name)
            if known is None or msgspec.structs.replace(config, order=known.order) != known:
                self._table.rows[config.topic_name] = config
                changed.append(config.topic_name)
        # A template that may not be used must not be found by clients either.
        unused = AUTO_CREATE_TOPIC if not self._options.auto_create_topic_enable else None
        if unused and self._table.rows.pop(unused, None) is not None:
            changed.append(unused)
        return changed

    def _built_in(self) -> list[TopicConfig]:
        options = self._options

        def built_in(name: str, queues: int, perm: int = PERM_READ_WRITE) -> TopicConfig:
            return TopicConfig(
                topic_name=name, read_queue_nums=queues, write_queue_nums=queues, perm=perm
            )

        def shared(*, enabled: bool) -> int:
            return PERM_MAX if enabled else PERM_INHERIT

        configs = [
            built_in(SELF_TEST_TOPIC, 1),
            built_in(BENCHMARK_TOPIC, 1024),
            built_in(options.broker_cluster_name, 16, shared(enabled=options.cluster_topic_enable)),
            built_in(options.broker_name, 1, shared(enabled=options.broker_topic_enable)),
            built_in(OFFSET_MOVED_TOPIC, 1),
            built_in(SCHEDULE_TOPIC, 18),
            built_in(options.broker_cluster_name + REPLY_TOPIC_SUFFIX, 1),
        ]
        if options.auto_create_topic_enable:
            configs.append(built_in(AUTO_CREATE_TOPIC, options.default_topic_queue_nums, PERM_MAX))
        if options.trace_topic_enable:
            configs.append(built_in(options.msg_trace_topic_name, 1))
        return configs


def existing_topic(topics: Topics, name: str) -> TopicConfig:
    """The topic that a request is about; Refused when there is none."""
    check_topic(name)
    config = topics.get(name)
    if config is None:
        raise Refused(
            Code.TOPIC_NOT_EXIST, f"Topic {name} does not exist on this broker; check the name."
        )
    return config


def _address_of(call: Call | None) -> str:
    return "this broker" if call is None else call.connection.peer[0]


def _check_loaded(name: str) -> None:
    # Compat: upstream makes topics of cluster and broker names, which may hold dots.
    check_topic(name.replace(".", "_") if name.strip(".") else name)


def _check_followed(config: TopicConfig) -> None:
    queues = (config.read_queue_nums, config.write_queue_nums)
    if not all(0 <= count <= QUEUES_MAX for count in queues):
        raise ValueError(f"readQueueNums and writeQueueNums are {queues}, not 0 to {QUEUES_MAX}")
    if not 0 <= config.perm <= PERM_KNOWN:
        raise ValueError(f"perm is {config.perm}, not 0 to {PERM_KNOWN}")


_KIND = TableKind(
    name="topic",
    row=TopicConfig,
    rows_max=TOPICS_MAX,
    member="topicConfigTable",
    name_member="topicName",
    check_name=_check_loaded,
    check_row=_check_followed,
)
