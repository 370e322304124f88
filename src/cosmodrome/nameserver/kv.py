"""The KV table: texts by namespace and key, the only thing a name server keeps on disk.

A change is on disk before it is visible and before it is acknowledged; changes happen one
after the other. The file is upstream's kvConfig.json: {"configTable":{namespace:{key:value}}}.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import msgspec

from cosmodrome.env import generations
from cosmodrome.env.base import Env
from cosmodrome.errors import Code, ConfigError, Refused, name_of, reason_of

log = logging.getLogger(__name__)

ORDER_TOPIC_CONFIG = "ORDER_TOPIC_CONFIG"  # topic -> "brokerA:4;brokerB:8"

NAME_CHARACTERS_MAX = 1024  # of a namespace or key
FILE_BYTES_MAX = 8 * 1024 * 1024
LOGGED_ENTRIES_MAX = 1000
LOGGED_CHARACTERS_MAX = 256  # of one value

Table = dict[str, dict[str, str]]


class _File(msgspec.Struct, rename="camel"):
    config_table: Table


class KeyValues:
    def __init__(self, path: str, env: Env) -> None:
        """An empty `path` keeps the table in memory only."""
        self._path = path
        self._env = env
        self._table: Table = {}
        self._changing = asyncio.Lock()

    async def load(self) -> None:
        """Read the file, or its previous generation when it is damaged."""
        if self._path:
            self._table = await self._env.offload(self._read)

    def get(self, namespace: str, key: str) -> str | None:
        return self._table.get(namespace, {}).get(key)

    def namespace(self, name: str) -> Mapping[str, str] | None:
        return self._table.get(name)

    def counts(self) -> dict[str, int]:
        """Entries by namespace."""
        return {name: len(values) for name, values in self._table.items()}

    async def put(self, namespace: str, key: str, value: str) -> None:
        for kind, name in (("namespace", namespace), ("key", key)):
            if not name or len(name) > NAME_CHARACTERS_MAX:
                raise Refused(
                    Code.SYSTEM_ERROR,
                    f"The {kind} has {len(name)} characters; use 1 to {NAME_CHARACTERS_MAX}.",
                )
        async with self._changing:
            values = {**self._table.get(namespace, {}), key: value}
            await self._change({**self._table, namespace: values})

    async def delete(self, namespace: str, key: str) -> None:
        """Nothing happens when there is no such key, as upstream has it."""
        async with self._changing:
            values = dict(self._table.get(namespace, {}))
            if values.pop(key, None) is not None:
                # Compat: a namespace outlives its last key; upstream then lists it as empty.
                await self._change({**self._table, namespace: values})

    def write_to_log(self) -> None:
        entries = [
            (namespace, key, value)
            for namespace, values in self._table.items()
            for key, value in values.items()
        ]
        log.info("KV table: entries=%d path=%s", len(entries), self._path or "(memory)")
        for namespace, key, value in entries[:LOGGED_ENTRIES_MAX]:
            shown = value[:LOGGED_CHARACTERS_MAX]
            log.info("KV entry: namespace=%s key=%s value=%r", namespace, key, shown)

    async def _change(self, table: Table) -> None:
        data = msgspec.json.encode(_File(table))
        if len(data) > FILE_BYTES_MAX:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"The KV table would take {len(data)} bytes, more than {FILE_BYTES_MAX};"
                " delete entries first. Nothing was changed.",
            )
        if self._path:
            try:
                await self._env.offload(lambda: self._env.disk.replace(self._path, data))
            except OSError as error:
                log.error("KV table not saved: path=%s error=%s", self._path, error)
                raise Refused(
                    Code.SYSTEM_ERROR,
                    f"The KV table could not be saved to {name_of(self._path)}"
                    f" ({reason_of(error)}); make room or fix the permissions and try again."
                    " Nothing was changed.",
                ) from None
        self._table = table

    def _read(self) -> Table:
        try:
            found = generations.newest(self._env.disk, self._path, _decode)
        except generations.Unreadable as error:
            raise ConfigError(
                f"the KV table cannot be read: {error}; repair one of them, or move both away to"
                " start with an empty table"
            ) from None
        if found is None:
            return {}
        if found.damage:
            log.error(
                "KV table damaged, its previous generation is used: path=%s problem=%r using=%s;"
                " the last change may be missing, check the entries",
                self._path,
                found.damage,
                generations.previous(self._path),
            )
        return found.content


def _decode(data: bytes) -> Table:
    try:
        return msgspec.json.decode(data, type=_File).config_table
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
