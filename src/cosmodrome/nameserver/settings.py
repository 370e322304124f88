"""The settings of a running name server: shown to anyone, changed one allowed key at a time.

Only keys declared live change at run time, and none of them is a path, an address or a limit
of the socket: a request must never decide where this process writes or listens. An update is
taken as a whole or not at all, and is on disk (when a settings file is known) before it acts.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping

import msgspec

from cosmodrome.env.base import Env
from cosmodrome.env.options import NameServerOptions, Options, SocketOptions
from cosmodrome.env.reload import live_keys
from cosmodrome.errors import Code, ProtocolError, Refused
from cosmodrome.wire import properties_text

log = logging.getLogger(__name__)

CHANGEABLE = live_keys(NameServerOptions)
# Compat: upstream's black list; by its sense every other path is on it too.
BLACK_LIST = frozenset({"configBlackList", "configStorePath", "kvConfigPath", "rocketmqHome"})
PATH_ENDINGS = ("path", "dir", "home", "file")
TEXT_CHARACTERS_MAX = 1024
INTERVAL_MS_MIN = 1000
INTERVAL_MS_MAX = 24 * 3600 * 1000

_LINE = re.compile(r"[^\n]*\n|[^\n]+")


class Settings:
    """The current options; whoever reads `options` sees the newest."""

    def __init__(self, options: NameServerOptions, sockets: SocketOptions, env: Env) -> None:
        self.options = options
        self._sockets = sockets
        self._env = env
        self._changing = asyncio.Lock()

    def text(self) -> bytes:
        """Every setting as key=value lines."""
        shown = {**_items(self.options), **_items(self._sockets)}
        return properties_text.dumps(dict(sorted(shown.items())))

    async def update(self, data: bytes) -> list[tuple[str, str, str]]:
        """What was changed: key, and its text before and after."""
        wanted = properties_text.loads(data)
        for key in wanted:
            self._check_key(key)
        async with self._changing:
            changed = self._converted(wanted)
            changes = {key: text for key, text in _items(changed).items() if key in wanted}
            if not changes:
                return []
            await self._save(changes)
            before = _items(self.options)
            self.options = changed
        return [(key, before[key], text) for key, text in changes.items()]

    def _check_key(self, key: str) -> None:
        if key in CHANGEABLE:
            return
        if key in BLACK_LIST or key.lower().endswith(PATH_ENDINGS):
            raise Refused(
                Code.NO_PERMISSION,
                f"{key} cannot be changed by a request: it decides where this name server"
                " reads or writes. Set it in the settings file and restart.",
            )
        if key in {**_items(self.options), **_items(self._sockets)}:
            raise Refused(
                Code.NO_PERMISSION,
                f"{key} is fixed while the name server runs. Set it in the settings file and"
                " restart.",
            )
        raise Refused(
            Code.SYSTEM_ERROR,
            f"{key[:64]!r} is not a setting of the name server; what can be changed is"
            f" {', '.join(sorted(CHANGEABLE))}. Nothing was changed.",
        )

    def _converted(self, wanted: Mapping[str, str]) -> NameServerOptions:
        values: dict[str, object] = {}
        for field in msgspec.structs.fields(NameServerOptions):
            text = wanted.get(field.encode_name)
            if text is None:
                continue
            try:
                value = msgspec.convert(text.strip(), field.type, strict=False)
            except msgspec.ValidationError as error:
                raise Refused(
                    Code.SYSTEM_ERROR,
                    f"{field.encode_name}={text[:64]}: {str(error).lower().replace('`', '')}."
                    " Nothing was changed.",
                ) from None
            _check_value(field.encode_name, value)
            values[field.name] = value
        return msgspec.structs.replace(self.options, **values)

    async def _save(self, changes: Mapping[str, str]) -> None:
        path = self.options.config_store_path
        if not path:
            return
        disk = self._env.disk

        def save() -> None:
            before = disk.read(path).decode(errors="surrogateescape") if disk.exists(path) else ""
            after = edit_properties_text(before, changes)
            disk.replace(path, after.encode(errors="surrogateescape"))

        try:
            await self._env.offload(save)
        except (OSError, ProtocolError) as error:
            log.error("settings not saved: path=%s error=%s", path, error)
            raise Refused(
                Code.SYSTEM_ERROR,
                f"The settings could not be saved to {path} ({error}); make room, or fix the file"
                " or its permissions, and try again. Nothing was changed.",
            ) from None


def edit_properties_text(text: str, changes: Mapping[str, str]) -> str:
    """`text` with some keys set and everything else, comments too, as it was."""
    left = dict(changes)
    out = []
    for lines in _entries(text):
        keys = properties_text.loads(lines).keys() & changes.keys()
        if not keys:
            out.append(lines if lines.endswith("\n") else lines + "\n")
        for key in keys & left.keys():
            out.append(_pair(key, left.pop(key)))
    out.extend(_pair(key, value) for key, value in left.items())
    return "".join(out)


def _check_value(key: str, value: object) -> None:
    if isinstance(value, str) and (len(value) > TEXT_CHARACTERS_MAX or not value.isprintable()):
        raise Refused(
            Code.SYSTEM_ERROR,
            f"{key} must be printable text of at most {TEXT_CHARACTERS_MAX} characters."
            " Nothing was changed.",
        )
    if isinstance(value, bool) or not isinstance(value, int):
        return
    if not INTERVAL_MS_MIN <= value <= INTERVAL_MS_MAX:
        raise Refused(
            Code.SYSTEM_ERROR,
            f"{key}={value} must lie between {INTERVAL_MS_MIN} and {INTERVAL_MS_MAX} ms."
            " Nothing was changed.",
        )


def _items(group: Options) -> dict[str, str]:
    return {
        field.encode_name: _said(getattr(group, field.name))
        for field in msgspec.structs.fields(group)
    }


def _said(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _pair(key: str, value: str) -> str:
    return properties_text.dumps({key: value}).decode()


def _entries(text: str) -> list[str]:
    """Each line with the ones it continues on (an odd number of backslashes at its end)."""
    entries: list[str] = []
    continues = False
    for line in _LINE.findall(text):
        if continues:
            entries[-1] += line
        else:
            entries.append(line)
        bare = line.rstrip("\r\n")
        comment = not continues and bare.lstrip()[:1] in ("#", "!")
        continues = not comment and (len(bare) - len(bare.rstrip("\\"))) % 2 == 1
    return entries
