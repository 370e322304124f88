"""Runs servers until they are told to stop: loop, logging, signals, the first lines printed.

SIGTERM and SIGINT drain and stop cleanly; a second one ends the process at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Protocol

import click

from cosmodrome import __version__, speed
from cosmodrome.broker.app import Broker, build_broker
from cosmodrome.cli.settings import Chosen
from cosmodrome.env.base import Env
from cosmodrome.env.options import (
    BrokerOptions,
    FilterServerOptions,
    NameServerOptions,
    SocketOptions,
    StoreOptions,
)
from cosmodrome.env.real import real_env
from cosmodrome.errors import ConfigError
from cosmodrome.filterserver.app import FilterServer, build_filterserver
from cosmodrome.nameserver.app import NameServer, build_nameserver
from cosmodrome.transport.health import HealthServer

log = logging.getLogger("cosmo")

EXIT_SECOND_SIGNAL = 130
EXIT_FILTERS_ABANDONED = 1
# A supervisor may signal the process and its group: that is one wish, not impatience.
SAME_SIGNAL_SECONDS = 1.0


class Part(Protocol):
    async def start(self) -> None: ...
    async def stop(self) -> None: ...


def run_up(chosen: Chosen, *, http_port: int, log_level: str) -> None:
    assert chosen.broker is not None and chosen.nameserver is not None
    env = real_env()
    nameserver = _nameserver(chosen, env)

    async def serve(stop: asyncio.Event) -> None:
        began = asyncio.get_running_loop().time()
        started = False
        broker: Broker | None = None

        def startup() -> tuple[bool, str]:
            return (started, "started" if started else "starting: the store is recovering")

        def ready() -> tuple[bool, str]:
            return broker.ready() if started and broker is not None else startup()

        host = _bind_address(chosen)
        health = HealthServer(
            {"/livez": lambda: (True, "alive"), "/readyz": ready, "/startupz": startup}
        )
        async with _running(nameserver, flag="--namesrv-port"):
            http = await _listen(health.listen(host, http_port), "--http-port")
            try:
                broker = _broker(chosen, env, namesrv=nameserver.address)
                async with _running(broker, flag="--broker-port"):
                    started = True
                    await _until_ready(broker)
                    seconds = asyncio.get_running_loop().time() - began
                    _say_up(chosen, nameserver, broker, f"{_dialled(host)}:{http}", seconds)
                    await stop.wait()
                    log.info("stopping: draining requests and syncing the store")
            finally:
                await health.stop()

    _run(serve, log_level)


def run_nameserver(chosen: Chosen, *, log_level: str) -> None:
    nameserver = _nameserver(chosen, real_env())

    async def serve(stop: asyncio.Event) -> None:
        async with _running(nameserver, flag="--port"):
            click.echo(f"cosmodrome {__version__} name server is ready on {nameserver.address}")
            await stop.wait()

    _run(serve, log_level)


def run_broker(chosen: Chosen, *, log_level: str) -> None:
    assert chosen.broker is not None
    if not chosen.broker.get(BrokerOptions).namesrv_addr:
        raise ConfigError(
            "no name server given; use -n HOST:PORT, NAMESRV_ADDR or namesrvAddr in the file"
        )

    async def serve(stop: asyncio.Event) -> None:
        broker = _broker(chosen, real_env())
        async with _running(broker, flag="--port"):
            click.echo(f"cosmodrome {__version__} broker is ready on {broker.address}")
            await stop.wait()
            log.info("stopping: draining requests and syncing the store")

    _run(serve, log_level)


def run_filterserver(chosen: Chosen, *, http_port: int | None, log_level: str) -> None:
    assert chosen.filterserver is not None
    options = chosen.filterserver.get(FilterServerOptions)
    sockets = chosen.filterserver.get(SocketOptions)

    async def serve(stop: asyncio.Event) -> None:
        server = build_filterserver(options, sockets, real_env())
        health = HealthServer(
            {
                "/livez": lambda: (True, "alive"),
                "/readyz": server.ready,
                "/startupz": lambda: (True, "started"),
            }
        )
        async with _running(server, flag="--port"):
            try:
                where = ""
                if http_port is not None:
                    http = await _listen(
                        health.listen(options.bind_address, http_port), "--http-port"
                    )
                    where = f", health http://{_dialled(options.bind_address)}:{http}/readyz"
                await _filter(server, where, stop)
            finally:
                await health.stop()
        if server.overdue:
            # Their threads cannot be ended, and an ordinary exit would wait for them.
            log.error("filters_abandoned count=%d; they did not come back", server.overdue)
            logging.shutdown()
            os._exit(EXIT_FILTERS_ABANDONED)

    _run(serve, log_level)


async def _filter(server: FilterServer, where: str, stop: asyncio.Event) -> None:
    """Until the stop; SIGHUP reads the filters again."""
    reloads: set[asyncio.Task[None]] = set()

    def reload() -> None:
        task = asyncio.create_task(server.reload())
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
    click.echo(
        f"cosmodrome {__version__} filter server of broker {server.broker_name} is ready on"
        f" {server.address}, filters: {', '.join(server.filters) or 'none'}{where}"
    )
    sys.stdout.flush()
    await stop.wait()


class _running:
    """Start a part, stop it on the way out, and explain a port that is taken."""

    def __init__(self, part: Part, *, flag: str) -> None:
        self._part = part
        self._flag = flag

    async def __aenter__(self) -> None:
        try:
            await self._part.start()
        except BaseException as error:
            await self._part.stop()
            if isinstance(error, OSError | ConfigError):
                raise _explained(error, self._flag) from None
            raise

    async def __aexit__(self, *_: object) -> None:
        await self._part.stop()


async def _listen(work: Awaitable[int], flag: str) -> int:
    try:
        return await work
    except (OSError, ConfigError) as error:
        raise _explained(error, flag) from None


def _explained(error: OSError | ConfigError, flag: str) -> ConfigError:
    """Say which flag of this command moves a port that is taken."""
    text = str(error)
    if "address already in use" in text.lower():
        text = (
            f"{text.split('; ')[0]}; stop what uses it or choose a port with {flag} (0 picks one)"
        )
    return ConfigError(text)


async def _until_ready(broker: Broker) -> None:
    """Registration takes a few milliseconds; say "ready" only when clients would agree."""
    for _ in range(200):
        if broker.ready()[0]:
            return
        await asyncio.sleep(0.01)
    log.warning("not ready yet reason=%r", broker.ready()[1])


def _run(serve: Callable[[asyncio.Event], Awaitable[None]], log_level: str) -> None:
    logging.basicConfig(
        level=log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    if speed.FLAVOUR == "pure":
        log.warning("the compiled core is not loaded: slower, same behaviour; see README")

    async def guarded() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        first_at = 0.0

        def asked() -> None:
            nonlocal first_at
            if not stop.is_set():
                first_at = loop.time()
                stop.set()
            elif loop.time() - first_at > SAME_SIGNAL_SECONDS:
                os._exit(EXIT_SECOND_SIGNAL)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, asked)
        await serve(stop)

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(guarded())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _nameserver(chosen: Chosen, env: Env) -> NameServer:
    assert chosen.nameserver is not None
    return build_nameserver(
        chosen.nameserver.get(NameServerOptions), chosen.nameserver.get(SocketOptions), env
    )


def _broker(chosen: Chosen, env: Env, *, namesrv: str = "") -> Broker:
    assert chosen.broker is not None
    options = chosen.broker.get(BrokerOptions)
    if namesrv:
        from msgspec.structs import replace

        others = [address for address in options.namesrv_addr.split(";") if address]
        options = replace(options, namesrv_addr=";".join([namesrv, *others]))
    return build_broker(
        options, chosen.broker.get(StoreOptions), chosen.broker.get(SocketOptions), env
    )


def _dialled(host: str) -> str:
    """Where to reach a server that listens on `host`, from this machine."""
    return "127.0.0.1" if host in ("", "0.0.0.0", "::") else host


def _bind_address(chosen: Chosen) -> str:
    assert chosen.broker is not None
    return chosen.broker.get(BrokerOptions).bind_address


def _say_up(
    chosen: Chosen, nameserver: NameServer, broker: Broker, http: str, seconds: float
) -> None:
    assert chosen.broker is not None
    store = chosen.broker.get(StoreOptions)
    promise = {
        "SYNC_FLUSH": "an acknowledgement means synced to disk",
        "ASYNC_FLUSH": "an acknowledgement means in the page cache",
    }[store.flush_disk_type]
    cosmo = sys.argv[0] if sys.argv[0].endswith("cosmo") else "cosmo"  # as it was called
    click.echo(
        f"""cosmodrome {__version__} is ready after {seconds:.2f} s
  name server  {nameserver.address}
  broker       {broker.address}  ({broker.name} in {broker.cluster}, VIP port {broker.vip_port})
  health       http://{http}/readyz
  data         {store.store_path_root_dir}  ({store.flush_disk_type}: {promise})
  core         {speed.FLAVOUR}

Try next:
  echo hello | {cosmo} produce Demo -n {nameserver.address}
  {cosmo} consume Demo -n {nameserver.address} --count 1
  point any RocketMQ client at {nameserver.address}; unknown topics are created by the first send
  curl http://{http}/readyz
  Ctrl-C stops cleanly; what was acknowledged is kept"""
    )
    sys.stdout.flush()
