"""Puts servers together from their settings and says where they are; `lifetime.py` runs them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys

import click

from cosmodrome import __version__, speed
from cosmodrome.broker.app import Broker, build_broker
from cosmodrome.cli import scraping, worker_link, workers
from cosmodrome.cli.lifetime import Logs, dialled, listen, run_until_told, running
from cosmodrome.cli.settings import Chosen
from cosmodrome.cli.worker_link import EXIT_SETTINGS, Report, WorkerLink
from cosmodrome.env.base import Env
from cosmodrome.env.options import (
    BrokerOptions,
    NameServerOptions,
    SocketOptions,
    StoreOptions,
)
from cosmodrome.env.real import real_env
from cosmodrome.errors import ConfigError
from cosmodrome.nameserver.app import NameServer, build_nameserver
from cosmodrome.transport.health import HealthServer

log = logging.getLogger("cosmo")


def run_up(chosen: Chosen, *, http_port: int, logs: Logs) -> None:
    assert chosen.broker is not None and chosen.nameserver is not None
    env = real_env()
    workers.refuse_unserved(chosen.broker.get(StoreOptions), 1, env.disk)
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
            {"/livez": lambda: (True, "alive"), "/readyz": ready, "/startupz": startup},
            pages={"/metrics": scraping.of_node(env, nameserver, lambda: broker).page},
        )
        async with running(nameserver, flag="--namesrv-port"):
            http = await listen(health.listen(host, http_port), "--http-port")
            try:
                broker = _broker(chosen, env, namesrv=nameserver.address)
                async with running(broker, flag="--broker-port"):
                    started = True
                    await _until_ready(broker)
                    seconds = asyncio.get_running_loop().time() - began
                    _say_up(chosen, nameserver, broker, f"{dialled(host)}:{http}", seconds)
                    await stop.wait()
                    log.info("stopping: draining requests and syncing the store")
            finally:
                await health.stop()

    run_until_told(serve, logs)


def run_nameserver(chosen: Chosen, *, http_port: int | None, logs: Logs) -> None:
    assert chosen.nameserver is not None
    env = real_env()
    nameserver = _nameserver(chosen, env)
    host = chosen.nameserver.get(NameServerOptions).bind_address

    def ready() -> tuple[bool, str]:
        return nameserver.ready, "ready" if nameserver.ready else "starting"

    async def serve(stop: asyncio.Event) -> None:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(running(nameserver, flag="--port"))
            where = ""
            if http_port is not None:
                health = HealthServer(
                    {"/livez": lambda: (True, "alive"), "/readyz": ready, "/startupz": ready},
                    pages={"/metrics": scraping.of_nameserver(env, nameserver).page},
                )
                stack.push_async_callback(health.stop)
                http = await listen(health.listen(host, http_port), "--http-port")
                where = f", health http://{dialled(host)}:{http}/readyz"
            address = nameserver.address
            click.echo(f"cosmodrome {__version__} name server is ready on {address}{where}")
            sys.stdout.flush()
            await stop.wait()

    run_until_told(serve, logs)


def run_broker(
    chosen: Chosen, *, http_port: int | None, logs: Logs, supervised: str | None = None
) -> None:
    """`supervised` is None, or the flag that moves this broker's port for its user."""
    assert chosen.broker is not None
    options = chosen.broker.get(BrokerOptions)
    if not options.namesrv_addr:
        raise ConfigError(
            "no name server given; use -n HOST:PORT, NAMESRV_ADDR or namesrvAddr in the file"
        )
    env = real_env()
    if supervised is None:
        workers.refuse_unserved(chosen.broker.get(StoreOptions), 1, env.disk)

    async def serve(stop: asyncio.Event) -> None:
        broker = _broker(chosen, env) if supervised is None else _broker_of_worker(chosen, env)
        started = False

        def startup() -> tuple[bool, str]:
            return (started, "started" if started else "starting: the store is recovering")

        http = 0

        def look() -> Report:
            return Report(*broker.ready(), address=broker.address if started else "", http=http)

        async with contextlib.AsyncExitStack() as stack:
            if supervised is not None:
                link = WorkerLink(look, stop.set)
                stack.push_async_callback(link.stop)
                await link.start()
            where = ""
            if http_port is not None:
                health = HealthServer(
                    {
                        "/livez": lambda: (True, "alive"),
                        "/readyz": broker.ready,
                        "/startupz": startup,
                    },
                    pages={"/metrics": scraping.of_broker(env, broker).page},
                )
                stack.push_async_callback(health.stop)
                # A worker's is for its supervisor, which gathers what all workers tell.
                host = options.bind_address if supervised is None else worker_link.HTTP_HOST
                http = await listen(health.listen(host, http_port), "--http-port")
                where = f", health http://{dialled(host)}:{http}/readyz"
            await stack.enter_async_context(running(broker, flag=supervised or "--port"))
            started = True
            if supervised is None:
                click.echo(f"cosmodrome {__version__} broker is ready on {broker.address}{where}")
            await stop.wait()
            log.info("stopping: draining requests and syncing the store")

    run_until_told(serve, logs)


async def _until_ready(broker: Broker) -> None:
    """Registration takes a few milliseconds; say "ready" only when clients would agree."""
    for _ in range(200):
        if broker.ready()[0]:
            return
        await asyncio.sleep(0.01)
    log.warning("not ready yet reason=%r", broker.ready()[1])


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


def _broker_of_worker(chosen: Chosen, env: Env) -> Broker:
    try:
        return _broker(chosen, env)
    except ConfigError as error:
        click.echo(f"cosmo: {error}", err=True)
        sys.exit(EXIT_SETTINGS)


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
