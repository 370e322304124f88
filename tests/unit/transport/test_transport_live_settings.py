"""Settings of a running server: what is asked for often is made once."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from cosmodrome.env.options import BrokerOptions
from cosmodrome.env.real import real_env
from cosmodrome.transport.live_settings import LiveSettings
from cosmodrome.wire import properties_text


async def test_the_text_is_made_once_per_change(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0
    dumps = properties_text.dumps

    def counted(values: Mapping[str, str]) -> bytes:
        nonlocal made
        made += 1
        return dumps(values)

    monkeypatch.setattr(properties_text, "dumps", counted)
    options = BrokerOptions()
    more = {"useTLS": "false"}
    settings = LiveSettings("broker", [options], real_env(), "", lambda *_: b"", {}, more)
    first = settings.text()
    assert b"traceOn=true\n" in first and b"useTLS=false\n" in first
    monkeypatch.setattr(msgspec.structs, "fields", None)  # to ask again would take milliseconds
    assert settings.text() is first and made == 1
    assert settings.texts({"traceOn"}) == {"traceOn": "true"}
    assert await settings.update({"traceOn": "true"}) == []
    assert settings.text() is first
    await settings.update({"traceOn": "false"})
    assert b"traceOn=false\n" in settings.text() and made == 2
