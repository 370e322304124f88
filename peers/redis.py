"""A real Redis with an append-only file, for its streams.

with RedisNode(tmp_path / "redis") as redis:
    ... redis.address ...; redis.call("CONFIG", "SET", "appendfsync", "always")
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from peers.debian import program
from peers.process import Process, Running, free_port

PACKAGES = (
    *("redis-server", "redis-tools", "libhiredis0.14", "liblzf1", "libjemalloc2"),
    *("liblua5.1-0", "lua-cjson", "lua-bitop"),
)


class RedisNode(Running):
    """One Redis with its files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        path, env = program("redis-server", PACKAGES)
        settings = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(folder),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "everysec",
            # Rewriting forks the server in the middle of a measurement.
            "auto-aof-rewrite-percentage": "0",
        }
        words = [word for key, value in settings.items() for word in (f"--{key}", value)]
        self._process = Process("redis", [path, *words], folder / "redis.log", env=env, cwd=folder)

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, *words: str) -> str:
        """The first line of the answer."""
        request = f"*{len(words)}\r\n" + "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(request.encode())
            line = connection.makefile("rb").readline().decode().rstrip()
        if line.startswith("-"):
            raise RuntimeError(f"Redis refused {' '.join(words)}: {line}")
        return line

    def version(self) -> str:
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(b"INFO server\r\n")
            for line in connection.makefile("rb"):
                if line.startswith(b"redis_version:"):
                    return line.split(b":")[1].decode().strip()
        return "of unknown version"

    def start(self, timeout_s: float = 90) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._process.start()
            self._process.wait_until(self._answers, timeout_s)
        except BaseException:
            self._process.kill9()
            raise

    def stop(self) -> None:
        self._process.stop()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError, RuntimeError):
            return self.call("PING") == "+PONG"
        return False
