"""Registration with the name servers, so that clients find this broker.

Every name server has its own task and its own connection, which stays open: a name server
drops a broker whose connection closes. One that is down is tried again soon at first, later
once per period, and never delays the others.

A registration carries the whole topic table, except right after a change: then only the changed
topics travel, provided this very connection has carried the whole table before. A name server
that restarted therefore always hears the whole table first.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from cosmodrome.broker.topics import PERM_READ_WRITE, Topics
from cosmodrome.env.options import BrokerOptions
from cosmodrome.errors import ConfigError, CosmodromeError
from cosmodrome.layout import CRC_MASK
from cosmodrome.transport.channel import Channel
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import (
    KVTable,
    RegisterBrokerBody,
    TopicConfig,
    TopicConfigSerializeWrapper,
)
from cosmodrome.wire.commands.route import QueryDataVersion, RegisterBroker, UnregisterBroker

log = logging.getLogger(__name__)

PERIOD_MS_MIN = 10_000
PERIOD_MS_MAX = 60_000
RETRY_SECONDS_FIRST = 1.0
WATCH_SECONDS = 1.0
ANNOUNCED_WAIT_SECONDS = 2.0
UNREGISTER_TIMEOUT_MS = 2000
DEFAULT_PORT_HINT = 9876
_HOST = re.compile(r"[A-Za-z0-9._-]+\Z|\[[0-9A-Fa-f:.%]+\]\Z")


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """Who registers: as the name servers and, through them, all clients see it."""

    cluster: str
    broker_name: str
    broker_id: int
    address: str
    ha_address: str


def parse_name_servers(text: str) -> list[tuple[str, int]]:
    """`host:port;host:port` as pairs, each once; ConfigError says which part is wrong."""
    found: dict[tuple[str, int], None] = {}
    for part in text.split(";"):
        part = part.strip()
        if not part:
            continue
        host, colon, port = part.rpartition(":")
        if not colon or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65_535:
            raise ConfigError(
                f"namesrvAddr: {part!r} has no port between 1 and 65535;"
                f" write host:port;host:port, for example {part.split(':')[0] or 'localhost'}"
                f":{DEFAULT_PORT_HINT}"
            )
        if not _HOST.match(host):
            raise ConfigError(
                f"namesrvAddr: {host!r} is not a host name or address;"
                " write host:port;host:port, an IPv6 address in brackets"
            )
        found[host.strip("[]"), int(port)] = None
    return list(found)


class Announce:
    """`connect` makes the channel to one name server."""

    def __init__(
        self,
        options: BrokerOptions,
        topics: Topics,
        connect: Callable[[str, int], Channel] = Channel,
        filter_servers: Callable[[], list[str]] = list,
    ) -> None:
        self._options = options
        self._topics = topics
        self._connect = connect
        self._filter_servers = filter_servers
        self._addresses = parse_name_servers(options.namesrv_addr)
        self._peers: list[_Peer] = []
        topics.changed.subscribe(self._on_change)

    async def start(self, identity: Identity) -> None:
        if self._peers:
            return
        for host, port in self._addresses:
            peer = _Peer(
                *(self._options, self._topics, identity, self._connect(host, port)),
                self._filter_servers,
            )
            peer.on_reply = self._mark_ordered
            self._peers.append(peer)
            peer.start()
        if not self._peers:
            log.warning(
                "name_servers_missing; namesrvAddr is empty, so clients can reach this broker"
                " only by its address"
            )

    async def stop(self) -> None:
        """Leave the name servers, so that clients stop coming at once."""
        peers, self._peers = self._peers, []
        await asyncio.gather(*(peer.stop() for peer in peers))

    @property
    def registered(self) -> int:
        """How many name servers know this broker."""
        return sum(peer.registered for peer in self._peers)

    def ready(self) -> tuple[bool, str]:
        if not self._addresses:
            return True, "no name servers are configured"
        why = "; ".join(f"{peer.name}: {peer.why}" for peer in self._peers if peer.why)
        if self.registered:
            return True, f"registered with {self.registered} of {len(self._addresses)} name servers"
        return False, f"not registered with any name server ({why or 'no answer yet'})"

    def renew(self) -> None:
        """Register soon: something that every registration carries has changed."""
        self._on_change(())

    async def announced(self) -> None:
        """Return once the name servers that answer know the last change, or after a moment."""
        attempts = [peer.settled() for peer in self._peers if peer.registered]
        if attempts:
            await asyncio.wait(attempts, timeout=ANNOUNCED_WAIT_SECONDS)

    def _on_change(self, configs: Sequence[TopicConfig]) -> None:
        for peer in self._peers:
            peer.changed(config.topic_name for config in configs)

    def _mark_ordered(self) -> None:
        tables = [peer.ordered for peer in self._peers if peer.ordered is not None]
        if tables:
            self._topics.mark_ordered(frozenset().union(*tables))


class _Peer:
    """The registration with one name server."""

    def __init__(
        self,
        options: BrokerOptions,
        topics: Topics,
        identity: Identity,
        channel: Channel,
        filter_servers: Callable[[], list[str]],
    ) -> None:
        self.name = f"{channel.host}:{channel.port}"
        self.registered = False
        self.why = ""
        self.ordered: frozenset[str] | None = None
        self.on_reply: Callable[[], None] = lambda: None
        self._options = options
        self._topics = topics
        self._identity = identity
        self._channel = channel
        self._filter_servers = filter_servers
        self._period_s = (
            min(max(options.register_name_server_period, PERIOD_MS_MIN), PERIOD_MS_MAX) / 1000
        )
        self._whole_sent = False  # over the present connection
        self._news: set[str] | None = None  # changed topics; empty: the whole table
        self._wake = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"register with {self.name}")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self._resolve(self._waiting)
        who = self._identity
        if self._channel.connected:
            try:
                await self._channel.call(
                    UnregisterBroker(
                        broker_name=who.broker_name,
                        broker_addr=who.address,
                        cluster_name=who.cluster,
                        broker_id=who.broker_id,
                    ),
                    timeout_ms=UNREGISTER_TIMEOUT_MS,
                )
            except CosmodromeError as error:
                log.warning("unregister_failed name_server=%s error=%s", self.name, error)
        self.registered = False
        await self._channel.close()

    def changed(self, topics: Iterable[str]) -> None:
        """Register soon; nothing named means that the whole table has to travel."""
        names = set(topics)
        if not names or self._news == set():
            self._news = set()
        else:
            self._news = (self._news or set()) | names
        self._wake.set()

    def settled(self) -> asyncio.Future[None]:
        """Done after the attempt that covers everything known now."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._news is None and self._task is not None and not self._waiting:
            future.set_result(None)
        else:
            self._waiting.append(future)
        return future

    async def _run(self) -> None:
        retry_s = RETRY_SECONDS_FIRST
        while True:
            news, self._news = self._news, None
            waiting, self._waiting = self._waiting, []
            self._wake.clear()
            done = await self._attempt(news)
            self._resolve(waiting)
            if done:
                retry_s, wait_s = RETRY_SECONDS_FIRST, self._period_s
            else:
                wait_s = min(retry_s, self._period_s)
                retry_s = min(retry_s * 2, self._period_s)
            await self._pause(wait_s)

    async def _pause(self, seconds: float) -> None:
        """Until something changes: the topics, the connection, or the time is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while (left := deadline - loop.time()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, WATCH_SECONDS)):
                    await self._wake.wait()
                    return
            if self.registered and not self._channel.connected:
                # The name server has dropped this broker; it may be back before the period ends.
                log.warning("name_server_lost name_server=%s; registering again", self.name)
                self.registered = False
                return

    async def _attempt(self, news: set[str] | None) -> bool:
        if not self._channel.connected:
            self._whole_sent = False
        try:
            if news is None and await self._is_known():
                return True
            await self._register(news if self._whole_sent and news else None)
        except CosmodromeError as error:
            if not self.why:
                log.warning(
                    "register_failed name_server=%s error=%s; trying again", self.name, error
                )
            return self._failed(str(error))
        except Exception as error:
            # A reply that cannot be understood must not end the task: clients would lose us.
            log.exception("register_failed name_server=%s", self.name)
            return self._failed(repr(error))
        if not self.registered:
            log.info("registered name_server=%s address=%s", self.name, self._identity.address)
        self.registered = True
        self.why = ""
        return True

    def _failed(self, why: str) -> bool:
        # While the connection stays open the name server keeps what it was told before.
        self.registered = self.registered and self._channel.connected
        self._whole_sent = False
        self.why = why
        return False

    async def _is_known(self) -> bool:
        """With forceRegister off: ask whether the table has to be sent at all."""
        if self._options.force_register or not self._whole_sent:
            return False
        who = self._identity
        reply = await self._channel.call(
            QueryDataVersion(
                broker_name=who.broker_name,
                broker_addr=who.address,
                cluster_name=who.cluster,
                broker_id=who.broker_id,
                body=bodies.encode(self._topics.version),
            ),
            timeout_ms=self._options.register_broker_timeout_mills,
        )
        return not reply.changed

    async def _register(self, names: set[str] | None) -> None:
        who = self._identity
        body = registration_body(
            self._topics.wrapper(names),
            filter_servers=self._filter_servers(),
            broker_permission=self._options.broker_permission,
            compressed=self._options.compressed_register,
        )
        reply = await self._channel.call(
            RegisterBroker(
                broker_name=who.broker_name,
                broker_addr=who.address,
                cluster_name=who.cluster,
                ha_server_addr=who.ha_address,
                broker_id=who.broker_id,
                compressed=self._options.compressed_register,
                body_crc32=zlib.crc32(body) & CRC_MASK,
                body=body,
            ),
            timeout_ms=self._options.register_broker_timeout_mills,
        )
        if names is None:
            self._whole_sent = True
        if reply.body:
            self.ordered = frozenset(bodies.decode(KVTable, reply.body).table)
            self.on_reply()

    def _resolve(self, waiting: list[asyncio.Future[None]]) -> None:
        for future in waiting:
            if not future.done():
                future.set_result(None)


def registration_body(
    wrapper: TopicConfigSerializeWrapper,
    *,
    broker_permission: int,
    compressed: bool,
    filter_servers: Sequence[str] = (),
) -> bytes:
    """What a registration carries."""
    if broker_permission & PERM_READ_WRITE != PERM_READ_WRITE:
        wrapper = TopicConfigSerializeWrapper(
            data_version=wrapper.data_version,
            topic_config_table=_lowered(wrapper.topic_config_table, broker_permission),
        )
    body = RegisterBrokerBody(
        topic_config_serialize_wrapper=wrapper, filter_server_list=list(filter_servers)
    )
    return bodies.encode_registration(body, compressed=compressed)


def _lowered(table: Mapping[str, TopicConfig], perm: int) -> dict[str, TopicConfig]:
    # Compat: a broker without read or write permission replaces the permission of each topic
    # and leaves its other attributes out.
    return {
        name: TopicConfig(
            topic_name=config.topic_name,
            read_queue_nums=config.read_queue_nums,
            write_queue_nums=config.write_queue_nums,
            perm=perm,
        )
        for name, config in table.items()
    }
