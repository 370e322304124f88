"""A real name server and broker inside this process, for tests, examples and small tools.

    async with embedded() as node:
        async with Producer(node.namesrv, group="orders") as producer: ...

Both listen on free ports of this machine only, and speak to any client. Without `data` the store
is a temporary directory that is gone afterwards; an acknowledgement then means what ASYNC_FLUSH
means (a power cut would take the directory anyway), which makes sends several times faster. With
`data` the directory stays and the default is SYNC_FLUSH, as for any broker. Log and queue files are
small, and a disk that is nearly full does not stop sends: only the operators of a real broker can
do something about it.
"""

from __future__ import annotations

import asyncio
import errno
import os.path
import tempfile
from typing import TypeVar

import msgspec

from cosmodrome.access.gate import ACCOUNT_FILE
from cosmodrome.broker.app import Broker, build_broker
from cosmodrome.env.base import Env
from cosmodrome.env.config import nearest
from cosmodrome.env.lifecycle import AsyncLifecycle
from cosmodrome.env.options import (
    AccessOptions,
    BrokerOptions,
    NameServerOptions,
    Options,
    SocketOptions,
    StoreOptions,
    TlsOptions,
)
from cosmodrome.env.real import real_env
from cosmodrome.errors import ConfigError
from cosmodrome.nameserver.app import NameServer, build_nameserver
from cosmodrome.transport.certificates import Tls

O = TypeVar("O", bound=Options)  # noqa: E741

_SMALL: dict[str, object] = {
    "broker_name": "embedded",
    "mapped_file_size_commit_log": 64 << 20,
    "mapped_file_size_consume_queue": 20 * 10_000,
    "max_hash_slot_num": 10_000,
    "max_index_num": 40_000,
    "disk_space_warning_level_ratio": 100,
    "clean_file_forcibly_enable": False,
}
_SET_HERE = frozenset(
    {"listen_port", "bind_address", "namesrv_addr", "store_path_root_dir", "broker_role"}
)
# Ports are looked up, then bound: another process may be faster in between.
_PORT_ATTEMPTS = 5
_READY_POLLS_MAX = 5_000
_READY_POLL_S = 0.002


class Node(AsyncLifecycle):
    """Made by `embedded`. It can be stopped and started again: ports and messages stay."""

    def __init__(self, data: str | None, settings: dict[str, object], env: Env) -> None:
        flush = "ASYNC_FLUSH" if data is None else "SYNC_FLUSH"
        self._settings = {**_SMALL, "flush_disk_type": flush, **settings}
        _check(self._settings)
        self._env = env
        self._tls = Tls(self._chosen(TlsOptions), env)
        self._data = data
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._nameserver: NameServer | None = None
        self._broker: Broker | None = None
        self._nameserver_port = 0
        self._broker_port = 0

    @property
    def namesrv(self) -> str:
        """The address to give to clients."""
        self._check_started()
        return f"127.0.0.1:{self._nameserver_port}"

    @property
    def broker_address(self) -> str:
        self._check_started()
        return f"127.0.0.1:{self._broker_port}"

    @property
    def broker_name(self) -> str:
        return str(self._settings["broker_name"])

    @property
    def data(self) -> str:
        """The directory of the store."""
        self._check_started()
        return self._root

    @property
    def _root(self) -> str:
        if self._data is not None:
            return self._data
        assert self._temporary is not None
        return self._temporary.name

    async def start(self) -> None:
        """Ready for clients when this returns: the broker's topics are in the routes."""
        if self._data is None and self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="cosmodrome-")
        try:
            await self._tls.start()
            await self.start_nameserver()
            await self.start_broker()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        await self.stop_broker()
        await self.stop_nameserver()
        await self._tls.stop()
        temporary, self._temporary = self._temporary, None
        if temporary is not None:
            await self._env.offload(temporary.cleanup)

    async def restart(self) -> None:
        """A clean stop and a new start on the same ports and the same directory."""
        await self.stop_broker()
        await self.stop_nameserver()
        await self.start()

    async def start_nameserver(self) -> None:
        if self._nameserver is not None:
            return
        access = msgspec.structs.asdict(self._chosen(AccessOptions))
        access["acl_file"] = access["acl_file"] or os.path.join(self._root, "config", ACCOUNT_FILE)
        options = NameServerOptions(listen_port=self._nameserver_port, **access)
        sockets = self._chosen(SocketOptions)
        server = build_nameserver(options, sockets, self._env, self._tls.door)
        await server.start()
        self._nameserver = server
        self._nameserver_port = server.port

    async def stop_nameserver(self) -> None:
        server, self._nameserver = self._nameserver, None
        if server is not None:
            await server.stop()

    async def start_broker(self) -> None:
        if self._broker is not None:
            return
        for attempt in range(_PORT_ATTEMPTS):
            broker = self._build_broker()
            try:
                await broker.start()
            except (OSError, ConfigError) as error:
                await broker.stop()
                last = self._broker_port or attempt == _PORT_ATTEMPTS - 1
                if last or not _is_taken(error):
                    raise
                continue
            self._broker = broker
            self._broker_port = broker.port
            await self._until_routed(broker)
            return

    async def stop_broker(self) -> None:
        broker, self._broker = self._broker, None
        if broker is not None:
            await broker.stop()

    def _build_broker(self) -> Broker:
        replace = msgspec.structs.replace
        broker = replace(
            self._chosen(BrokerOptions), listen_port=self._broker_port, namesrv_addr=self.namesrv
        )
        store = replace(self._chosen(StoreOptions), store_path_root_dir=self.data)
        return build_broker(broker, store, self._chosen(SocketOptions), self._env, self._tls)

    async def _until_routed(self, broker: Broker) -> None:
        if self._nameserver is None:
            return
        for _ in range(_READY_POLLS_MAX):
            if broker.ready()[0]:
                return
            await asyncio.sleep(_READY_POLL_S)
        raise ConfigError(f"the embedded broker does not become ready: {broker.ready()[1]}")

    def _chosen(self, kind: type[O]) -> O:
        names = {field.name for field in msgspec.structs.fields(kind)}
        return kind(**{key: value for key, value in self._settings.items() if key in names})

    def _check_started(self) -> None:
        if not self._nameserver_port:
            raise ConfigError("the node was not started; use `async with embedded() as node:`")


def embedded(*, data: str | None = None, env: Env | None = None, **settings: object) -> Node:
    """A node that is started by `async with`. Settings are named as in docs/settings.md, in snake
    case: `embedded(auto_create_topic_enable=False)`."""
    return Node(data, settings, real_env() if env is None else env)


def _check(settings: dict[str, object]) -> None:
    """Names and values, before anything is started."""
    fields = {
        field.name: field
        for kind in (BrokerOptions, StoreOptions, SocketOptions, TlsOptions)
        for field in msgspec.structs.fields(kind)
    }
    for name, value in settings.items():
        if name in _SET_HERE:
            raise ConfigError(f"{name} is chosen by the embedded node itself; leave it out")
        if name not in fields:
            raise ConfigError(f"unknown setting {name}{nearest(name, list(fields))}")
        try:
            msgspec.convert(value, fields[name].type)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{name}={value!r}: {error}") from None


def _is_taken(error: Exception) -> bool:
    return "address already in use" in str(error).lower() or (
        isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    )
