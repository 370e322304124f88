"""Accounts as administrators change them by request; no answer ever has a secret."""

from __future__ import annotations

from typing import Any

import msgspec

from cosmodrome.access.account_files import text_of_right
from cosmodrome.access.account_table import Accounts
from cosmodrome.access.accounts import Account
from cosmodrome.access.addresses import Addresses
from cosmodrome.broker.foundation import Foundation
from cosmodrome.broker.operate.query import ANSWER_BYTES_MAX
from cosmodrome.broker.operate.sliced import encode_list, written
from cosmodrome.errors import Code, ConfigError, Refused
from cosmodrome.transport.audit_log import changed as audited
from cosmodrome.wire import bodies
from cosmodrome.wire.commands.acl import (
    AclInfoReply,
    DeleteAclConfig,
    GetBrokerClusterAclInfo,
    ListAccounts,
    UpdateAndCreateAclConfig,
    UpdateGlobalWhiteAddrsConfig,
)
from cosmodrome.wire.report_bodies import AccountInfo, AccountList
from cosmodrome.wire.table import Call, Reply


class AccountChanges:
    def __init__(self, base: Foundation) -> None:
        self._gate = base.gate
        self._options = base.options
        self._address = base.address

    @UpdateAndCreateAclConfig.handler
    async def update_account(self, ask: UpdateAndCreateAclConfig, call: Call) -> Reply:
        failed = Code.UPDATE_AND_CREATE_ACL_CONFIG_FAILED
        accounts = self._accounts(failed)
        changes = _changes(ask)
        before = accounts.get(ask.access_key) is not None
        try:
            await accounts.put(ask.access_key, changes)
        except ConfigError as error:
            raise Refused(failed, f"The account was not changed: {error}") from None
        shown = {key: "***" if key == "secretKey" else value for key, value in changes.items()}
        action = "account_changed" if before else "account_created"
        audited(call, action, account=ask.access_key, after=shown)
        return Reply()

    @DeleteAclConfig.handler
    async def delete_account(self, ask: DeleteAclConfig, call: Call) -> Reply:
        failed = Code.DELETE_ACL_CONFIG_FAILED
        try:
            await self._accounts(failed).remove(ask.access_key)
        except ConfigError as error:
            raise Refused(failed, f"Nothing was deleted: {error}") from None
        audited(call, "account_deleted", account=ask.access_key)
        return Reply()

    @UpdateGlobalWhiteAddrsConfig.handler
    async def update_white_addresses(self, ask: UpdateGlobalWhiteAddrsConfig, call: Call) -> Reply:
        failed = Code.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG_FAILED
        accounts = self._accounts(failed)
        before = list(accounts.white.texts)
        try:
            addresses = list(Addresses([ask.global_white_addrs]).texts)
            await accounts.set_white(addresses, ask.acl_file_full_path or "")
        except ConfigError as error:
            raise Refused(failed, f"The addresses were not changed: {error}") from None
        after = list(accounts.white.texts)
        audited(call, "white_addresses_changed", before=before, after=after)
        return Reply()

    @GetBrokerClusterAclInfo.handler
    def versions(self, ask: GetBrokerClusterAclInfo, call: Call) -> AclInfoReply:
        accounts = self._accounts(Code.SYSTEM_ERROR)
        versions = {
            file.path: {"counter": file.counter, "timestamp": file.changed_ms}
            for file in accounts.files
        }
        main = versions.get(accounts.path) or {"counter": 0, "timestamp": 0}
        return AclInfoReply(
            version=msgspec.json.encode(main).decode(),
            all_acl_file_version=msgspec.json.encode(versions).decode(),
            broker_name=self._options.broker_name,
            broker_addr=self._address.text,
            cluster_name=self._options.broker_cluster_name,
        )

    @ListAccounts.handler
    async def list_accounts(self, ask: ListAccounts, call: Call) -> Reply:
        accounts = self._accounts(Code.SYSTEM_ERROR)
        known = sorted(accounts.all.values(), key=lambda account: account.access_key)
        empty = AccountList(global_white_remote_addresses=list(accounts.white.texts))
        head, brackets, tail = bodies.encode(empty).partition(b"[]")
        listed = await written(map(_info, known), encode_list, ANSWER_BYTES_MAX)
        return Reply(body=b"".join((head, brackets[:1], listed, brackets[1:], tail)))

    def _accounts(self, code: int) -> Accounts:
        if not self._gate.enabled:
            raise Refused(
                code,
                "This broker has no access control, so it has no accounts; set aclEnable=true and"
                " restart it (docs/security.md).",
            )
        return self._gate.accounts


def _changes(ask: UpdateAndCreateAclConfig) -> dict[str, Any]:
    """What is to be different, as the account file has it."""
    values: dict[str, Any] = {
        "secretKey": ask.secret_key,
        "whiteRemoteAddress": ask.white_remote_address,
        "admin": ask.admin,
        "peer": ask.peer,
        "defaultTopicPerm": ask.default_topic_perm,
        "defaultGroupPerm": ask.default_group_perm,
        "topicPerms": None if ask.topic_perms is None else _items(ask.topic_perms),
        "groupPerms": None if ask.group_perms is None else _items(ask.group_perms),
    }
    return {key: value for key, value in values.items() if value is not None}


def _info(account: Account) -> AccountInfo:
    return AccountInfo(
        access_key=account.access_key,
        white_remote_address=",".join(account.white.texts),
        admin=account.admin,
        peer=account.peer,
        default_topic_perm=text_of_right(account.default_topic),
        default_group_perm=text_of_right(account.default_group),
        topic_perms=[f"{name}={text_of_right(right)}" for name, right in account.topics.items()],
        group_perms=[f"{name}={text_of_right(right)}" for name, right in account.groups.items()],
    )


def _items(text: str) -> list[str]:
    return [item for part in text.split(",") if (item := part.strip())]
