"""The settings this broker runs with: shown to anyone, changed by those who may.

Changes go to the file of overrides below the store; the next start reads that file after the
settings file. `changed` tells the few services that must do something about it.

A slave takes over from its master what clients would notice when it became the master. Everything
else depends on the machine (disk, memory, network) or is an operator's hold on one broker, such as
`brokerPermission`. What decides how long messages are kept is not taken over either: a setting of
another machine must not remove files of this one. Nor may a request from another machine change
what can remove messages or stop every client, unless the settings file allows it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import os.path
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from cosmodrome.broker.members.table_file import RefusedRows
from cosmodrome.env.base import Env
from cosmodrome.env.config import OVERRIDES_NAME
from cosmodrome.env.options import BrokerOptions, Options
from cosmodrome.env.reload import dangerous_keys
from cosmodrome.env.signal import Signal
from cosmodrome.errors import Code, ConfigError, Refused
from cosmodrome.transport.audit_log import changed as audited
from cosmodrome.transport.live_settings import Changed, LiveSettings
from cosmodrome.wire import bodies, properties_text
from cosmodrome.wire.bodies import DataVersion
from cosmodrome.wire.commands.broker import (
    GetBrokerConfig,
    GetBrokerConfigReply,
    UpdateBrokerConfig,
)
from cosmodrome.wire.table import Call, Reply

log = logging.getLogger(__name__)

# Compat: keys without effect here that upstream's tools take for granted: exportConfigs fails where
# one is missing, and exportMetrics takes the last for the number of processors.
ALWAYS_SHOWN = {
    "filterServerNums": "0",
    "useTLS": "false",
    "clientCallbackExecutorThreads": str(os.cpu_count() or 1),
}

MUST_AGREE = frozenset(
    (
        "autoCreateSubscriptionGroup",
        "autoCreateTopicEnable",
        "filterSupportRetry",
        "rejectTransactionMessage",
        "storeReplyMessageEnable",
        "transactionCheckInterval",
        "transactionCheckMax",
        "transactionTimeOut",
    )
)

OPENS_AHEAD_MS_MAX = 7 * 24 * 3600 * 1000  # further ahead is a slip of the keyboard

NOTE = "# Settings changed while the broker ran; they win over the settings file.\n"


class Settings:
    """`checks` look at texts that have a form of their own."""

    def __init__(
        self,
        groups: Sequence[Options],
        env: Env,
        config_dir: str,
        checks: Mapping[str, Callable[[str], object]] | None = None,
    ) -> None:
        self.changed: Signal[frozenset[str]] = Signal()
        self._clock = env.clock
        path = os.path.join(config_dir, OVERRIDES_NAME)
        checks = {"startAcceptSendRequestTimeStamp": self._check_opening, **(checks or {})}
        self._live = LiveSettings("broker", groups, env, path, _edit, checks, ALWAYS_SHOWN)
        self._dangerous = frozenset().union(*(dangerous_keys(type(group)) for group in groups))
        self._all_from_anywhere = any(
            group.dangerous_settings_live for group in groups if isinstance(group, BrokerOptions)
        )
        self._version = DataVersion(counter=0, timestamp=env.clock.now_ms())
        self._followed: dict[str, str] = {}  # of the master, not taken over yet
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        """What the master said is taken over before the end."""
        if self._following is not None:
            await self._following

    def rows(self) -> dict[str, str]:
        """The settings that a slave takes over."""
        return self._live.texts(MUST_AGREE)

    def follow(self, rows: Mapping[str, Any]) -> None:
        """Take over settings of the master soon; like every change they go to disk first."""
        refused = RefusedRows("brokerOverrides")
        for key, text in rows.items():
            if key in MUST_AGREE and isinstance(text, str):
                self._followed[key] = text
            else:
                refused.add(key, "it is no setting that a slave takes over")
        refused.close()
        if self._followed and self._following is None:
            self._following = asyncio.create_task(self._follow(), name="follow settings")

    @GetBrokerConfig.handler
    def get_broker_config(self, ask: GetBrokerConfig, call: Call) -> GetBrokerConfigReply:
        return GetBrokerConfigReply(
            version=bodies.encode(self._version).decode(), body=self._live.text()
        )

    @UpdateBrokerConfig.handler
    async def update_broker_config(self, ask: UpdateBrokerConfig, call: Call) -> Reply:
        asked = properties_text.loads(ask.body)
        self._check_origin(asked, call)
        self._note(await self._live.update(asked), call)
        return Reply()

    def _check_origin(self, keys: Collection[str], call: Call) -> None:
        """Where a request that asks for these changes may come from."""
        dangerous = sorted(self._dangerous.intersection(keys))
        if not dangerous or self._all_from_anywhere or is_local(call.connection.peer[0]):
            return
        raise Refused(
            Code.NO_PERMISSION,
            f"{', '.join(dangerous)} can remove messages or stop every client, so a request from"
            " another machine does not change it. Ask from the broker's own machine, or set"
            " dangerousSettingsLive=true in its settings file and restart. Nothing was changed.",
        )

    def _check_opening(self, text: str) -> None:
        latest = self._clock.now_ms() + OPENS_AHEAD_MS_MAX
        if int(text) > latest:
            raise ConfigError(
                f"startAcceptSendRequestTimeStamp={text[:32]} would refuse all sends for more than"
                f" 7 days; use at most {latest}, in ms since 1970"
            )

    async def _follow(self) -> None:
        try:
            while self._followed:
                key, text = self._followed.popitem()
                try:
                    self._note(await self._live.update({key: text}), None)
                except Refused as error:
                    log.warning("setting_not_followed key=%s error=%s", key, error)
        finally:
            self._following = None

    def _note(self, changes: Sequence[Changed], call: Call | None) -> None:
        if not changes:
            return
        self._version = DataVersion(
            counter=self._version.counter + 1, timestamp=self._clock.now_ms()
        )
        by = {} if call is not None else {"by": "master"}
        for key, before, after in changes:
            audited(call, "setting_changed", key=key, before=before, after=after, **by)
        self.changed.fire(frozenset(change.key for change in changes))


def is_local(host: str) -> bool:
    """Whether a peer's address is one of this machine alone."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback or (mapped is not None and mapped.is_loopback)


def _edit(before: bytes, changes: Mapping[str, str]) -> bytes:
    known = properties_text.loads(before)
    return NOTE.encode() + properties_text.dumps(dict(sorted({**known, **changes}.items())))
