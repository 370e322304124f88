"""The accounts that a server runs with: read at its start, read again when a file changes.

A file that cannot be understood changes nothing while the server runs: the accounts stay as they
were, and an error says so. Changes that administrators ask for go to the file first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from cosmodrome.access import account_files as files
from cosmodrome.access.account_files import Document, FileState, Snapshot
from cosmodrome.access.accounts import Account
from cosmodrome.access.addresses import Addresses
from cosmodrome.env.background import Background
from cosmodrome.env.base import Env
from cosmodrome.errors import ConfigError

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0  # between looks at the files

_Stamp = tuple[tuple[str, int, int], ...]  # path, time, size of each file


class Accounts:
    """`generation` grows whenever the accounts may have changed."""

    def __init__(self, path: str, env: Env) -> None:
        self.path = path
        self.generation = 0
        self._env = env
        self._now = files.NOTHING
        self._stamp: _Stamp = ()
        self._changing = asyncio.Lock()
        self._looking = Background("look at the account files")

    async def start(self) -> None:
        await self.load()
        if not any(account.admin for account in self._now.accounts.values()):
            log.warning("no_administrator path=%s; no account has admin: true", self.path)
        self._looking.start(self._look_again_and_again)

    async def stop(self) -> None:
        await self._looking.stop()

    async def load(self) -> None:
        """ConfigError when there are no accounts or a file is broken."""
        async with self._changing:
            self._stamp = await self._env.offload(self._stamps)
            if not self._stamp:
                raise ConfigError(
                    f"aclEnable is on, but there is no account file {self.path}; write it with an"
                    " administrator's account (docs/security.md has an example), or set aclFile"
                )
            self._adopt(await self._env.offload(self._read))

    async def look(self) -> bool:
        """Read the files again if they changed; whether the accounts did."""
        async with self._changing:
            stamp = self._stamp
            try:
                stamp = await self._env.offload(self._stamps)
                if stamp == self._stamp:
                    return False
                if not stamp:
                    raise ConfigError(f"there is no account file {self.path} any more")
                fresh = await self._env.offload(self._read)
            except (ConfigError, OSError) as error:
                log.error("accounts_not_read error=%s; the accounts stay as they were", error)
                self._stamp = stamp
                return False
            self._stamp = stamp
            self._adopt(fresh)
            return True

    # --- asking ------------------------------------------------------------------------------

    def get(self, access_key: str) -> Account | None:
        return self._now.accounts.get(access_key)

    @property
    def white(self) -> Addresses:
        """Who need not sign requests about messages."""
        return self._now.white

    @property
    def all(self) -> Mapping[str, Account]:
        return self._now.accounts

    @property
    def files(self) -> tuple[FileState, ...]:
        return self._now.files

    # --- changing ----------------------------------------------------------------------------

    async def put(self, access_key: str, changes: Document) -> None:
        """Create an account or change some of its fields."""

        def edit(document: Document) -> None:
            entries = files.entries_of(document)
            entry = next((one for one in entries if one.get("accessKey") == access_key), None)
            if entry is None:
                entry = {"accessKey": access_key}
                document["accounts"] = [*entries, entry]
            entry.update(changes)

        await self._change(self._file_of(access_key) or self.path, edit)

    async def remove(self, access_key: str) -> None:
        path = self._file_of(access_key)
        if path is None:
            raise ConfigError(f"there is no account {access_key[:64]!r}")

        def edit(document: Document) -> None:
            document["accounts"] = [
                one for one in files.entries_of(document) if one.get("accessKey") != access_key
            ]

        await self._change(path, edit)

    async def set_white(self, addresses: list[str], path: str) -> None:
        """Replace the addresses of one file; an empty path is the main one."""
        known = {self.path, *(file.path for file in self.files)}
        if path and path not in known:
            raise ConfigError(
                f"there is no account file {path[:256]!r}; leave it out, or use one of"
                f" {', '.join(sorted(known))}"
            )
        Addresses(addresses)

        def edit(document: Document) -> None:
            document["globalWhiteRemoteAddresses"] = addresses

        await self._change(path or self.path, edit)

    # --- inside ------------------------------------------------------------------------------

    def _file_of(self, access_key: str) -> str | None:
        return next((file.path for file in self.files if access_key in file.access_keys), None)

    async def _change(self, path: str, edit: Callable[[Document], None]) -> None:
        disk = self._env.disk

        def change() -> tuple[_Stamp, Snapshot]:
            document = files.read(disk, path) if disk.exists(path) else {}
            edit(document)
            counter, _ = files.version_of(document)
            now_ms = self._env.clock.now_ms()
            document["dataVersion"] = [{"counter": counter + 1, "timestamp": now_ms}]
            data = files.text_of(document)
            paths = dict.fromkeys([*files.paths_of(disk, self.path), path])
            fresh = files.read_all(disk, list(paths), {path: data})
            # Without a previous generation: a removed secret must not stay on the disk.
            disk.replace(path, data, keep=False)
            return self._stamps(), fresh

        async with self._changing:
            try:
                self._stamp, fresh = await self._env.offload(change)
            except OSError as error:
                raise ConfigError(
                    f"{path} cannot be written: {error.strerror or error}; nothing was changed"
                ) from None
            self._adopt(fresh)

    def _stamps(self) -> _Stamp:
        disk = self._env.disk
        paths = files.paths_of(disk, self.path)
        return tuple((path, disk.mtime_ms(path), disk.size(path)) for path in paths)

    def _read(self) -> Snapshot:
        disk = self._env.disk
        return files.read_all(disk, files.paths_of(disk, self.path))

    def _adopt(self, fresh: Snapshot) -> None:
        self._now = fresh
        self.generation += 1
        log.info("accounts_read accounts=%d files=%d", len(fresh.accounts), len(fresh.files))

    async def _look_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()
