"""Where the progress of a group is kept: on the brokers, or for broadcasting in a file here.

The file is upstream's: `<dir>/<client>/<group>/offsets.json` with the previous one beside it.
"""

from __future__ import annotations

import asyncio
import logging
import os.path
from collections.abc import Collection, Mapping
from typing import Protocol

from msgspec import field

from cosmodrome.client.instance import Instance
from cosmodrome.client.options import ClientOptions
from cosmodrome.client.routes import Routes
from cosmodrome.client.values import MessageQueue
from cosmodrome.env.base import Env
from cosmodrome.errors import Code, CosmodromeError, ProtocolError, Refused, Unreachable
from cosmodrome.transport.router import LogLimit
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import MASTER_ID, Body
from cosmodrome.wire.commands.offset import QueryConsumerOffset, UpdateConsumerOffset

log = logging.getLogger(__name__)

OFFSET_TIMEOUT_MS = 5_000
LOG_INTERVAL_S = 10.0  # between lines while a broker is away
OFFSETS_DIR = "~/.rocketmq_offsets"
OFFSETS_NAME = "offsets.json"


class Offsets(Protocol):
    async def read(self, queue: MessageQueue) -> int | None:
        """The stored offset; None when there is none. CosmodromeError when nobody knows."""

    async def write(self, offsets: Mapping[MessageQueue, int]) -> Collection[MessageQueue]:
        """Store them, behind all that was to be stored before. Queues that failed are logged and
        returned: the next write repeats them."""


def raise_unless_stored(failed: Collection[MessageQueue]) -> None:
    """For those who asked for a commit: the log has the reasons."""
    if failed:
        named = ", ".join(f"{queue.broker_name}:{queue.queue_id}" for queue in failed)
        raise Unreachable(
            f"the progress of {len(failed)} queues was not stored: {named}; the next commit"
            " repeats it"
        )


class OffsetFile(Body, kw_only=True):
    """The content of the file."""

    object_keys = True

    offset_table: dict[MessageQueue, int] = field(default_factory=dict)


class BrokerOffsets:
    """Each broker keeps the offsets of its own queues."""

    def __init__(self, instance: Instance, group: str) -> None:
        self._instance = instance
        self._group = group
        self._log_limit = LogLimit(LOG_INTERVAL_S)
        # Upstream's broker works on several requests of a connection at once, so an offset that
        # was not answered yet could be stored after a later one.
        self._one_write = asyncio.Lock()

    async def read(self, queue: MessageQueue) -> int | None:
        command = QueryConsumerOffset(
            consumer_group=self._group, topic=queue.topic, queue_id=queue.queue_id
        )
        address = broker_address(self._instance.routes, queue.broker_name)
        try:
            reply = await self._instance.links.call(address, command, OFFSET_TIMEOUT_MS)
        except Refused as refusal:
            if refusal.code == Code.QUERY_NOT_FOUND:
                return None
            raise
        return reply.offset if reply.offset >= 0 else None

    async def write(self, offsets: Mapping[MessageQueue, int]) -> Collection[MessageQueue]:
        async with self._one_write:
            outcomes = await asyncio.gather(
                *(self._write(queue, offset) for queue, offset in offsets.items()),
                return_exceptions=True,
            )
        failed = set()
        for queue, outcome in zip(offsets, outcomes, strict=True):
            if isinstance(outcome, CosmodromeError):
                failed.add(queue)
                held = self._log_limit.admit("offset not committed")
                if held is not None:
                    log.warning(
                        "offset not committed: group=%s queue=%s offset=%d reason=%s held_back=%d",
                        self._group,
                        queue,
                        offsets[queue],
                        outcome,
                        held,
                    )
            elif isinstance(outcome, BaseException):
                raise outcome
        return failed

    async def _write(self, queue: MessageQueue, offset: int) -> None:
        command = UpdateConsumerOffset(
            consumer_group=self._group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            commit_offset=offset,
        )
        address = broker_address(self._instance.routes, queue.broker_name)
        await self._instance.links.call(address, command, OFFSET_TIMEOUT_MS)


class LocalOffsets:
    """One file per client and group; it is read once and written as a whole."""

    def __init__(self, path: str, env: Env) -> None:
        self.path = path
        self._env = env
        self._table: dict[MessageQueue, int] | None = None
        self._one_write = asyncio.Lock()

    async def read(self, queue: MessageQueue) -> int | None:
        if self._table is None:
            self._table = await self._env.offload(self._load)
        return self._table.get(queue)

    async def write(self, offsets: Mapping[MessageQueue, int]) -> Collection[MessageQueue]:
        async with self._one_write:
            return await self._write(offsets)

    async def _write(self, offsets: Mapping[MessageQueue, int]) -> Collection[MessageQueue]:
        if self._table is None:
            self._table = await self._env.offload(self._load)
        before = dict(self._table)
        self._table.update(offsets)
        if self._table == before:
            return ()
        content = bodies.encode(OffsetFile(offset_table=dict(self._table)), pretty=True)
        try:
            await self._env.offload(lambda: self._save(content))
        except OSError as error:
            self._table = before  # so that the next write tries again
            log.error("offsets not saved: file=%s reason=%s", self.path, error)
            return offsets.keys()
        return ()

    def _load(self) -> dict[MessageQueue, int]:
        disk = self._env.disk
        for path in (self.path, self.path + ".bak"):
            if not disk.exists(path):
                continue
            try:
                return bodies.decode(OffsetFile, disk.read(path)).offset_table
            except (ProtocolError, OSError) as error:
                log.error("offsets cannot be read: file=%s reason=%s", path, error)
        return {}

    def _save(self, content: bytes) -> None:
        self._env.disk.make_dirs(os.path.dirname(self.path))
        self._env.disk.replace(self.path, content)


def offsets_path(directory: str | None, options: ClientOptions, client_id: str, group: str) -> str:
    """Where a broadcasting consumer keeps its offsets.

    Compat: upstream's broadcasting consumers keep the instance name DEFAULT in their client id,
    so that the path stays the same from one process to the next.
    """
    ip = client_id.partition("@")[0]
    folder = f"{ip}@{options.instance_name}"
    if options.unit_name:
        folder += f"@{options.unit_name}"
    root = os.path.expanduser(OFFSETS_DIR if directory is None else directory)
    return os.path.join(root, folder.replace(os.sep, "_"), group, OFFSETS_NAME)


def broker_address(routes: Routes, broker_name: str) -> str:
    """The master's address, or a slave's while there is none."""
    address = routes.address(broker_name, MASTER_ID) or routes.address(broker_name, 1)
    if address is None:
        raise Unreachable(f"no route has an address of broker {broker_name}")
    return address


def master_address(routes: Routes, broker_name: str, what: str) -> str:
    """Where the master is, for what no slave can do; `what` says who has to wait for it."""
    address = routes.address(broker_name, MASTER_ID)
    if address is None:
        raise Unreachable(f"the master of broker {broker_name} is away; {what} for it")
    return address
