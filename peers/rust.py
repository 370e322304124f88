"""The Rust reimplementation of RocketMQ, from crates.io: name server and broker.

with RustNode(tmp_path / "rust", flush="ASYNC_FLUSH") as node:
    ... node.address ...

Building it takes half an hour on two cores and happens once; `is_built` says whether it has.
"""

from __future__ import annotations

from pathlib import Path

from peers.process import Process, Running, accepts, free_port
from peers.resolve import BUILD, make_once, require, run_with_tries

VERSION = "1.0.0"
_FOLDER = BUILD / "rust"
_CRATES = ("rocketmq-namesrv", "rocketmq-broker")
_BUILD_TIMEOUT_S = 3 * 3600


def _binary(crate: str) -> Path:
    return _FOLDER / "bin" / f"{crate}-rust"


def is_built() -> bool:
    return all(_binary(crate).exists() for crate in _CRATES)


def build() -> None:
    """Both servers, if they are not there."""

    def make() -> None:
        require("cargo")
        words = ["cargo", "install", "--root", str(_FOLDER)]
        words += [f"{crate}@{VERSION}" for crate in _CRATES]
        env = {"CARGO_TARGET_DIR": str(_FOLDER / "target")}
        BUILD.mkdir(parents=True, exist_ok=True)
        run_with_tries(words, cwd=BUILD, env=env, timeout_s=_BUILD_TIMEOUT_S)

    make_once("rust", [VERSION], _binary(_CRATES[-1]), make)


class RustNode(Running):
    """A name server and a broker with their files in `folder`."""

    def __init__(self, folder: Path, *, flush: str) -> None:
        build()
        self.folder = folder
        self.port = free_port(-2, 1)
        self.address = f"127.0.0.1:{self.port}"
        self._namesrv_port = free_port()
        self._flush = flush
        self._config = folder / "broker.properties"
        self._namesrv = self._process(_CRATES[0], "--listenPort", str(self._namesrv_port))
        self._broker = self._process(_CRATES[1], "-c", str(self._config))

    @property
    def pid(self) -> int:
        """Of the broker."""
        return self._broker.pid

    def start(self, timeout_s: float = 60) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "brokerName": "rust",
            "brokerIP1": "127.0.0.1",
            "listenPort": self.port,
            "haListenPort": self.port + 1,
            "namesrvAddr": f"127.0.0.1:{self._namesrv_port}",
            "storePathRootDir": self.folder / "store",
            "flushDiskType": self._flush,
        }
        lines = [f"{name}={value}\n" for name, value in settings.items()]
        self._config.write_text("".join(lines))
        try:
            self._namesrv.start()
            self._namesrv.wait_until(lambda: accepts(self._namesrv_port), timeout_s)
            self._broker.start()
            self._broker.wait_until(lambda: accepts(self.port), timeout_s)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self._broker.stop()
        self._namesrv.stop()

    def _process(self, crate: str, *words: str) -> Process:
        command = [str(_binary(crate)), *words]
        env = {"ROCKETMQ_HOME": str(self.folder)}
        return Process(crate, command, self.folder / f"{crate}.log", env, self.folder)
