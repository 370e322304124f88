"""The filter server's process; apart from `serve.py`, because brokers start without this code."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

import click

from cosmodrome import __version__
from cosmodrome.cli.lifetime import Logs, dialled, listen, run_until_told, running
from cosmodrome.cli.settings import Chosen
from cosmodrome.env.options import FilterServerOptions, SocketOptions
from cosmodrome.env.real import real_env
from cosmodrome.filterserver.app import FilterServer, build_filterserver
from cosmodrome.transport.health import HealthServer

log = logging.getLogger("cosmo")

EXIT_FILTERS_ABANDONED = 1


def run_filterserver(chosen: Chosen, *, http_port: int | None, logs: Logs) -> None:
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
        async with running(server, flag="--port"):
            try:
                where = ""
                if http_port is not None:
                    http = await listen(
                        health.listen(options.bind_address, http_port), "--http-port"
                    )
                    where = f", health http://{dialled(options.bind_address)}:{http}/readyz"
                await _filter(server, where, stop)
            finally:
                await health.stop()
        if server.overdue:
            # Their threads cannot be ended, and an ordinary exit would wait for them.
            log.error("filters_abandoned count=%d; they did not come back", server.overdue)
            logging.shutdown()
            os._exit(EXIT_FILTERS_ABANDONED)

    run_until_told(serve, logs)


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
