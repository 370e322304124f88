"""Which settings may change while a process runs, and how they change.

A field declared `live` in `options.py` is read where it is used, never copied; one writer per
process sets it here, on the loop, so that every reader sees the old value or the new one. All
other fields are what they were at the start. An update is judged as a whole before any of it
is done. No field that names a path, an address or a program is ever `live`: a request must not
decide what this process runs, where it writes or whom it talks to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import msgspec
from msgspec import Meta

from cosmodrome.env.config import nearest
from cosmodrome.env.options import Options
from cosmodrome.env.unused import REFUSED, UNUSED
from cosmodrome.errors import Code, ConfigError, Refused

INT32_MAX = 2**31 - 1
NOTHING = " Nothing was changed."


class Change(NamedTuple):
    group: Options
    attribute: str
    key: str
    value: Any

    @property
    def text(self) -> str:
        return text_of(self.value)


def live_keys(group: type[Options]) -> frozenset[str]:
    """The keys of a group that may change while the process runs."""
    return frozenset(
        field.encode_name for field in msgspec.structs.fields(group) if _is_live(field.type)
    )


def judge(
    groups: Sequence[Options],
    wanted: Mapping[str, str],
    checks: Mapping[str, Callable[[str], object]],
) -> list[Change]:
    """What an update would change; Refused, with the key and the way out, when any part of it
    cannot be done. `checks` raise ConfigError for a text of the right type and a wrong sense."""
    fields = {
        field.encode_name: (group, field)
        for group in groups
        for field in msgspec.structs.fields(type(group))
    }
    changes = []
    for key, text in wanted.items():
        if key not in fields:
            raise _unknown(key, list(fields))
        group, field = fields[key]
        if not _is_live(field.type):
            raise Refused(
                Code.NO_PERMISSION,
                f"{key} is fixed while the broker runs: set it in the settings file and"
                f" restart.{NOTHING}",
            )
        value = _converted(key, text.strip(), field.type)
        try:
            checks.get(key, _fine)(text)
        except ConfigError as error:
            raise Refused(Code.SYSTEM_ERROR, f"{error}.{NOTHING}") from None
        if value != getattr(group, field.name):
            changes.append(Change(group, field.name, key, value))
    return changes


def apply(changes: Sequence[Change]) -> None:
    for change in changes:
        # Frozen for everyone else: this is the one writer.
        msgspec.structs.force_setattr(change.group, change.attribute, change.value)


def text_of(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _converted(key: str, text: str, kind: Any) -> object:
    try:
        value = msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError as error:
        why = str(error).replace("Expected", "expected").replace("`", "")
        raise Refused(Code.SYSTEM_ERROR, f"{key}={text[:64]}: {why}.{NOTHING}") from None
    if isinstance(value, int) and value > INT32_MAX and not key.endswith("TimeStamp"):
        raise Refused(Code.SYSTEM_ERROR, f"{key}={text[:64]}: use at most {INT32_MAX}.{NOTHING}")
    return value


def _unknown(key: str, known: Sequence[str]) -> Refused:
    reason = REFUSED.get(key) or UNUSED.get(key)
    if reason is not None:
        return Refused(Code.SYSTEM_ERROR, f"{key} has no effect here: {reason}.{NOTHING}")
    return Refused(
        Code.SYSTEM_ERROR,
        f"{key[:64]!r} is not a setting of this server{nearest(key[:64], known)}{NOTHING}",
    )


def _is_live(annotation: Any) -> bool:
    meta = get_args(annotation)[1]
    return isinstance(meta, Meta) and bool((meta.extra or {}).get("live"))


def _fine(text: str) -> None:
    pass
