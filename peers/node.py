"""Our own node, `cosmo up`, as a subprocess: name server, broker and health port.

with CosmoNode(tmp_path / "data") as node:
    ... node.namesrv_address, node.broker_address ...
"""

from __future__ import annotations

import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from peers.process import Process, Running, free_port
from peers.resolve import ROOT


class CosmoNode(Running):
    """One `cosmo up` with its files in `data`; start() after stop() or kill9() is a restart.

    Ports not given are chosen among the free ones. The broker also takes broker_port - 2 (VIP).
    `options` are further words of the command line; the log is `<data>.log`, beside the folder.
    With `tls` the node is asked over TLS whether it is ready.
    """

    def __init__(
        self,
        data: Path,
        namesrv_port: int | None = None,
        broker_port: int | None = None,
        http_port: int | None = None,
        *,
        options: Sequence[str] = (),
        tls: ssl.SSLContext | None = None,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = (sys.executable, "-m", "cosmodrome.cli"),
    ) -> None:
        self.data = data
        self._tls = tls
        self.namesrv_port = namesrv_port or free_port()
        self.broker_port = broker_port or free_port(-2, 1)
        self.http_port = http_port or free_port()
        self.namesrv_address = f"127.0.0.1:{self.namesrv_port}"
        self.broker_address = f"127.0.0.1:{self.broker_port}"
        self.process = Process(
            "cosmo up",
            [
                *program,
                "up",
                *("--data", str(data), "--host", "127.0.0.1"),
                *("--namesrv-port", str(self.namesrv_port)),
                *("--broker-port", str(self.broker_port)),
                *("--http-port", str(self.http_port)),
                *options,
            ],
            data.with_name(f"{data.name}.log"),
            # An installed package has its compiled files, whatever this environment says of them.
            env={"PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "", **(env or {})},
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self, timeout_s: float = 90) -> None:
        """Returns when /readyz answers 200."""
        self.data.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.process.start()
            self.process.wait_until(self.is_ready, timeout_s)
        except BaseException:
            self.kill9()
            raise

    def is_ready(self) -> bool:
        try:
            scheme = "http" if self._tls is None else "https"
            with urllib.request.urlopen(
                f"{scheme}://127.0.0.1:{self.http_port}/readyz", timeout=2, context=self._tls
            ) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def stop(self) -> int | None:
        """SIGTERM, then SIGKILL to a node that does not end. Returns the exit code."""
        return self.process.stop()

    def kill9(self) -> None:
        self.process.kill9()
