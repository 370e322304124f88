"""`make dist`: an sdist and a wheel in `dist/`, each tried in an empty environment.

The wheel is made from the sdist, so a file that the sdist forgot is missed at once. Then each
is installed, from a folder of the pinned dependencies and without a network, and has to send a
message through a node of its own:

| artefact | compiler | core that must run |
|---|---|---|
| wheel | none | native |
| sdist | the machine's | native |
| sdist | none | pure, and `cosmo doctor` says so |

Usage: python -m tools.dist
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Mapping, Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from peers.node import CosmoNode
from peers.resolve import ROOT

DIST = ROOT / "dist"
WHEELS = ROOT / "build" / "wheels"  # the pinned dependencies, for all that is tried
SOURCE_SUFFIXES = {".py", ".pyi", ".pyx", ".pxd", ".pxi", ".typed", ".properties"}
# Two builds of one tree give the same bytes: no time of day, no names of temporary folders (those
# are in debug information), no order that depends on a hash.
EPOCH = 315_532_800  # 1980, the first year that a zip knows
REPRODUCIBLE = {"SOURCE_DATE_EPOCH": str(EPOCH), "CFLAGS": "-g0", "PYTHONHASHSEED": "0"}
ATTEMPTS, PAUSE_SECONDS = 3, 15  # a registry that hiccups must not fail a good change

# Runs in the environment that is tried, isolated from this tree.
EXCHANGE = """
import sys
from importlib.util import find_spec
from cosmodrome import Message, speed
from cosmodrome.speed import lane
from cosmodrome.blocking import Consumer, Producer

namesrv, core = sys.argv[1:]
assert speed.FLAVOUR == core, f"the core is {speed.FLAVOUR}, not {core}"
assert lane.HAS_LANE == (core == "native"), "the fast lane is not what the core is"
assert find_spec("Cython") is None, "Cython is installed"
with Producer(namesrv, group="dist") as producer:
    producer.send(Message("Dist", b"hello"))
with Consumer(namesrv, group="dist", consume_from="first") as consumer:
    consumer.subscribe("Dist")
    message = next(iter(consumer))
    assert message.body == b"hello", message.body
"""


@dataclass(frozen=True)
class Trial:
    artefact: Path
    compiler: bool
    core: str

    def __str__(self) -> str:
        compiler = "a compiler" if self.compiler else "no compiler"
        return f"{self.artefact.name} works with {compiler}, core {self.core}"


def run(*command: str | Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> str:
    """The output of a command; a failed one ends the program with all it said."""
    done = subprocess.run(
        list(map(str, command)),
        env=env,
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        words = " ".join(map(str, command))[:300]
        sys.exit(f"{done.stdout}\nended with {done.returncode}: {words}")
    return done.stdout


def build() -> tuple[Path, Path]:
    """Make both anew, with the pinned build tools of the dev environment."""
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.NamedTemporaryFile("w", suffix=".cfg") as settings:
        settings.write(f"[build_ext]\nparallel = {os.cpu_count()}\n")
        settings.flush()
        env = os.environ | REPRODUCIBLE | {"DIST_EXTRA_CONFIG": settings.name}
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST, ROOT, env=env)
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    normalise(sdist)
    return sdist, wheel


def normalise(sdist: Path) -> None:
    """Write the archive again without times, owners and an order of its own."""
    with tarfile.open(sdist) as packed:
        entries = [(item, packed.extractfile(item)) for item in packed.getmembers()]
        plain = io.BytesIO()
        with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as out:
            for item, content in sorted(entries, key=lambda entry: entry[0].name):
                again = tarfile.TarInfo(item.name)
                again.type, again.size, again.mode = item.type, item.size, item.mode & 0o755
                again.mtime = EPOCH
                out.addfile(again, content)
    sdist.write_bytes(gzip.compress(plain.getvalue(), mtime=EPOCH))


def check_contents(sdist: Path, wheel: Path) -> None:
    """Nothing that the package needs is missing, and nothing of this machine went in."""
    with tarfile.open(sdist) as packed:
        in_sdist = {name.partition("/")[2] for name in packed.getnames()}
    with zipfile.ZipFile(wheel) as zipped:
        in_wheel = set(zipped.namelist())
    wrong = wrong_in_sdist(package_files(), in_sdist) + wrong_in_wheel(package_files(), in_wheel)
    if wrong:
        sys.exit("\n".join(wrong))


def package_files() -> set[str]:
    """What the package is made of, as paths below `src`."""
    source = ROOT / "src"
    return {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.suffix in SOURCE_SUFFIXES
    }


def wrong_in_sdist(files: Set[str], found: Set[str]) -> list[str]:
    needed = {f"src/{name}" for name in files} | {"LICENSE", "README.md", "setup.py"}
    wrong = [f"the sdist misses {name}" for name in sorted(needed - found)]
    strange = [name for name in found if name.endswith((".so", ".c")) or name[:6] == "tests/"]
    return wrong + [f"the sdist has {name}" for name in sorted(strange)]


def wrong_in_wheel(files: Set[str], found: Set[str]) -> list[str]:
    wrong = [f"the wheel misses {name}" for name in sorted(files - found)]
    if not any(name.endswith("/licenses/LICENSE") for name in found):
        wrong.append("the wheel misses LICENSE")
    compiled = {name.partition(".")[0] for name in found if name.endswith(".so")}
    for name in sorted(files):
        if name.endswith(".pyx") and name.removesuffix(".pyx") not in compiled:
            wrong.append(f"the wheel misses {name} compiled; is there a C compiler?")
    top = {name.partition("/")[0] for name in found}
    return wrong + [f"the wheel has {name}/" for name in sorted(top & {"tests", "bench", "tools"})]


def download() -> None:
    """The only step that needs a network. Hashes are checked here, wheels are all there is."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
    lock = ["--require-hashes", "-r", str(ROOT / "requirements.lock"), "-d", str(WHEELS)]
    for attempt in range(1, ATTEMPTS + 1):
        command = [*pip, "--only-binary=:all:", "--retries", "8", "--timeout", "60", *lock]
        if subprocess.run(command).returncode == 0:
            return
        print(f"attempt {attempt} of {ATTEMPTS} to download failed", file=sys.stderr)
        if attempt < ATTEMPTS:
            time.sleep(attempt * PAUSE_SECONDS)
    sys.exit("the pinned dependencies cannot be downloaded")


def environment(folder: Path, *, compiler: bool) -> dict[str, str]:
    """As a new user has it: nothing of this shell but the way to a compiler, or none."""
    names = ("HOME", "LANG", "LC_ALL", "TMPDIR")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    scripts = str(folder / "bin")
    if compiler:
        return kept | {"PATH": os.pathsep.join((scripts, os.environ["PATH"]))}
    return kept | {"PATH": scripts, "CC": "/bin/false", "CXX": "/bin/false"}


def attempt(trial: Trial) -> Trial:
    with tempfile.TemporaryDirectory(prefix="cosmodrome-dist-") as name:
        folder = Path(name)
        env = environment(folder, compiler=trial.compiler)
        install(trial, folder, env)
        check_runs(trial, folder, env)
    return trial


def install(trial: Trial, folder: Path, env: Mapping[str, str]) -> None:
    """As a user does, build tools included, but from the folder of pinned wheels."""
    run(sys.executable, "-m", "venv", folder)
    pip: list[str | Path] = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    links: list[str | Path] = ["--no-index", "--find-links", WHEELS]
    run(*pip, "install", "-q", *links, trial.artefact, env=env, cwd=folder)
    run(*pip, "check", env=env, cwd=folder)


def check_runs(trial: Trial, folder: Path, env: Mapping[str, str]) -> None:
    """A node of the installed package takes and gives a message, and stops cleanly."""
    cosmo, python = folder / "bin" / "cosmo", folder / "bin" / "python"
    run(cosmo, "--version", env=env, cwd=folder)
    # This tree is not on the path, and no switch of this shell chooses the core.
    own = {**env, "PYTHONPATH": "", "COSMODROME_PURE": ""}
    node = CosmoNode(folder / "data", env=own, program=[str(cosmo)])
    with node:
        words = [node.namesrv_address, trial.core]
        run(python, "-I", "-c", EXCHANGE, *words, env=env, cwd=folder)
        if (code := node.stop()) != 0:
            sys.exit(f"cosmo up ended with {code}:\n{node.process.log_tail()}")
    if f"core         {trial.core}" not in node.process.log_tail():
        sys.exit(f"cosmo up does not say that its core is {trial.core}")
    note = "not loaded (it is not built): everything works, slowly"
    findings = run(cosmo, "doctor", "--offline", "-o", "json", env=env, cwd=folder)
    if (note in findings) is not (trial.core == "pure"):
        sys.exit(f"cosmo doctor says otherwise:\n{findings}")


def digests(*artefacts: Path) -> dict[str, str]:
    return {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in artefacts}


def main() -> None:
    started = time.monotonic()

    def report(what: object) -> None:
        print(f"{time.monotonic() - started:5.0f} s  {what}", flush=True)

    sdist, wheel = build()
    check_contents(sdist, wheel)
    report(f"built {sdist.name} and {wheel.name}")
    for name, digest in digests(sdist, wheel).items():
        report(f"sha256 {digest}  {name}")
    download()
    trials = (
        Trial(wheel, compiler=False, core="native"),
        Trial(sdist, compiler=True, core="native"),
        Trial(sdist, compiler=False, core="pure"),
    )
    # Side by side: while one compiles, the others wait for their servers.
    with ThreadPoolExecutor(len(trials)) as pool:
        for done in as_completed([pool.submit(attempt, trial) for trial in trials]):
            report(done.result())


if __name__ == "__main__":
    main()
