"""The settings this broker runs with: shown to anyone, changed by those who may.

Only fields declared `live` change (see `env/reload.py`). A change is on disk, in the file of
overrides below the store, before it acts and before it is answered; the next start reads that
file after the settings file. `changed` tells the few services that must do something about it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import os.path
from collections.abc import Callable, Mapping, Sequence

import msgspec

from cosmodrome.env.base import Env
from cosmodrome.env.config import OVERRIDES_NAME
from cosmodrome.env.options import Options
from cosmodrome.env.reload import apply, judge, text_of
from cosmodrome.env.signal import Signal
from cosmodrome.errors import Code, ProtocolError, Refused
from cosmodrome.transport.audit_log import changed as audited
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

NOTE = "# Settings changed while the broker ran; they win over the settings file.\n"


class Settings:
    """The one writer of live settings. `checks` look at texts that have a form of their own."""

    def __init__(
        self,
        groups: Sequence[Options],
        env: Env,
        config_dir: str,
        checks: Mapping[str, Callable[[str], object]] | None = None,
    ) -> None:
        self.changed: Signal[frozenset[str]] = Signal()
        self._groups = tuple(groups)
        self._env = env
        self._path = os.path.join(config_dir, OVERRIDES_NAME)
        self._checks = checks or {}
        self._changing = asyncio.Lock()
        self._version = DataVersion(counter=0, timestamp=env.clock.now_ms())

    @GetBrokerConfig.handler
    def get_broker_config(self, ask: GetBrokerConfig, call: Call) -> GetBrokerConfigReply:
        shown = ALWAYS_SHOWN | {
            field.encode_name: text_of(getattr(group, field.name))
            for group in self._groups
            for field in msgspec.structs.fields(group)
        }
        return GetBrokerConfigReply(
            version=bodies.encode(self._version).decode(),
            body=properties_text.dumps(dict(sorted(shown.items()))),
        )

    @UpdateBrokerConfig.handler
    async def update_broker_config(self, ask: UpdateBrokerConfig, call: Call) -> Reply:
        wanted = properties_text.loads(ask.body)
        async with self._changing:
            changes = judge(self._groups, wanted, self._checks)
            if not changes:
                return Reply()
            await self._save({change.key: change.text for change in changes})
            before = [text_of(getattr(change.group, change.attribute)) for change in changes]
            apply(changes)
            self._version = DataVersion(
                counter=self._version.counter + 1, timestamp=self._env.clock.now_ms()
            )
        for change, was in zip(changes, before, strict=True):
            audited(call, "setting_changed", key=change.key, before=was, after=change.text)
        self.changed.fire(frozenset(change.key for change in changes))
        return Reply()

    async def _save(self, changes: Mapping[str, str]) -> None:
        disk = self._env.disk

        def save() -> None:
            known = properties_text.loads(disk.read(self._path)) if disk.exists(self._path) else {}
            text = properties_text.dumps(dict(sorted({**known, **changes}.items())))
            disk.replace(self._path, NOTE.encode() + text)

        try:
            await self._env.offload(save)
        except (OSError, ProtocolError) as error:
            log.error("settings_not_saved path=%s error=%s", self._path, error)
            raise Refused(
                Code.SYSTEM_ERROR,
                f"The change could not be saved to {self._path} ({error}); make room or mend the"
                " file, and try again. Nothing was changed.",
            ) from None
