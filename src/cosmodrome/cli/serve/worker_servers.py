"""`cosmo up` and `cosmo broker run` with `--workers N`: N brokers, each a process of its own.

The supervising process holds the health port and, for `cosmo up`, the name server. It touches no
message: clients see N ordinary brokers of one cluster and spread over them by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence

import click

from cosmodrome import __version__, speed
from cosmodrome.cli.serve import log_format, scraping, workers
from cosmodrome.cli.serve.lifetime import Logs, health_port, probe_url, run_until_stopped, running
from cosmodrome.cli.serve.servers import check_slave
from cosmodrome.cli.serve.supervise import PREFIXED, Child, Pacing, Supervisor
from cosmodrome.cli.serve.worker_metrics import WorkerMetrics
from cosmodrome.cli.serve.workers import Ports, Seat
from cosmodrome.cli.support.settings import Chosen
from cosmodrome.env.base import Env, FileLock
from cosmodrome.env.options import (
    BrokerOptions,
    NameServerOptions,
    SocketOptions,
    StoreOptions,
    TlsOptions,
)
from cosmodrome.env.real import real_env
from cosmodrome.errors import ConfigError
from cosmodrome.nameserver.app import build_nameserver
from cosmodrome.transport.certificates import Tls
from cosmodrome.transport.http.exposition import Exposition
from cosmodrome.transport.http.health import HealthServer
from cosmodrome.transport.ports import VIP_OFFSET, broker_name_of_machine

log = logging.getLogger("cosmo")

LOCK_NAME = "workers.lock"
LOOK_SECONDS = 0.02
LOOK_SECONDS_LATER = 0.5
WARN_SECONDS = 10.0
EXIT_KILLED = 1


def run_up(chosen: Chosen, count: int, *, http_port: int, logs: Logs) -> None:
    assert chosen.broker is not None and chosen.nameserver is not None
    options = chosen.nameserver.get(NameServerOptions)
    check_slave(chosen.broker.get(BrokerOptions), chosen.broker.get(StoreOptions))
    env = real_env()
    tls = Tls(chosen.broker.get(TlsOptions), env)
    nameserver = build_nameserver(options, chosen.nameserver.get(SocketOptions), env, tls.door)
    fleet = _Fleet(
        chosen,
        count,
        env,
        logs,
        tls=tls,
        flag="--broker-port",
        has_http=True,
        taken={options.listen_port: "the name server", http_port: "the health port"},
    )
    others = [address for address in fleet.broker.namesrv_addr.split(";") if address]

    async def serve(stop: asyncio.Event) -> None:
        began = asyncio.get_running_loop().time()
        async with running(nameserver, flag="--namesrv-port"):
            supervisor = fleet.build(";".join([nameserver.address, *others]))

            def say(http: str) -> None:
                seconds = asyncio.get_running_loop().time() - began
                fleet.say_up(nameserver.address, http, seconds)

            own = scraping.of_nameserver(env, nameserver)
            await fleet.serve(supervisor, http_port, stop, say, own)

    run_until_stopped(serve, logs, at_once=fleet.kill)
    fleet.exit()


def run_broker(chosen: Chosen, count: int, *, http_port: int | None, logs: Logs) -> None:
    assert chosen.broker is not None
    taken = {} if http_port is None else {http_port: "the health port"}
    env = real_env()
    fleet = _Fleet(
        chosen,
        count,
        env,
        logs,
        tls=Tls(chosen.broker.get(TlsOptions), env),
        flag="--port",
        has_http=http_port is not None,
        taken=taken,
    )
    if not fleet.broker.namesrv_addr:
        raise ConfigError(
            "no name server given; use -n HOST:PORT, NAMESRV_ADDR or namesrvAddr in the file"
        )

    async def serve(stop: asyncio.Event) -> None:
        supervisor = fleet.build(fleet.broker.namesrv_addr)

        def say(http: str) -> None:
            health = f", health {fleet.probe_url(http)}" if http else ""
            where = ", ".join(fleet.addresses())
            click.echo(f"cosmodrome {__version__}: {count} brokers are ready on {where}{health}")

        await fleet.serve(supervisor, http_port, stop, say, None)

    run_until_stopped(serve, logs, at_once=fleet.kill)
    fleet.exit()


def describe(chosen: Chosen, count: int) -> str:
    """The workers as comments below the settings that --print-config shows."""
    assert chosen.broker is not None
    broker = chosen.broker.get(BrokerOptions)
    found = workers.seats(broker, chosen.broker.get(StoreOptions), count, name=_name(broker))
    return "".join(
        f"# worker {seat.number}: listenPort={seat.port} storePathRootDir={seat.root}"
        f" {' '.join(seat.pairs())}\n"
        for seat in found
    )


class _Fleet:
    """The workers of one command, from their settings to their end."""

    def __init__(
        self,
        chosen: Chosen,
        count: int,
        env: Env,
        logs: Logs,
        *,
        tls: Tls,
        flag: str,
        has_http: bool,
        taken: dict[int, str],
    ) -> None:
        assert chosen.broker is not None
        self.broker = chosen.broker.get(BrokerOptions)
        self._store = chosen.broker.get(StoreOptions)
        self._words = chosen.broker_words
        self._disk = env.disk
        self._logs = logs
        self._tls = tls
        self._has_http = has_http
        self._flag = flag
        self._ports = Ports(self.broker.bind_address)
        self._supervisor: Supervisor | None = None
        self.seats = workers.seats(
            self.broker, self._store, count, name=_name(self.broker), taken=taken
        )
        workers.refuse_unserved(self._store, count, env.disk)

    def build(self, name_servers: str) -> Supervisor:
        mark = log_format.of_worker if self._logs.form == log_format.JSON else PREFIXED
        self._supervisor = Supervisor(
            [
                Child(seat.name, self._command(seat, name_servers), say_line, Pacing(), mark)
                for seat in self.seats
            ]
        )
        return self._supervisor

    async def serve(
        self,
        supervisor: Supervisor,
        http_port: int | None,
        stop: asyncio.Event,
        say: Callable[[str], None],
        own: Exposition | None,
    ) -> None:
        """Serve until the stop. When all are ready, `say` is called with the health address.

        `own` are the metrics of this process, shown beside those of the workers.
        """
        health = HealthServer(
            {
                "/livez": lambda: (True, "alive"),
                "/readyz": supervisor.ready,
                "/startupz": supervisor.started,
            },
            pages={"/metrics": WorkerMetrics(supervisor.children, own).page},
            door=self._tls.door,
        )
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(running(self._tls, flag=""))
            stack.callback(self._lock().release)
            http = ""
            if http_port is not None:
                http = await health_port(stack, health, self.broker.bind_address, http_port)
            stack.push_async_callback(supervisor.stop)
            await supervisor.start()
            if await _all_ready(supervisor, stop):
                say(http)
                sys.stdout.flush()
            await stop.wait()
            log.info("stopping: all workers stop cleanly")

    def kill(self) -> None:
        if self._supervisor is not None:
            self._supervisor.kill()

    def exit(self) -> None:
        if self._supervisor is not None and not self._supervisor.all_stopped_cleanly:
            sys.exit(EXIT_KILLED)

    def addresses(self) -> list[str]:
        assert self._supervisor is not None
        return [
            child.report.address if child.report is not None else "?"
            for child in self._supervisor.children
        ]

    def probe_url(self, http: str) -> str:
        return probe_url(http, self._tls)

    def say_up(self, nameserver: str, http: str, seconds: float) -> None:
        brokers = "\n".join(
            f"  broker       {address}  ({seat.name} in {self.broker.broker_cluster_name},"
            f" VIP port {_vip_port(address)})"
            for seat, address in zip(self.seats, self.addresses(), strict=True)
        )
        root = self._store.store_path_root_dir
        count = len(self.seats)
        click.echo(
            f"""cosmodrome {__version__} is ready after {seconds:.2f} s with {count} workers
  name server  {nameserver}
{brokers}
  health       {self.probe_url(http)}
  data         {root}  ({self._store.flush_disk_type})
  core         {speed.FLAVOUR}
  Ctrl-C stops all cleanly; what was acknowledged is kept"""
        )

    def _lock(self) -> FileLock:
        """One supervisor per directory: a worker between two lives does not hold its own lock."""
        root = self._store.store_path_root_dir
        try:
            return self._disk.lock(os.path.join(root, LOCK_NAME))
        except OSError as error:
            raise ConfigError(
                f"{root} cannot be used: {error.strerror}; choose another directory with --data"
            ) from None

    def _command(self, seat: Seat, name_servers: str) -> Callable[[bool], Sequence[str]]:
        def words(useless: bool) -> Sequence[str]:
            # A port that is ours to choose may have been taken by somebody else meanwhile.
            port = seat.port or self._ports.of(seat.number, anew=useless)
            options = {
                "--supervised": self._flag,
                "-n": name_servers,
                "--host": self.broker.bind_address,
                "--data": seat.root,
                "--port": str(port),
                "--log-level": self._logs.level,
                "--log-format": self._logs.form,
            }
            if self._has_http:
                options["--http-port"] = "0"
            return [
                sys.executable,
                *_safe_path(),
                "-m",
                "cosmodrome.cli",
                "broker",
                "run",
                *self._words,
                *(word for pair in seat.pairs() for word in ("--set", pair)),
                *(word for option in options.items() for word in option),
            ]

        return words


async def _all_ready(supervisor: Supervisor, stop: asyncio.Event) -> bool:
    """Wait until all are ready, however long that takes; False when the stop came first."""
    loop = asyncio.get_running_loop()
    warn_at = loop.time() + WARN_SECONDS
    pause_s = LOOK_SECONDS
    while not stop.is_set():
        ready, text = supervisor.ready()
        if ready:
            return True
        if supervisor.is_misconfigured:
            raise ConfigError("the workers refuse their settings; their lines above say which")
        if loop.time() >= warn_at:
            warn_at, pause_s = float("inf"), LOOK_SECONDS_LATER
            log.warning("not ready yet reason=%r", text)
        await asyncio.sleep(pause_s)
    return False


def say_line(line: str) -> None:
    """A line of a worker, on stderr. A broken stderr must not end the listening to workers."""
    with contextlib.suppress(OSError, ValueError):
        click.echo(line, err=True)


def _name(broker: BrokerOptions) -> str:
    return broker.broker_name or broker_name_of_machine()


def _vip_port(address: str) -> int:
    return int(address.rpartition(":")[2]) + VIP_OFFSET


def _safe_path() -> list[str]:
    """`-m` alone would import what lies in the current directory, which `cosmo` does not."""
    return [] if os.getcwd() in sys.path else ["-P"]
