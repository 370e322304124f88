"""Which settings may change while a process runs, and how they change.

A field declared `live` in `options.py` is read where it is used, never copied; one writer per
process sets it here, on the loop, so that every reader sees the old value or the new one. All
other fields are what they were at the start. An update is judged as a whole before any of it
is done. No field that names a path, an address or a program is ever `live`: a request must not
decide what this process runs, where it writes or whom it talks to. Every number that is `live` has
a least and a most: what a request sets must leave a server that works.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import msgspec
from msgspec import Meta

from cosmodrome.env.config import nearest
from cosmodrome.env.options import Options
from cosmodrome.env.unused import REFUSED, UNUSED
from cosmodrome.errors import Code, ConfigError, Refused

NOTHING = " Nothing was changed."
SECRET = "***"  # what is shown instead of one


class Change(NamedTuple):
    group: Options
    attribute: str
    key: str
    value: Any

    @property
    def text(self) -> str:
        return text_of(self.value)

    @property
    def before(self) -> str:
        """The text that the setting has until the change is applied."""
        return text_of(getattr(self.group, self.attribute))


@functools.cache
def fields_of(group: type[Options]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """The settings of a group. To find them out takes milliseconds, so it is done once."""
    return msgspec.structs.fields(group)


def live_keys(group: type[Options]) -> frozenset[str]:
    """The keys of a group that may change while the process runs."""
    return frozenset(
        field.encode_name for field in msgspec.structs.fields(group) if _is_live(field.type)
    )


def dangerous_keys(group: type[Options]) -> frozenset[str]:
    """The live keys that may remove messages or stop every client."""
    return frozenset(
        field.encode_name
        for field in msgspec.structs.fields(group)
        if _marks(field.type).get("dangerous")
    )


def judge(
    groups: Sequence[Options],
    asked: Mapping[str, str],
    checks: Mapping[str, Callable[[str], object]],
    server: str,
) -> list[Change]:
    """What an update would change; Refused, with the key and the way out, when any part of it
    cannot be done. `checks` raise ConfigError for a text of the right type and a wrong sense."""
    fields = {
        field.encode_name: (group, field) for group in groups for field in fields_of(type(group))
    }
    changes = []
    for key, text in asked.items():
        if key not in fields:
            raise _unknown(key, list(fields), server)
        group, field = fields[key]
        if not _is_live(field.type):
            raise Refused(
                Code.NO_PERMISSION,
                f"{key} is fixed while the {server} runs: set it in the settings file and"
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


def shown(field: msgspec.structs.FieldInfo, value: object) -> str:
    """The text of a setting for people; a secret only says that it is there."""
    return SECRET if value and _marks(field.type).get("secret") else text_of(value)


def text_of(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _converted(key: str, text: str, kind: Any) -> object:
    try:
        value = msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError as error:
        why = str(error).replace("Expected", "expected").replace("`", "")
        raise Refused(Code.SYSTEM_ERROR, f"{key}={text[:64]}: {why}.{NOTHING}") from None
    return value


def _unknown(key: str, known: Sequence[str], server: str) -> Refused:
    reason = REFUSED.get(key) or UNUSED.get(key)
    if reason is not None:
        return Refused(Code.SYSTEM_ERROR, f"{key} has no effect here: {reason}.{NOTHING}")
    return Refused(
        Code.SYSTEM_ERROR,
        f"{key[:64]!r} is not a setting of the {server}{nearest(key[:64], known)}{NOTHING}",
    )


def _is_live(annotation: Any) -> bool:
    return bool(_marks(annotation).get("live"))


def _marks(annotation: Any) -> Mapping[str, Any]:
    meta = get_args(annotation)[1]
    return (meta.extra or {}) if isinstance(meta, Meta) else {}


def _fine(text: str) -> None:
    pass
