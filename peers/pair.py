"""A master and its slave, each of either kind, with one name server between them.

    with Pair(tmp_path, master="java", slave="cosmodrome") as pair:
        pair.wait_linked()
        pair.slave.kill9()

Both keep their files over stop() and kill9(), so start() again is a restart.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from peers.java import SERVER_HEAP, JavaCluster
from peers.process import NotReady, Running, free_port
from peers.raw import call
from peers.several import CLUSTER_NAME, Server, cosmo_broker, cosmo_name_server, java_broker

OURS, JAVA = "cosmodrome", "java"
BROKER_NAME = JavaCluster.broker_name
MASTER_ID, SLAVE_ID = 0, 1

Settings = Mapping[str, str]


class Broker(Server):
    """One half of a pair."""

    def __init__(self, kind: str, folder: Path, server: Server, store: Path) -> None:
        super().__init__(server.port, server.process, server.prepare)
        self.kind = kind
        self.folder = folder
        self.store = store

    def start(self, timeout_s: float = 60) -> None:
        """Returns when it answers."""
        super().start(timeout_s)
        self.process.wait_until(lambda: bool(self.runtime()), timeout_s)

    @property
    def ha_port(self) -> int:
        return self.port + 1

    @property
    def end(self) -> int:
        """Of the log, as the broker says it (runtime info); 0 while it does not answer."""
        return int(self.runtime().get("commitLogMaxOffset", 0))

    def runtime(self) -> dict[str, str]:
        """Upstream's key-value report about a broker; empty without an answer."""
        try:
            code, _, _, data = call(self.port, 28)
        except (OSError, ValueError):
            return {}
        table = json.loads(data)["table"] if code == 0 else {}
        return {str(key): str(value) for key, value in table.items()}


class Pair(Running):
    """`settings` are those of both; what is chosen for one of them wins."""

    def __init__(
        self,
        folder: Path,
        *,
        master: str = OURS,
        slave: str = OURS,
        role: str = "SYNC_MASTER",
        settings: Settings | None = None,
        master_settings: Settings | None = None,
        slave_settings: Settings | None = None,
        heap: Sequence[str] = SERVER_HEAP,
    ) -> None:
        self.name_server = cosmo_name_server(folder / "namesrv", free_port())
        self.namesrv = self.name_server.address
        shared = {
            "brokerName": BROKER_NAME,
            "brokerClusterName": CLUSTER_NAME,
            "namesrvAddr": self.namesrv,
            # Upstream would otherwise take half a minute to learn about the other half.
            "registerNameServerPeriod": "10000",
            **(settings or {}),
        }

        def make(name: str, kind: str, own: Settings, chosen: Settings | None) -> Broker:
            port = free_port(-2, 1)
            ha = {"haListenPort": str(port + 1)}
            every = {**shared, **ha, **own, **(chosen or {})}
            if kind == JAVA:
                server = java_broker(folder / name, port, every, heap)
                return Broker(kind, folder / name, server, folder / name / "store")
            server = cosmo_broker(folder / name, port, every)
            return Broker(kind, folder / name, server, folder / name)

        self.master = make(
            "master", master, {"brokerRole": role, "brokerId": str(MASTER_ID)}, master_settings
        )
        self.slave = make(
            "slave", slave, {"brokerRole": "SLAVE", "brokerId": str(SLAVE_ID)}, slave_settings
        )

    @property
    def brokers(self) -> tuple[Broker, Broker]:
        return self.master, self.slave

    def start(self) -> None:
        """Both are known; whether they are linked is `wait_linked`'s."""
        try:
            self.start_master()
            self.slave.start()
            self.wait_registered(MASTER_ID, SLAVE_ID)
        except BaseException:
            self.stop()
            raise

    def start_master(self) -> None:
        """The name server and the master alone; it is known when this returns."""
        self.name_server.start()
        self.master.start()
        self.wait_registered(MASTER_ID)

    def stop(self) -> None:
        for server in (self.slave, self.master, self.name_server):
            server.resume()
            server.kill9()

    def registered(self) -> dict[int, str]:
        """Addresses of the pair by broker id, as the name server gives them."""
        try:
            _, _, _, data = call(self.name_server.port, 106)
        except (OSError, ValueError):
            return {}
        found = re.search(rb'"brokerAddrs":\{([^{}]*)\}', data)
        pairs = re.findall(rb'"?(\d+)"?:"([^"]+)"', found[1]) if found else []
        return {int(number): address.decode() for number, address in pairs}

    def wait_registered(self, *ids: int, timeout_s: float = 60) -> None:
        self.wait(lambda: set(ids) <= set(self.registered()), timeout_s)

    def wait_linked(self, timeout_s: float = 60) -> None:
        """Until the slave has all that the master has now."""
        end = self.master.end
        self.wait(lambda: self.slave.end >= end, timeout_s)

    def wait(self, done: Callable[[], bool], timeout_s: float) -> None:
        """Polls; what is raised when nothing came of it ends with what the brokers said."""
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline:
                logs = "\n".join(broker.log_tail() for broker in self.brokers)
                raise NotReady(f"the pair was not ready after {timeout_s} s\n{logs}")
            time.sleep(0.05)
