"""The filter server's process; apart from `servers.py`, because brokers start without this code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys

import click

from cosmodrome import __version__
from cosmodrome.cli.serve.lifetime import Logs, health_port, probe_url, run_until_stopped, running
from cosmodrome.cli.support.settings import Chosen
from cosmodrome.env.options import FilterServerOptions, SocketOptions, TlsOptions
from cosmodrome.env.real import real_env
from cosmodrome.filterserver.app import FilterServer, build_filterserver
from cosmodrome.transport.certificates import Tls
from cosmodrome.transport.http.health import HealthServer

log = logging.getLogger("cosmo")

EXIT_FILTERS_ABANDONED = 1


def run_filterserver(chosen: Chosen, *, http_port: int | None, logs: Logs) -> None:
    settings = chosen.filterserver
    assert settings is not None
    options = settings.get(FilterServerOptions)
    sockets = settings.get(SocketOptions)

    async def serve(stop: asyncio.Event) -> None:
        env = real_env()
        tls = Tls(settings.get(TlsOptions), env)
        server = build_filterserver(options, sockets, env, tls)
        health = HealthServer(
            {
                "/livez": lambda: (True, "alive"),
                "/readyz": server.ready,
                "/startupz": lambda: (True, "started"),
            },
            door=tls.door,
        )
        async with (
            running(tls, flag=""),
            running(server, flag="--port"),
            contextlib.AsyncExitStack() as stack,
        ):
            where = ""
            if http_port is not None:
                http = await health_port(stack, health, options.bind_address, http_port)
                where = f", health {probe_url(http, tls)}"
            await _filter(server, where, stop)
        if server.overdue:
            # Their threads cannot be ended, and an ordinary exit would wait for them.
            log.error("filters_abandoned count=%d; they did not come back", server.overdue)
            logging.shutdown()
            os._exit(EXIT_FILTERS_ABANDONED)

    run_until_stopped(serve, logs)


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
