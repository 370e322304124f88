"""A real etcd, of one member or several, with ports and files of its own.

with EtcdCluster(tmp_path, 3) as etcd:
    ... etcd.endpoints ...; etcd.call("kv/compaction", {"revision": "3"}); etcd.leader().kill()
"""

from __future__ import annotations

import contextlib
import json
import shutil
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.debian import program
from peers.process import Process, Running, free_port


def etcd_program() -> tuple[str, dict[str, str]]:
    """Path of the server and what its environment needs; unpacked if it is not installed."""
    return program("etcd", ["etcd-server"])


class EtcdMember(Running):
    """One process. It may be killed, emptied and started again."""

    def __init__(self, name: str, folder: Path, scheme: str, trust: ssl.SSLContext | None) -> None:
        self.name = name
        self.folder = folder
        self.endpoint = f"{scheme}://127.0.0.1:{free_port()}"
        self.peer = f"http://127.0.0.1:{free_port()}"
        self._trust = trust
        self._process: Process | None = None

    def configure(self, cluster: str, options: Sequence[str]) -> None:
        path, env = etcd_program()
        settings = {
            "name": self.name,
            "data-dir": str(self.folder / "data"),
            "listen-client-urls": self.endpoint,
            "advertise-client-urls": self.endpoint,
            "listen-peer-urls": self.peer,
            "initial-advertise-peer-urls": self.peer,
            "initial-cluster": cluster,
        }
        words = [f"--{key}={value}" for key, value in settings.items()]
        log = self.folder / "etcd.log"
        self._process = Process(f"etcd {self.name}", [path, *words, *options], log, env=env)

    def begin(self) -> None:
        """Start it, and do not wait: a member of several needs the others."""
        self.folder.mkdir(parents=True, exist_ok=True)
        assert self._process is not None
        self._process.start()

    def start(self) -> None:
        self.begin()
        assert self._process is not None
        self._process.wait_until(self.is_ready, 120)

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill9()

    def empty(self) -> None:
        """Another etcd, without data, takes its place."""
        self.kill()
        shutil.rmtree(self.folder / "data")
        self.start()

    def call(self, path: str, body: Mapping[str, Any], token: str = "") -> dict[str, Any]:
        """One POST to the gateway, and its answer."""
        headers = {"Authorization": token} if token else {}
        request = urllib.request.Request(
            f"{self.endpoint}/v3/{path}", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=60, context=self._trust) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def id(self) -> str:
        """What etcd calls it."""
        return str(self.call("maintenance/status", {})["header"]["member_id"])

    def is_ready(self) -> bool:
        """Whether it sees a leader."""
        with contextlib.suppress(OSError, urllib.error.URLError):
            return bool(self.call("maintenance/status", {}).get("leader"))
        return False


class EtcdCluster(Running):
    """Members with their files in `folder`, and perhaps certificates as `cosmo tls` makes them."""

    def __init__(
        self,
        folder: Path,
        members: int = 1,
        *,
        certificates: Path | None = None,
        options: Sequence[str] = (),
    ) -> None:
        trust = None
        if certificates is not None:
            trust = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
            trust.load_cert_chain(certificates / "client.pem", certificates / "client.key")
            files = {"cert-file": "server.pem", "key-file": "server.key"}
            options = [*options, *(f"--{key}={certificates / n}" for key, n in files.items())]
        scheme = "http" if trust is None else "https"
        names = [f"m{number}" for number in range(members)]
        self.members = [EtcdMember(name, folder / name, scheme, trust) for name in names]
        cluster = ",".join(f"{member.name}={member.peer}" for member in self.members)
        for member in self.members:
            member.configure(cluster, options)

    @property
    def endpoints(self) -> str:
        return ",".join(member.endpoint for member in self.members)

    def start(self) -> None:
        try:
            for member in self.members:
                member.begin()
            for member in self.members:
                member.start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        for member in self.members:
            member.stop()

    def leader(self) -> EtcdMember:
        """The member that leads now, by the word of the first that answers."""
        for member in self.members:
            with contextlib.suppress(OSError, urllib.error.URLError):
                leader = member.call("maintenance/status", {})["leader"]
                return next(m for m in self.members if m.id() == leader)
        raise RuntimeError("no member of etcd answers")
