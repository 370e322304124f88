"""The settings this broker runs with, as operators ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cosmodrome.env.base import Clock
from cosmodrome.env.options import Options
from cosmodrome.wire import bodies, properties_text
from cosmodrome.wire.bodies import DataVersion
from cosmodrome.wire.commands.broker import GetBrokerConfig, GetBrokerConfigReply
from cosmodrome.wire.table import Call


class Settings:
    """All groups of options as they took effect; none of them changes while the broker runs."""

    def __init__(self, groups: Sequence[Options], clock: Clock) -> None:
        shown = {
            field.encode_name: _text(getattr(group, field.name))
            for group in groups
            for field in msgspec.structs.fields(group)
        }
        self._text = properties_text.dumps(dict(sorted(shown.items())))
        self._version = bodies.encode(DataVersion(counter=0, timestamp=clock.now_ms())).decode()

    @GetBrokerConfig.handler
    def get_broker_config(self, ask: GetBrokerConfig, call: Call) -> GetBrokerConfigReply:
        return GetBrokerConfigReply(version=self._version, body=self._text)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
