"""What every room of a broker is built on, and how rooms are started."""

from __future__ import annotations

import dataclasses
import functools
import os.path
from collections.abc import Sequence
from typing import Protocol

from cosmodrome.access.gate import UNPROVEN, Gate, build_gate
from cosmodrome.access.own_account import OwnAccount
from cosmodrome.broker.address import AdvertisedAddress
from cosmodrome.broker.counts.stats import Stats
from cosmodrome.broker.role import Role, role_of
from cosmodrome.env.base import Env
from cosmodrome.env.options import BrokerOptions, SocketOptions, StoreOptions, TlsOptions
from cosmodrome.store.store import Store
from cosmodrome.transport.certificates import Tls
from cosmodrome.transport.channel import Channel
from cosmodrome.transport.ports import is_own_address
from cosmodrome.wire.message import REAL_TOPIC
from cosmodrome.wire.names import SEND_FORBIDDEN_TOPICS
from cosmodrome.wire.record import decode_record


@dataclasses.dataclass(frozen=True, slots=True)
class Foundation:
    options: BrokerOptions
    store_options: StoreOptions
    sockets: SocketOptions
    env: Env
    store: Store
    stats: Stats
    role: Role
    address: AdvertisedAddress
    gate: Gate  # who may ask for what
    own_account: OwnAccount  # with which this broker asks others
    tls: Tls

    @property
    def config_dir(self) -> str:
        return os.path.join(self.store_options.store_path_root_dir, "config")

    @property
    def log_dir(self) -> str:
        root = self.store_options.store_path_root_dir
        return self.store_options.store_path_commit_log or os.path.join(root, "commitlog")

    def config_file(self, name: str) -> str:
        return os.path.join(self.config_dir, name)

    def connect(self, host: str, port: int) -> Channel:
        """To another server of the cluster."""
        return Channel(host, port, prepare=self.own_account.sign, tls=self.tls.outgoing)


class Service(Protocol):
    async def start(self) -> None: ...
    async def stop(self) -> None: ...


class Room(Protocol):
    """The services of one folder, put together."""

    @property
    def handlers(self) -> Sequence[object]:
        """Those that answer requests."""

    @property
    def services(self) -> Sequence[Service]:
        """Those that have to be started, in this order; they are stopped in reverse."""


def lay_foundation(
    options: BrokerOptions,
    store_options: StoreOptions,
    sockets: SocketOptions,
    env: Env,
    tls: Tls | None = None,
) -> Foundation:
    store = Store(store_options, env, memory_bytes=env.memory_bytes)
    gate = build_gate(
        "broker",
        options,
        os.path.join(store_options.store_path_root_dir, "config"),
        env,
        is_local=is_own_address,
        topic_at=functools.partial(_topic_at, store),
    )
    return Foundation(
        options=options,
        store_options=store_options,
        sockets=sockets,
        env=env,
        store=store,
        stats=Stats(detailed=options.enable_detail_stat),
        role=role_of(store_options),
        address=AdvertisedAddress(options, store_options.ha_listen_port),
        gate=gate,
        own_account=OwnAccount(options, gate.accounts),
        tls=tls or Tls(TlsOptions(), env),
    )


def _topic_at(store: Store, log_offset: int) -> str | None:
    """The topic that a stored message is meant for, None when no message begins there."""
    data = store.record(log_offset) if log_offset >= 0 else None
    if data is None:
        return None
    record = decode_record(data)
    # Who sends a message chooses its body, which can look like a record. Queues know better.
    entries = store.entries(record.topic, record.queue_id, record.queue_offset, 1)
    if not entries or entries[0][0] != log_offset:
        return UNPROVEN
    if record.topic not in SEND_FORBIDDEN_TOPICS:
        return record.topic
    # It waits there; only the broker writes to these topics, so its word can be taken.
    return record.pairs().get(REAL_TOPIC, record.topic)
