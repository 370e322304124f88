"""Registration with the broker, so that consumers find this filter server in their routes.

It is repeated every 10 seconds over the connection that carries the pulls, too. A broker drops a
filter server that is silent for 30 seconds or whose connection closes, so a lost connection is
made again at once.
"""

from __future__ import annotations

import asyncio
import logging

from cosmodrome.env.background import Background
from cosmodrome.errors import Code, ConfigError, CosmodromeError, Refused
from cosmodrome.transport.channel import Channel
from cosmodrome.wire.commands.filter import RegisterFilterServer

log = logging.getLogger(__name__)

PERIOD_SECONDS = 10.0
WATCH_SECONDS = 1.0
START_SECONDS = 10.0  # how long a broker that starts at the same time is waited for
TIMEOUT_MS = 3000


class Enrolment:
    def __init__(
        self, broker: Channel, *, period_s: float = PERIOD_SECONDS, start_s: float = START_SECONDS
    ) -> None:
        self._broker = broker
        self._period_s = period_s
        self._start_s = start_s
        self._address = ""
        self._why = "not registered yet"
        self._repetition = Background("register with the broker")
        self.broker_name = ""

    async def start(self, address: str) -> None:
        """Be registered under `address` when this returns; ConfigError when that fails."""
        if self._repetition.running:
            return
        self._address = address
        deadline = asyncio.get_running_loop().time() + self._start_s
        while True:
            try:
                await self._register()
                break
            except CosmodromeError as error:
                if isinstance(error, Refused) or asyncio.get_running_loop().time() > deadline:
                    raise ConfigError(self._explained(error)) from error
            await asyncio.sleep(min(WATCH_SECONDS, self._start_s / 10))
        self._why = ""
        log.info(
            "registered broker=%s broker_address=%s address=%s",
            self.broker_name,
            self._broker.name,
            self._address,
        )
        self._repetition.start(self._run)

    async def stop(self) -> None:
        await self._repetition.stop()
        self._why = "stopped"

    def ready(self) -> tuple[bool, str]:
        if not self._why and self._broker.connected:
            return True, f"registered with broker {self.broker_name} at {self._broker.name}"
        return (
            False,
            f"not registered with the broker at {self._broker.name}: {self._why or 'lost'}",
        )

    async def _run(self) -> None:
        while True:
            await self._pause()
            try:
                await self._register()
            except Exception as error:
                # Anything: a task that ends here would silently take this server out of routes.
                if not self._why:
                    log.warning(
                        "register_failed broker_address=%s error=%s; trying again",
                        self._broker.name,
                        error,
                    )
                self._why = str(error)
            else:
                if self._why:
                    log.info("registered_again broker_address=%s", self._broker.name)
                self._why = ""

    async def _pause(self) -> None:
        """Until the period is over, the connection is lost, or a failed attempt is a moment old."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._period_s
        watch_s = min(WATCH_SECONDS, self._period_s)
        while loop.time() < deadline:
            await asyncio.sleep(watch_s)
            if self._why or not self._broker.connected:
                return

    async def _register(self) -> None:
        reply = await self._broker.call(
            RegisterFilterServer(filter_server_addr=self._address), timeout_ms=TIMEOUT_MS
        )
        self.broker_name = reply.broker_name

    def _explained(self, error: CosmodromeError) -> str:
        if isinstance(error, Refused) and error.code == Code.REQUEST_CODE_NOT_SUPPORTED:
            return (
                f"{self._broker.name} takes no filter servers ({error.remark}); connectWhichBroker"
                " has to name a broker that does"
            )
        return (
            f"cannot register with the broker {self._broker.name}: {error}; start the broker first,"
            " or name another one with connectWhichBroker"
        )
