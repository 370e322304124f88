"""The consumer groups this broker knows: the table, its file, and creation on first use.

`subscriptionGroup.json` is upstream's file. Rows are replaced, never changed in place. An
administrator's change is on disk before it is answered; a group that appears because somebody
consumes is saved in the background.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from cosmodrome.broker.tables import VersionedTable
from cosmodrome.env.base import Env
from cosmodrome.env.options import BrokerOptions
from cosmodrome.env.signal import Signal
from cosmodrome.errors import Code, Refused
from cosmodrome.transport.audit_log import changed as audited
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import (
    DataVersion,
    SubscriptionGroupConfig,
    SubscriptionGroupWrapper,
)
from cosmodrome.wire.commands.group import (
    DeleteSubscriptiongroup,
    GetAllSubscriptiongroupConfig,
    GetSubscriptiongroupConfig,
    UpdateAndCreateSubscriptiongroup,
)
from cosmodrome.wire.names import SYSTEM_GROUP_PREFIX, check_group
from cosmodrome.wire.table import Call, Reply

GROUPS_MAX = 100_000
RETRY_QUEUES_MAX = 65_535

BUILT_IN_GROUPS = (
    "TOOLS_CONSUMER",
    "FILTERSRV_CONSUMER",
    "SELF_TEST_C_GROUP",
    "CID_ONS-HTTP-PROXY",
    "CID_ONSAPI_PULL",
    "CID_ONSAPI_PERMISSION",
    "CID_ONSAPI_OWNER",
)


@dataclasses.dataclass(frozen=True, slots=True)
class GroupDeleted:
    group: str
    remove_offsets: bool


class Groups:
    """`deleted` fires with a group that an administrator removed."""

    def __init__(
        self, options: BrokerOptions, path: str, env: Env, *, writable: bool = True
    ) -> None:
        self._options = options
        self._writable = writable
        self._table = VersionedTable(
            path,
            env,
            row=SubscriptionGroupConfig,
            member="subscriptionGroupTable",
            name_member="groupName",
            check_name=check_group,
            kind="consumer group",
        )
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
    def version(self) -> DataVersion:
        return self._table.version

    def find(self, group: str) -> SubscriptionGroupConfig | None:
        """The group's configuration; an unknown group is created where the settings allow it.

        A name that no group may have is refused with what is wrong about it.
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
        audited(None, "group_created", group=group, by="consumer", after=config)
        return config

    def put(self, config: SubscriptionGroupConfig) -> None:
        """Add or replace; saved in the background."""
        name = config.group_name
        if name not in self._table.rows and len(self._table.rows) >= GROUPS_MAX:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"This broker already has {GROUPS_MAX} consumer groups; delete unused ones first.",
            )
        self._table.rows[name] = config
        self._table.changed()

    def delete(self, group: str, *, remove_offsets: bool = False) -> bool:
        known = self._table.remove(group)
        # Offsets may outlive the row of a group, so they can be removed even without it.
        self.deleted.fire(GroupDeleted(group, remove_offsets))
        return known

    # --- requests ---------------------------------------------------------------------------

    @UpdateAndCreateSubscriptiongroup.handler
    async def update_and_create(self, ask: UpdateAndCreateSubscriptiongroup, call: Call) -> Reply:
        self._refuse_on_slave("create or change groups")
        config = bodies.decode(SubscriptionGroupConfig, ask.body)
        check_group(config.group_name)
        if not 0 <= config.retry_queue_nums <= RETRY_QUEUES_MAX:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"retryQueueNums is {config.retry_queue_nums}; use 0 (no retries) to"
                f" {RETRY_QUEUES_MAX}.",
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
        self._refuse_on_slave("delete groups")
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
    def get_all(self, ask: GetAllSubscriptiongroupConfig, call: Call) -> Reply:
        return Reply(
            body=bodies.encode(
                SubscriptionGroupWrapper(
                    data_version=self.version, subscription_group_table=dict(self._table.rows)
                )
            )
        )

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

    # --- inside -----------------------------------------------------------------------------

    def _refuse_on_slave(self, what: str) -> None:
        if not self._writable:
            raise Refused(
                Code.SYSTEM_ERROR, f"This broker is a slave and cannot {what}; ask its master."
            )
