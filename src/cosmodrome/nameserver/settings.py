"""The settings of a running name server: shown to anyone, changed one allowed key at a time.

None of those that change at run time is a path, an address or a limit of the socket: a request
must never decide where this process writes or listens. Changes are written into the settings
file, when one is known, and leave the rest of it as it was.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import get_args

import msgspec

from cosmodrome.env.base import Env
from cosmodrome.env.options import NameServerOptions, SocketOptions
from cosmodrome.env.reload import live_keys
from cosmodrome.errors import Code, ConfigError, Refused
from cosmodrome.transport.live_settings import Changed, LiveSettings
from cosmodrome.wire import properties_text

CHANGEABLE = live_keys(NameServerOptions)
KINDS = {
    field.encode_name: get_args(field.type)[0]
    for field in msgspec.structs.fields(NameServerOptions)
}
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
        self.options = msgspec.structs.replace(options)  # changed in place, the caller's is not
        self._live = LiveSettings(
            "name server",
            (self.options, sockets),
            env,
            options.config_store_path,
            _edit,
            {key: functools.partial(_check_text, key) for key in CHANGEABLE},
        )

    def text(self) -> bytes:
        """Every setting as key=value lines."""
        return self._live.text()

    async def update(self, data: bytes) -> list[Changed]:
        asked = properties_text.loads(data)
        for key in asked:
            if key in BLACK_LIST or key.lower().endswith(PATH_ENDINGS):
                raise Refused(
                    Code.NO_PERMISSION,
                    f"{key} cannot be changed by a request: it decides where this name server"
                    " reads or writes. Set it in the settings file and restart.",
                )
        return await self._live.update(asked)


def _edit(before: bytes, changes: Mapping[str, str]) -> bytes:
    text = edit_properties_text(before.decode(errors="surrogateescape"), changes)
    return text.encode(errors="surrogateescape")


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


def _check_text(key: str, text: str) -> None:
    """Check more than the type of the setting, which was checked before."""
    if KINDS[key] is str and (len(text) > TEXT_CHARACTERS_MAX or not text.isprintable()):
        raise ConfigError(
            f"{key} must be printable text of at most {TEXT_CHARACTERS_MAX} characters"
        )
    if KINDS[key] is int and not INTERVAL_MS_MIN <= int(text) <= INTERVAL_MS_MAX:
        raise ConfigError(
            f"{key}={text.strip()} must lie between {INTERVAL_MS_MIN} and {INTERVAL_MS_MAX} ms"
        )


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
