"""One recording session: the real name server and broker behind recording proxies.

It hides ports, directories and how the Java programs of `tools/golden/java` are built and run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.java import JavaCluster, class_path, java_command
from peers.process import dying_with_parent, free_port
from peers.resolve import BUILD, make_once, require, run_with_tries

from tools.golden.recorder import Names, Recorder

HERE = Path(__file__).parent

# Files so small that a few hundred messages fill several of each kind.
STORE_SETTINGS = {
    "mappedFileSizeCommitLog": "16384",
    "mappedFileSizeConsumeQueue": "1000",
    "maxHashSlotNum": "50",
    "maxIndexNum": "100",
}
BROKER_SETTINGS = {
    **STORE_SETTINGS,
    "flushDiskType": "SYNC_FLUSH",
    "enablePropertyFilter": "true",
    # A message may not be larger than a file of the log.
    "maxMessageSize": "8192",
}
_IPV4 = "-Djava.net.preferIPv4Stack=true"
STORE_PARTS = ("commitlog", "consumequeue", "index", "config", "checkpoint", "abort")


@dataclass(frozen=True, slots=True)
class Scene:
    """Running servers, and the addresses of the proxies in front of them."""

    cluster: JavaCluster
    recorder: Recorder
    namesrv: str
    broker: str

    @property
    def neutral(self) -> Mapping[bytes, bytes]:
        """Texts that tell of this machine, and texts of the same length that do not."""
        directory = str(self.cluster.directory).encode()
        found = {directory: b"/srv/rocketmq".ljust(len(directory), b"_")[: len(directory)]}
        for address in _own_addresses():
            plain = next(text for text in _DOCUMENTATION if len(text) == len(address))
            found[address.encode()] = plain.encode()
            # Message ids begin with the address in hexadecimal digits.
            digits = socket.inet_aton(address).hex()
            found[digits.encode()] = b"c0000202"
            found[digits.upper().encode()] = b"C0000202"
        return found


# Addresses set aside for documentation, one of each length.
_DOCUMENTATION = (
    *("1.1.1.1", "10.0.0.2", "192.0.2.2", "192.0.2.20", "192.0.2.200", "198.51.100.2"),
    *("198.51.100.20", "198.51.100.200", "198.051.100.200"),
)


def _own_addresses() -> set[str]:
    """IPv4 addresses by which the clients on this machine name themselves."""
    found = set()
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        found.add(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found |= set(socket.gethostbyname_ex(socket.gethostname())[2])
    return {address for address in found if not address.startswith("127.")}


def classes() -> Path:
    """Folder with our compiled Java programs."""
    sources = sorted((HERE / "java").glob("*.java"))
    libraries = class_path("client")
    folder = BUILD / "golden-classes"

    def make() -> None:
        require("javac")
        folder.mkdir(parents=True, exist_ok=True)
        command = ["javac", "-nowarn", "-encoding", "UTF-8", "-cp", libraries, "-d", str(folder)]
        run_with_tries([*command, *map(str, sources)], cwd=HERE)

    return make_once("golden-classes", [*sources, libraries], folder, make)


def program(name: str, *words: str, home: Path, header: str = "JSON") -> list[str]:
    """The command of one of our Java programs."""
    return [
        # Message ids hold the address of the machine; IPv4 ones are shorter.
        *java_command("-Xmx256m", f"-Duser.home={home}", _IPV4, header=header),
        "-cp",
        os.pathsep.join([str(classes()), class_path("client")]),
        f"cosmodrome.golden.{name}",
        *words,
    ]


def code_names(home: Path) -> tuple[Names, Names]:
    """Names of request and response codes as the Java constants have them."""
    done = subprocess.run(program("Scenarios", "codes", home=home), stdout=-1, check=True)
    requests, responses = json.loads(done.stdout)
    return (
        {int(code): name for code, name in requests.items()},
        {int(code): name for code, name in responses.items()},
    )


@contextlib.contextmanager
def scene(directory: Path, names: tuple[Names, Names], header: str = "JSON") -> Iterator[Scene]:
    """Servers that write below `directory`; stopped, and their last frames recorded, at the end."""
    namesrv_port, broker_port = free_port(), free_port(-2, 1)
    namesrv_proxy, broker_proxy = free_port(), free_port()
    recorder = Recorder(*names)
    try:
        own, announced = f"127.0.0.1:{broker_port}", f"127.0.0.1:{broker_proxy}"
        recorder.listen("ns", namesrv_proxy, namesrv_port, (own.encode(), announced.encode()))
        recorder.listen("broker", broker_proxy, broker_port)
        settings = {**BROKER_SETTINGS, "namesrvAddr": f"127.0.0.1:{namesrv_proxy}"}
        cluster = JavaCluster(
            directory, namesrv_port, broker_port, settings=settings, header=header
        )
        with cluster:
            yield Scene(cluster, recorder, f"127.0.0.1:{namesrv_proxy}", announced)
    finally:
        recorder.close()


def play(stage: Scene, bulk: int, header: str, wanted: Sequence[str] = ()) -> None:
    """Runs the wanted scenarios of the Java client, or all."""
    home = stage.cluster.directory
    words = ("all", stage.namesrv, stage.broker, str(bulk), ",".join(wanted))
    with (home / "scenarios.log").open("wb") as log:
        child = subprocess.Popen(
            dying_with_parent(program("Scenarios", *words, home=home, header=header)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert child.stdin is not None and child.stdout is not None
    with child:
        for line in child.stdout:
            name = line.removeprefix("scenario ").strip()
            print(f"  {name}", flush=True)
            stage.recorder.scenario = name
            child.stdin.write("go\n")
            child.stdin.flush()
    if child.returncode != 0:
        tail = (home / "scenarios.log").read_bytes()[-4000:].decode(errors="replace")
        raise RuntimeError(f"the scenarios ended with {child.returncode}\n{tail}")


def copy_store(source: Path, target: Path) -> None:
    """Copies what belongs to a store, with file times; earlier versions of tables stay behind."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in STORE_PARTS:
        part = source / name
        if part.is_dir():
            shutil.copytree(part, target / name, ignore=shutil.ignore_patterns("*.bak"))
        elif part.exists():
            shutil.copy2(part, target / name)
