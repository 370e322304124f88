"""The consumer groups this broker knows: the table, its file, and creation on first use.

`subscriptionGroup.json` is upstream's file. Rows are replaced, never changed in place. An
administrator's change is on disk before it is answered; a group that appears because somebody
consumes is saved in the background.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from cosmodrome.broker.members.table_file import Document, TableKind, VersionedTable
from cosmodrome.broker.role import MASTER, Role
from cosmodrome.env.base import Env
from cosmodrome.env.options import BrokerOptions
from cosmodrome.env.signal import Signal
from cosmodrome.errors import Code, Refused
from cosmodrome.transport.audit_log import changed as audited
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import (
    QUEUES_MAX,
    DataVersion,
    SubscriptionGroupConfig,
)
from cosmodrome.wire.commands.group import (
    DeleteSubscriptiongroup,
    GetAllSubscriptiongroupConfig,
    GetSubscriptiongroupConfig,
    UpdateAndCreateSubscriptiongroup,
)
from cosmodrome.wire.names import BUILT_IN_GROUPS, SYSTEM_GROUP_PREFIX, check_group
from cosmodrome.wire.table import Call, Reply

GROUPS_MAX = 100_000


def _check_followed(config: SubscriptionGroupConfig) -> None:
    if not 0 <= config.retry_queue_nums <= QUEUES_MAX:
        raise ValueError(f"retryQueueNums is {config.retry_queue_nums}, not 0 to {QUEUES_MAX}")


_KIND = TableKind(
    name="consumer group",
    row=SubscriptionGroupConfig,
    rows_max=GROUPS_MAX,
    member="subscriptionGroupTable",
    name_member="groupName",
    check_name=check_group,
    check_row=_check_followed,
)


@dataclasses.dataclass(frozen=True, slots=True)
class GroupDeleted:
    group: str
    remove_offsets: bool


class Groups:
    """`deleted` fires with a group that is there no more."""

    def __init__(self, options: BrokerOptions, path: str, env: Env, *, role: Role = MASTER) -> None:
        self._options = options
        self._role = role
        self._table = VersionedTable(path, env, _KIND)
        self.deleted: Signal[GroupDeleted] = Signal()

    async def start(self) -> None:
        await self._table.load()
        for name in BUILT_IN_GROUPS:
            if name not in self._table.rows:
                self._table.rows[name] = SubscriptionGroupConfig(group_name=name)

    async def stop(self) -> None:
        await self._table.stop()

    @property
    def table(self) -> Mapping[str, SubscriptionGroupConfig]:
        return self._table.rows

    @property
    def changes(self) -> Signal[Collection[str]]:
        """Fires with the names of groups that are new, different or gone."""
        return self._table.changes

    def documents(self, names: Collection[str] | None = None) -> Document:
        """Groups as a slave takes them over; see `VersionedTable.documents`."""
        return self._table.documents(names)

    def follow(self, documents: Mapping[str, Any], *, whole: bool) -> None:
        """Take over groups of the master; which offsets are left, it says itself."""
        for name in self._table.follow(documents, whole=whole).gone:
            self.deleted.fire(GroupDeleted(name, remove_offsets=False))

    @property
    def version(self) -> DataVersion:
        return self._table.version

    def find(self, group: str, call: Call | None = None) -> SubscriptionGroupConfig | None:
        """The group's configuration; an unknown group is created where the settings allow it.

        A name that no group may have is refused with what is wrong about it. `call` is the request
        that names the group, for the audit log.
        """
        known = self._table.rows.get(group)
        if known is not None:
            return known
        check_group(group)
        if not (
            self._options.auto_create_subscription_group or group.startswith(SYSTEM_GROUP_PREFIX)
        ):
            return None
        config = SubscriptionGroupConfig(group_name=group)
        self.put(config)
        audited(call, "group_created", group=group, by="consumer", after=config)
        return config

    def existing(self, group: str, call: Call | None = None) -> SubscriptionGroupConfig:
        """What `find` finds; Refused when it finds nothing."""
        config = self.find(group, call)
        if config is None:
            raise Refused(
                Code.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"Consumer group {group} does not exist on this broker; create it first, for"
                " example with `mqadmin updateSubGroup`.",
            )
        return config

    def put(self, config: SubscriptionGroupConfig) -> None:
        """Add or replace; saved in the background."""
        self._table.put(config.group_name, config)

    def delete(self, group: str, *, remove_offsets: bool = False) -> bool:
        known = self._table.remove(group)
        # Offsets may outlive the row of a group, so they can be removed even without it.
        self.deleted.fire(GroupDeleted(group, remove_offsets))
        return known

    # --- requests ---------------------------------------------------------------------------

    @UpdateAndCreateSubscriptiongroup.handler
    async def update_and_create(self, ask: UpdateAndCreateSubscriptiongroup, call: Call) -> Reply:
        self._role.check_takes_changes("create or change groups")
        config = bodies.decode(SubscriptionGroupConfig, ask.body)
        check_group(config.group_name)
        if not 0 <= config.retry_queue_nums <= QUEUES_MAX:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"retryQueueNums is {config.retry_queue_nums}; use 0 (no retries) to {QUEUES_MAX}.",
            )
        if config.retry_max_times < -1:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"retryMaxTimes is {config.retry_max_times}; use 0 or more,"
                " or -1 to leave the limit to the client.",
            )
        before = self._table.rows.get(config.group_name)
        self.put(config)
        audited(call, "group_updated", group=config.group_name, before=before, after=config)
        await self._table.saved(config.group_name)
        return Reply()

    @DeleteSubscriptiongroup.handler
    async def delete_group(self, ask: DeleteSubscriptiongroup, call: Call) -> Reply:
        self._role.check_takes_changes("delete groups")
        check_group(ask.group_name)
        before = self._table.rows.get(ask.group_name)
        remove_offsets = bool(ask.remove_offset or ask.clean_offset)
        known = self.delete(ask.group_name, remove_offsets=remove_offsets)
        # Compat: deleting what is not there is a success.
        if known or remove_offsets:
            what = {"group": ask.group_name, "offsets_removed": remove_offsets}
            audited(call, "group_deleted", before=before, **what)
        if known:
            await self._table.saved(ask.group_name)
        return Reply()

    @GetAllSubscriptiongroupConfig.handler
    async def get_all(self, ask: GetAllSubscriptiongroupConfig, call: Call) -> Reply:
        return Reply(body=await self._table.reply_body())

    @GetSubscriptiongroupConfig.handler
    def get_one(self, ask: GetSubscriptiongroupConfig, call: Call) -> Reply:
        check_group(ask.group)
        config = self._table.rows.get(ask.group)
        if config is None:
            raise Refused(
                Code.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"Consumer group {ask.group} does not exist on this broker.",
            )
        return Reply(body=bodies.encode(config))
