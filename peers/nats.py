"""A real NATS server with JetStream, from Go's module proxy or, without Go, from Debian.

with NatsNode(tmp_path / "nats", sync_always=False) as nats:
    ... nats.address ...; nats.make_stream("Bench", "bench.*")
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from pathlib import Path

from peers.debian import program
from peers.process import Process, Running, accepts, free_port
from peers.resolve import BUILD, make_once, run_with_tries

VERSION = "2.11.4"
_MODULE = "github.com/nats-io/nats-server/v2"


def server() -> str:
    """Path of the server; a server on PATH or of Debian may be older than VERSION."""
    if shutil.which("go") is None:
        return program("nats-server", ["nats-server"])[0]
    folder = BUILD / "nats"
    product = folder / "nats-server"

    def make() -> None:
        env = {"GOBIN": str(folder), "GOMODCACHE": str(BUILD / "gomod"), "CGO_ENABLED": "0"}
        words = ["go", "install", "-modcacherw", f"{_MODULE}@v{VERSION}"]
        run_with_tries(words, cwd=BUILD, env=env)

    return str(make_once("nats", [VERSION], product, make))


class NatsNode(Running):
    """One server with its files in `folder`. `sync_always` syncs every message before its ack."""

    def __init__(self, folder: Path, *, sync_always: bool) -> None:
        self.folder = folder
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._path = server()
        self._config = folder / "nats.conf"
        self._sync_always = sync_always
        command = [self._path, "-c", str(self._config)]
        self._process = Process("nats", command, folder / "nats.log", cwd=folder)

    @property
    def pid(self) -> int:
        return self._process.pid

    def version(self) -> str:
        said = subprocess.run([self._path, "-v"], capture_output=True, text=True).stdout
        return said.split()[-1].lstrip("v") if said.split() else "of unknown version"

    def make_stream(self, name: str, subject: str) -> None:
        """A stream in files, without limits."""
        ask = {"name": name, "subjects": [subject], "storage": "file", "num_replicas": 1}
        body = json.dumps(ask).encode()
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            connection.sendall(
                b'CONNECT {"verbose":false,"headers":true}\r\nSUB _INBOX.make 1\r\n'
                b"PUB $JS.API.STREAM.CREATE.%s _INBOX.make %d\r\n%s\r\n"
                % (name.encode(), len(body), body)
            )
            lines = connection.makefile("rb")
            for line in lines:
                if line.startswith(b"-ERR"):
                    raise RuntimeError(f"NATS refused the stream: {line.decode()}")
                if line.startswith(b"MSG"):
                    answer = json.loads(lines.read(int(line.split()[-1])))
                    if "error" in answer:
                        raise RuntimeError(f"NATS refused the stream: {answer['error']}")
                    return
        raise RuntimeError("NATS hung up instead of making a stream")

    def start(self, timeout_s: float = 90) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        sync = "sync_interval: always" if self._sync_always else ""
        self._config.write_text(
            f"listen: 127.0.0.1:{self.port}\n"
            f'jetstream {{ store_dir: "{self.folder / "data"}"\n max_file: 64GB\n {sync} }}\n'
        )
        try:
            self._process.start()
            self._process.wait_until(lambda: accepts(self.port), timeout_s)
        except BaseException:
            self._process.kill9()
            raise

    def stop(self) -> None:
        self._process.stop()
