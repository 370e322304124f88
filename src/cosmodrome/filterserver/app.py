"""The filter server put together: a process beside one broker that filters for its consumers.

Start: filters, socket, registration. Stop: the connection to the broker first, which takes this
server out of the routes and ends the pulls that wait there, then the clients.
"""

from __future__ import annotations

import logging
import re

from cosmodrome.env.base import Env
from cosmodrome.env.options import FilterServerOptions, SocketOptions, TlsOptions
from cosmodrome.env.ports import BROKER_DEFAULT
from cosmodrome.errors import ConfigError
from cosmodrome.filterserver.choices import Choices
from cosmodrome.filterserver.enrolment import Enrolment
from cosmodrome.filterserver.filters import Installed
from cosmodrome.filterserver.pulls import Pulls
from cosmodrome.filterserver.sieve import Sieve
from cosmodrome.transport.certificates import Tls
from cosmodrome.transport.channel import Channel
from cosmodrome.transport.ports import advertised_host
from cosmodrome.transport.router import Router
from cosmodrome.transport.server import Server
from cosmodrome.wire.message import join_address
from cosmodrome.wire.table import FILTERSERVER

log = logging.getLogger(__name__)

SPARE_CALLS = 8  # registrations go over the same channel as pulls and must not wait behind them
_ADDRESS = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\]):([0-9]{1,5})\Z")


class FilterServer:
    """A running filter server as its process sees it."""

    def __init__(
        self,
        options: FilterServerOptions,
        installed: Installed,
        sieve: Sieve,
        channel: Channel,
        enrolment: Enrolment,
        server: Server,
    ) -> None:
        self._options = options
        self._installed = installed
        self._sieve = sieve
        self._channel = channel
        self._enrolment = enrolment
        self._server = server
        self._started = False
        self.port = options.listen_port

    @property
    def address(self) -> str:
        """host:port as consumers are told."""
        host = self._options.filter_server_ip or advertised_host(self._options.bind_address)
        return join_address(host, self.port)

    @property
    def broker_name(self) -> str:
        return self._enrolment.broker_name

    @property
    def filters(self) -> list[str]:
        """Names of the filters in use."""
        return self._installed.names()

    @property
    def overdue(self) -> int:
        """Filters that hold a thread and do not come back."""
        return self._sieve.overdue

    async def start(self) -> None:
        if self._started:
            return
        self._started = True
        try:
            await self._installed.load()
            self.port = await self._server.listen(
                self._options.bind_address, self._options.listen_port
            )
            await self._enrolment.start(self.address)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        if not self._started:
            return
        self._started = False
        await self._enrolment.stop()
        await self._channel.close()
        await self._server.stop()

    async def reload(self) -> None:
        """Read the filters again; a set that does not load leaves the old one in use."""
        try:
            await self._installed.load()
        except ConfigError as error:
            log.error("filters_not_reloaded error=%s; those loaded before stay in use", error)

    def ready(self) -> tuple[bool, str]:
        """Whether consumers can use this server, and why not."""
        registered, text = self._enrolment.ready()
        late = f", {self.overdue} do not come back" if self.overdue else ""
        return registered, f"{text}; {len(self._installed)} filters installed{late}"


def build_filterserver(
    options: FilterServerOptions, sockets: SocketOptions, env: Env, tls: Tls | None = None
) -> FilterServer:
    """`tls` belongs to the process, which starts and stops it."""
    tls = tls or Tls(TlsOptions(), env)
    if not options.filter_path:
        raise ConfigError("filterPath is empty; name the folder of the filters")
    channel = Channel(
        *parse_broker(options.connect_which_broker),
        in_flight_max=options.pulls_in_flight_max + SPARE_CALLS,
        tls=tls.outgoing,
    )
    installed = Installed(options.filter_path, env)
    choices = Choices(installed)
    sieve = Sieve(env.offload, options.filter_timeout_millis)
    pulls = Pulls(channel, choices, sieve, options.pulls_in_flight_max)
    router = Router(FILTERSERVER, (choices, pulls))
    server = Server(router, sockets, "filter server", door=tls.door)
    return FilterServer(options, installed, sieve, channel, Enrolment(channel), server)


def parse_broker(text: str) -> tuple[str, int]:
    """`host:port` of the one broker; ConfigError says what is wrong with it."""
    match = _ADDRESS.match(text.strip())
    if match is None or not 1 <= int(match[2]) <= 65_535:
        raise ConfigError(
            f"connectWhichBroker is {text[:128]!r}; name one broker as host:port, for example"
            f" {BROKER_DEFAULT} (each broker has filter servers of its own)"
        )
    return match[1].strip("[]"), int(match[2])
