"""The audit log: every change that somebody asks for, who asked, and what was there before.

One line per change, on a logger of its own, whatever the level of the log is. Who it was is the
peer's address and, where a request is signed, its access key, which nobody has verified here.
"""

from __future__ import annotations

import logging
import re

import msgspec

from cosmodrome.wire.message import join_address
from cosmodrome.wire.table import Call

AUDIT = "cosmodrome.audit"
FIELDS = "fields"  # the attribute of a log record that has the values as they were
ACCESS_KEY = "AccessKey"  # Compat: the header field of signed requests
VALUE_CHARACTERS_MAX = 2000

log = logging.getLogger(AUDIT)

_PLAIN = re.compile(r"[\w.%|:/@+\[\]-]+\Z", re.ASCII)


def changed(
    call: Call | None,
    action: str,
    *,
    before: object = None,
    after: object = None,
    **what: object,
) -> None:
    """Log that something was changed. Without a call, the broker itself changed it."""
    fields: dict[str, object] = {"action": action}
    fields.update((name, _plain(value)) for name, value in what.items())
    if call is not None:
        host, port = call.connection.peer[:2]
        fields["peer"] = join_address(host, port)
        access_key = call.frame.ext.get(ACCESS_KEY)
        if access_key is not None:
            fields["access_key"] = _plain(access_key)
    for name, value in (("before", before), ("after", after)):
        if value is not None:
            fields[name] = _plain(value)
    text = " ".join(f"{name}={_value_text(value)}" for name, value in fields.items())
    log.info("audit %s", text, extra={FIELDS: fields})


def _plain(value: object) -> object:
    """As JSON would have it, and not longer than a line of a log may be."""
    data = msgspec.json.encode(value, enc_hook=str)
    if len(data) <= VALUE_CHARACTERS_MAX:
        return msgspec.json.decode(data)
    return data[:VALUE_CHARACTERS_MAX].decode(errors="ignore") + "..."


def _value_text(value: object) -> str:
    if isinstance(value, str) and _PLAIN.match(value):
        return value
    return msgspec.json.encode(value).decode()
