"""Registration with the name servers, so that clients find this broker.

Every name server has its own task and its own connection, which stays open: a name server drops a
broker whose connection closes. One that is down is tried again soon at first, later once per
period, and never delays the others.

A registration carries the whole topic table, except right after a change: then only the changed
topics travel, provided this very connection has carried the whole table before. A name server
that restarted therefore always hears the whole table first.

A large table travels in parts, so that no frame is too large and neither side is busy for long. A
name server adds what a part names to what it knows, if the part's version is another one than that
of the part before. Only the last part has the version of the table. While the table stays as it is,
its first part says that the broker is alive.

The answer to a slave's registration says where its master is. A slave that looks for its master
registers again soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from cosmodrome.broker.address import parse_address
from cosmodrome.broker.members.table_file import row_bytes
from cosmodrome.broker.members.topics import PERM_READ_WRITE, Topics
from cosmodrome.env.background import Background
from cosmodrome.env.backoff import Backoff
from cosmodrome.env.options import BrokerOptions
from cosmodrome.env.ports import NAMESRV_PORT
from cosmodrome.env.signal import Signal
from cosmodrome.errors import CosmodromeError
from cosmodrome.layout import CRC_MASK
from cosmodrome.transport.channel import Channel
from cosmodrome.wire import bodies, registration
from cosmodrome.wire.bodies import (
    MASTER_ID,
    DataVersion,
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
PART_BYTES = 1024 * 1024  # of topics in one registration
LOOK_SECONDS_FIRST = 0.5  # between the registrations of a slave that looks for its master
LOOK_SECONDS_MAX = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """Who registers: as the name servers and, through them, all clients see it."""

    cluster: str
    broker_name: str
    broker_id: int
    address: str
    ha_address: str


@dataclasses.dataclass(frozen=True, slots=True)
class Master:
    """Where a slave's master is, as a name server says."""

    address: str
    ha_address: str


def _nobody_looks() -> bool:
    return False


def parse_name_servers(text: str) -> list[tuple[str, int]]:
    """`host:port;host:port` as pairs, each once; ConfigError says which part is wrong."""
    found: dict[tuple[str, int], None] = {}
    for part in text.split(";"):
        part = part.strip()
        if not part:
            continue
        address = parse_address(
            "namesrvAddr", part, example_port=NAMESRV_PORT, form="host:port;host:port"
        )
        found[address] = None
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
        # A slave hears with each registration where its master is, and whether it has to look
        # for it is asked before each pause.
        self.found_master: Signal[Master] = Signal()
        self.looks_for_master: Callable[[], bool] = _nobody_looks
        topics.changed.subscribe(self._on_change)

    async def start(self, identity: Identity) -> None:
        if self._peers:
            return
        for host, port in self._addresses:
            channel = self._connect(host, port)
            peer = _Peer(self._options, self._topics, identity, channel, self._filter_servers)
            peer.on_reply = self._mark_ordered
            peer.on_master = self.found_master.fire
            peer.looks_for_master = self.looks_for_master
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
        """Return when the name servers that answer know the last change, or after a moment."""
        attempts = [peer.attempted() for peer in self._peers if peer.registered]
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
        self.name = channel.name
        self.registered = False
        self.why = ""
        self.ordered: frozenset[str] | None = None
        self.on_reply: Callable[[], None] = lambda: None
        self.on_master: Callable[[Master], None] = lambda master: None
        self.looks_for_master: Callable[[], bool] = _nobody_looks
        self._options = options
        self._topics = topics
        self._identity = identity
        self._channel = channel
        self._filter_servers = filter_servers
        self._period_s = (
            min(max(options.register_name_server_period, PERIOD_MS_MIN), PERIOD_MS_MAX) / 1000
        )
        self._whole_sent = False  # over the present connection
        self._version_sent: DataVersion | None = None  # of the whole table, over it
        self._news: set[str] | None = None  # changed topics; empty: the whole table
        self._wake = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self._registering = Background(f"register with {self.name}")
        self._back_off = Backoff(min(RETRY_SECONDS_FIRST, self._period_s), self._period_s)
        self._look_again = Backoff(LOOK_SECONDS_FIRST, LOOK_SECONDS_MAX)

    def start(self) -> None:
        self._registering.start(self._run)

    async def stop(self) -> None:
        await self._registering.stop()
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

    def attempted(self) -> asyncio.Future[None]:
        """A future that is done after the attempt that covers everything known now."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._news is None and self._registering.running and not self._waiting:
            future.set_result(None)
        else:
            self._waiting.append(future)
        return future

    async def _run(self) -> None:
        while True:
            news, self._news = self._news, None
            waiting, self._waiting = self._waiting, []
            self._wake.clear()
            done = await self._attempt(news)
            self._resolve(waiting)
            if done:
                self._back_off.reset()
                await self._pause(self._until_next_s())
            else:
                await self._pause(self._back_off.next_s())

    def _until_next_s(self) -> float:
        if self.looks_for_master():
            return self._look_again.next_s()
        self._look_again.reset()
        return self._period_s

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
            if deadline - loop.time() > LOOK_SECONDS_MAX and self.looks_for_master():
                return

    async def _attempt(self, news: set[str] | None) -> bool:
        if not self._channel.connected:
            self._whole_sent = False
            self._version_sent = None
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
        # The name server may still have what it was told before, but not for long.
        self.registered = False
        self._whole_sent = False
        self._version_sent = None
        self.why = why
        return False

    async def _is_known(self) -> bool:
        """With forceRegister off: ask whether the table has to be sent at all."""
        if self._options.force_register or not self._whole_sent or self.looks_for_master():
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
        whole = self._topics.wrapper(names)
        known = names is None and whole.data_version == self._version_sent
        for part in parts_of(whole):
            if known:
                part.data_version = whole.data_version
            await self._send(part)
            if known:
                break
        self._whole_sent = True  # now or, when only changes travel, before
        self._version_sent = whole.data_version

    async def _send(self, part: TopicConfigSerializeWrapper) -> None:
        who = self._identity
        body = registration_body(
            part,
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
        if reply.master_addr and reply.ha_server_addr and who.broker_id != MASTER_ID:
            self.on_master(Master(reply.master_addr, reply.ha_server_addr))
        if reply.body:
            self.ordered = frozenset(bodies.decode(KVTable, reply.body).table)
            self.on_reply()

    def _resolve(self, waiting: list[asyncio.Future[None]]) -> None:
        for future in waiting:
            if not future.done():
                future.set_result(None)


def parts_of(whole: TopicConfigSerializeWrapper) -> Iterator[TopicConfigSerializeWrapper]:
    """Topics in parts of about `PART_BYTES`, at least one part, each with a version of its own."""
    part: dict[str, TopicConfig] = {}
    left, number = PART_BYTES, 0
    for name, config in whole.topic_config_table.items():
        size = row_bytes(name, config)
        if left < size and part:
            number += 1
            # No table has such a time, so no name server takes the part for one that it has.
            version = DataVersion(counter=whole.data_version.counter, timestamp=-number)
            yield TopicConfigSerializeWrapper(data_version=version, topic_config_table=part)
            part, left = {}, PART_BYTES
        part[name] = config
        left -= size
    yield TopicConfigSerializeWrapper(data_version=whole.data_version, topic_config_table=part)


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
    return registration.encode(body, compressed=compressed)


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
