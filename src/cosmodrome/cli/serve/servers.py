"""Puts servers together from their settings and says where they are; `lifetime.py` runs them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys

import click

from cosmodrome import __version__, speed
from cosmodrome.broker.app import Broker, build_broker
from cosmodrome.cli.serve import scraping, worker_link, workers
from cosmodrome.cli.serve.lifetime import (
    Logs,
    health_port,
    probe_url,
    run_until_stopped,
    running,
)
from cosmodrome.cli.serve.worker_link import EXIT_SETTINGS, Report, WorkerLink
from cosmodrome.cli.support.settings import Chosen
from cosmodrome.env.base import Env
from cosmodrome.env.options import (
    BrokerOptions,
    NameServerOptions,
    SocketOptions,
    StoreOptions,
    TlsOptions,
)
from cosmodrome.env.real import real_env
from cosmodrome.errors import ConfigError
from cosmodrome.nameserver.app import NameServer, build_nameserver
from cosmodrome.transport.certificates import Tls
from cosmodrome.transport.http.health import HealthServer

log = logging.getLogger("cosmo")


def run_up(chosen: Chosen, *, http_port: int, logs: Logs) -> None:
    assert chosen.broker is not None and chosen.nameserver is not None
    env = real_env()
    check_slave(chosen.broker.get(BrokerOptions), chosen.broker.get(StoreOptions))
    workers.refuse_unserved(chosen.broker.get(StoreOptions), 1, env.disk)
    tls = Tls(chosen.broker.get(TlsOptions), env)
    nameserver = _nameserver(chosen, env, tls)

    async def serve(stop: asyncio.Event) -> None:
        began = asyncio.get_running_loop().time()
        started = False
        broker: Broker | None = None

        def startup() -> tuple[bool, str]:
            return (started, "started" if started else "starting: the store is recovering")

        def ready() -> tuple[bool, str]:
            return broker.ready() if started and broker is not None else startup()

        health = HealthServer(
            {"/livez": lambda: (True, "alive"), "/readyz": ready, "/startupz": startup},
            pages={"/metrics": scraping.of_node(env, nameserver, lambda: broker).page},
            door=tls.door,
        )
        async with (
            running(tls, flag=""),
            running(nameserver, flag="--namesrv-port"),
            contextlib.AsyncExitStack() as stack,
        ):
            http = await health_port(stack, health, _bind_address(chosen), http_port)
            broker = _broker(chosen, env, tls, namesrv=nameserver.address)
            async with running(broker, flag="--broker-port"):
                started = True
                await _until_ready(broker)
                seconds = asyncio.get_running_loop().time() - began
                _say_up(chosen, nameserver, broker, probe_url(http, tls), seconds)
                await stop.wait()
                log.info("stopping: draining requests and syncing the store")

    run_until_stopped(serve, logs)


def run_nameserver(chosen: Chosen, *, http_port: int | None, logs: Logs) -> None:
    assert chosen.nameserver is not None
    env = real_env()
    tls = Tls(chosen.nameserver.get(TlsOptions), env)
    nameserver = _nameserver(chosen, env, tls)
    host = chosen.nameserver.get(NameServerOptions).bind_address

    def ready() -> tuple[bool, str]:
        return nameserver.ready, "ready" if nameserver.ready else "starting"

    async def serve(stop: asyncio.Event) -> None:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(running(tls, flag=""))
            await stack.enter_async_context(running(nameserver, flag="--port"))
            where = ""
            if http_port is not None:
                health = HealthServer(
                    {"/livez": lambda: (True, "alive"), "/readyz": ready, "/startupz": ready},
                    pages={"/metrics": scraping.of_nameserver(env, nameserver).page},
                    door=tls.door,
                )
                http = await health_port(stack, health, host, http_port)
                where = f", health {probe_url(http, tls)}"
            address = nameserver.address
            click.echo(f"cosmodrome {__version__} name server is ready on {address}{where}")
            sys.stdout.flush()
            await stop.wait()

    run_until_stopped(serve, logs)


def run_broker(
    chosen: Chosen, *, http_port: int | None, logs: Logs, supervised: str | None = None
) -> None:
    """`supervised` is None, or the flag that moves this broker's port for its user."""
    assert chosen.broker is not None
    options = chosen.broker.get(BrokerOptions)
    if not options.namesrv_addr and not chosen.broker.get(StoreOptions).ha_master_address:
        raise ConfigError(
            "no name server given; use -n HOST:PORT, NAMESRV_ADDR or namesrvAddr in the file"
        )
    env = real_env()
    if supervised is None:
        workers.refuse_unserved(chosen.broker.get(StoreOptions), 1, env.disk)

    async def serve(stop: asyncio.Event) -> None:
        tls, broker = _parts(chosen, env, supervised=supervised is not None)
        started = False

        def startup() -> tuple[bool, str]:
            return (started, "started" if started else "starting: the store is recovering")

        http = ""

        def look() -> Report:
            port = int(http.rpartition(":")[2] or 0)
            return Report(*broker.ready(), address=broker.address if started else "", http=port)

        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(running(tls, flag=""))
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
                    door=tls.door if supervised is None else None,
                )
                # A worker's is for its supervisor, which gathers what all workers tell.
                host = options.bind_address if supervised is None else worker_link.HTTP_HOST
                http = await health_port(stack, health, host, http_port)
                where = f", health {probe_url(http, tls)}"
            await stack.enter_async_context(running(broker, flag=supervised or "--port"))
            started = True
            if supervised is None:
                click.echo(f"cosmodrome {__version__} broker is ready on {broker.address}{where}")
            await stop.wait()
            log.info("stopping: draining requests and syncing the store")

    run_until_stopped(serve, logs)


def check_slave(broker: BrokerOptions, store: StoreOptions) -> None:
    """The name server of `cosmo up` alone does not know where the master of a slave is."""
    known = broker.namesrv_addr or store.ha_master_address
    if store.broker_role == "SLAVE" and not known:
        raise ConfigError(
            "brokerRole is SLAVE, and `cosmo up` starts a name server that its master does not"
            " know; set namesrvAddr to the name servers of the master, or use `cosmo broker run`"
        )


async def _until_ready(broker: Broker) -> None:
    """Registration takes a few milliseconds; say "ready" only when clients would agree."""
    for _ in range(200):
        if broker.ready()[0]:
            return
        await asyncio.sleep(0.01)
    log.warning("not ready yet reason=%r", broker.ready()[1])


def _nameserver(chosen: Chosen, env: Env, tls: Tls) -> NameServer:
    assert chosen.nameserver is not None
    settings = chosen.nameserver
    return build_nameserver(
        settings.get(NameServerOptions), settings.get(SocketOptions), env, tls.door
    )


def _broker(chosen: Chosen, env: Env, tls: Tls, *, namesrv: str = "") -> Broker:
    assert chosen.broker is not None
    options = chosen.broker.get(BrokerOptions)
    if namesrv:
        from msgspec.structs import replace

        others = [address for address in options.namesrv_addr.split(";") if address]
        options = replace(options, namesrv_addr=";".join([namesrv, *others]))
    return build_broker(
        options, chosen.broker.get(StoreOptions), chosen.broker.get(SocketOptions), env, tls
    )


def _parts(chosen: Chosen, env: Env, *, supervised: bool) -> tuple[Tls, Broker]:
    """What a broker's process runs."""
    assert chosen.broker is not None
    try:
        tls = Tls(chosen.broker.get(TlsOptions), env)
        return tls, _broker(chosen, env, tls)
    except ConfigError as error:
        if not supervised:
            raise
        click.echo(f"cosmo: {error}", err=True)
        sys.exit(EXIT_SETTINGS)


def _bind_address(chosen: Chosen) -> str:
    assert chosen.broker is not None
    return chosen.broker.get(BrokerOptions).bind_address


def _say_up(
    chosen: Chosen, nameserver: NameServer, broker: Broker, health: str, seconds: float
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
  health       {health}
  data         {store.store_path_root_dir}  ({store.flush_disk_type}: {promise})
  core         {speed.FLAVOUR}

Try next:
  echo hello | {cosmo} produce Demo -n {nameserver.address}
  {cosmo} consume Demo -n {nameserver.address} --count 1
  point any RocketMQ client at {nameserver.address}; unknown topics are created by the first send
  curl {health}
  Ctrl-C stops cleanly; what was acknowledged is kept"""
    )
    sys.stdout.flush()
