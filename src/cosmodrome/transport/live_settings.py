"""The settings of a running server: shown to anyone, changed by a request where that is allowed.

Only fields declared `live` change (see `env/reload.py`). A change is on disk before it acts and
before it is answered; changes happen one after the other, each as a whole or not at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from cosmodrome.env.base import Env
from cosmodrome.env.options import Options
from cosmodrome.env.reload import apply, fields_of, judge, shown
from cosmodrome.errors import Code, ProtocolError, Refused, name_of, reason_of
from cosmodrome.wire import properties_text

log = logging.getLogger(__name__)

Texts = Mapping[str, str]


class Changed(NamedTuple):
    key: str
    before: str
    after: str


class LiveSettings:
    """The one writer of live settings.

    `edit` makes the new content of the file at `path` from the old one and the changes; without a
    path nothing is saved. `checks` look at texts that have a form of their own. `more` is what is
    shown beside the settings.
    """

    def __init__(
        self,
        server: str,
        groups: Sequence[Options],
        env: Env,
        path: str,
        edit: Callable[[bytes, Texts], bytes],
        checks: Mapping[str, Callable[[str], object]],
        more: Texts | None = None,
    ) -> None:
        self._server = server
        self._env = env
        self._path = path
        self._edit = edit
        self._checks = checks
        self._changing = asyncio.Lock()
        self._groups = tuple(groups)
        self._more = dict(more or {})
        self._text: bytes | None = None  # as it was asked for last, until something changes

    def text(self) -> bytes:
        """Every setting as key=value lines, and what else is to be shown."""
        if self._text is None:
            texts = {**self._more, **self.texts()}
            self._text = properties_text.dumps(dict(sorted(texts.items())))
        return self._text

    def texts(self, keys: Collection[str] | None = None) -> dict[str, str]:
        """The values of these settings now, or of all; secrets only say that they are there."""
        return {
            field.encode_name: shown(field, getattr(group, field.name))
            for group in self._groups
            for field in fields_of(type(group))
            if keys is None or field.encode_name in keys
        }

    async def update(self, asked: Texts) -> list[Changed]:
        """What is different now; Refused, and nothing changed, when any part cannot be done."""
        async with self._changing:
            changes = judge(self._groups, asked, self._checks, self._server)
            if not changes:
                return []
            await self._save({change.key: change.text for change in changes})
            changed = [Changed(change.key, change.before, change.text) for change in changes]
            apply(changes)
            self._text = None
        return changed

    async def _save(self, changes: Texts) -> None:
        disk, path = self._env.disk, self._path
        if not path:
            return

        def save() -> None:
            before = disk.read(path) if disk.exists(path) else b""
            disk.replace(path, self._edit(before, changes))

        try:
            await self._env.offload(save)
        except (OSError, ProtocolError) as error:
            log.error("settings_not_saved path=%s error=%s", path, error)
            raise Refused(
                Code.SYSTEM_ERROR,
                f"The change could not be saved to {name_of(path)} ({reason_of(error)}); make"
                " room, or fix the file or its permissions, and try again. Nothing was changed.",
            ) from None
