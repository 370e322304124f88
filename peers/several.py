"""Several servers of one cluster, each a process of its own that a test may end, stop or pause.

    with Servers(tmp_path, "cosmodrome", brokers=["broker-a", "broker-b"]) as servers:
        servers.brokers["broker-b"].kill9()

The kind is `cosmodrome` (`cosmo namesrv run`, `cosmo broker run`) or `java` (upstream's own).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from peers.java import SERVER_HEAP, JavaCluster
from peers.process import NotReady, Process, Running, accepts, free_port
from peers.raw import clusters
from peers.resolve import ROOT

CLUSTER_NAME = JavaCluster.cluster_name


class Server:
    """One process and its port; start() after stop() or kill9() is a restart."""

    def __init__(self, port: int, process: Process, prepare: Callable[[], None]) -> None:
        self.port = port
        self.address = f"127.0.0.1:{port}"
        self.process = process
        self.prepare = prepare

    def start(self, timeout_s: float = 60) -> None:
        """Returns when the port is open."""
        self.prepare()
        self.process.start()
        self.process.wait_until(lambda: accepts(self.port), timeout_s)

    def stop(self) -> int | None:
        return self.process.stop()

    def kill9(self) -> None:
        self.process.kill9()

    def pause(self) -> None:
        """Connections stay open, nothing is answered."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        if self.process.running:
            os.kill(self.process.pid, signal.SIGCONT)

    def log_tail(self) -> str:
        return self.process.log_tail()


class Servers(Running):
    """Name servers that share nothing and brokers that register with all of them."""

    def __init__(
        self,
        folder: Path,
        kind: str,
        *,
        brokers: Sequence[str],
        name_servers: int = 1,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        make_name_server, make_broker = {
            "cosmodrome": (cosmo_name_server, cosmo_broker),
            "java": (java_name_server, java_broker),
        }[kind]
        self.name_servers = [
            make_name_server(folder / f"namesrv-{number}", free_port())
            for number in range(name_servers)
        ]
        self.namesrv = ";".join(server.address for server in self.name_servers)
        # Both kinds look at most this often; upstream would otherwise take half a minute.
        chosen = {"registerNameServerPeriod": "10000", **(settings or {})}
        self.brokers: dict[str, Server] = {}
        for name in brokers:
            names = {
                "brokerName": name,
                "brokerClusterName": CLUSTER_NAME,
                "namesrvAddr": self.namesrv,
            }
            self.brokers[name] = make_broker(folder / name, free_port(-2, 1), {**chosen, **names})

    def start(self) -> None:
        try:
            for server in (*self.name_servers, *self.brokers.values()):
                server.start()
            self.wait_known(*self.brokers)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        for server in (*self.brokers.values(), *self.name_servers):
            server.resume()
            server.stop()

    def known(self, name_server: int = 0) -> list[str]:
        """The brokers that this name server gives to clients."""
        return clusters(self.name_servers[name_server].port).get(CLUSTER_NAME, [])

    def wait_known(
        self, *names: str, name_servers: Sequence[int] | None = None, timeout_s: float = 90
    ) -> float:
        """Waits until the name servers know exactly these brokers; returns the seconds it took."""
        began = time.monotonic()
        chosen = range(len(self.name_servers)) if name_servers is None else name_servers
        while any(self.known(number) != sorted(names) for number in chosen):
            if time.monotonic() - began > timeout_s:
                found = {number: self.known(number) for number in chosen}
                logs = "\n".join(server.log_tail() for server in self.brokers.values())
                raise NotReady(f"name servers know {found}, not {sorted(names)}\n{logs}")
            time.sleep(0.05)
        return time.monotonic() - began


def _cosmo(folder: Path, role: str, port: int, words: Sequence[str]) -> Server:
    process = Process(
        f"cosmo {role}",
        [
            *(sys.executable, "-m", "cosmodrome.cli", role, "run"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *words,
        ],
        folder.with_name(f"{folder.name}.log"),
        env={"PYTHONPATH": str(ROOT / "src")},
    )
    return Server(port, process, lambda: folder.mkdir(parents=True, exist_ok=True))


def cosmo_name_server(folder: Path, port: int) -> Server:
    """`cosmo namesrv run`."""
    kept = folder / "kvConfig.json"
    return _cosmo(folder, "namesrv", port, ["--set", f"kvConfigPath={kept}"])


def cosmo_broker(folder: Path, port: int, settings: Mapping[str, str]) -> Server:
    """`cosmo broker run` with its store in `folder`."""
    words = [word for pair in settings.items() for word in ("--set", "=".join(pair))]
    return _cosmo(folder, "broker", port, ["--data", str(folder), *words])


def java_name_server(folder: Path, port: int) -> Server:
    """Upstream's name server."""
    pair = JavaCluster(folder, port, 1)
    return Server(port, pair.namesrv, pair.prepare)


def java_broker(
    folder: Path, port: int, settings: Mapping[str, str], heap: Sequence[str] = SERVER_HEAP
) -> Server:
    """Upstream's broker with its store in `folder/store`."""
    pair = JavaCluster(folder, 1, port, settings=settings, heap=heap)
    return Server(port, pair.broker, pair.prepare)
