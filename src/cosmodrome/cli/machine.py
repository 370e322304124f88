"""Is this machine in order for a broker, or for a client of one? One `Check` per question.

Everything here is about the machine that the command runs on; the cluster's own answers are in
`client/operate/checkup.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import platform
import sys
from collections.abc import Awaitable, Callable, Mapping

from cosmodrome import __version__, speed
from cosmodrome.client.operate.checkup import FAIL, OK, UNKNOWN, WARN, Check
from cosmodrome.env.base import Disk, Env
from cosmodrome.errors import ConfigError

THIS = "this machine"
PYTHON_MIN = (3, 11)
FILES_WARN = 10_000
FILES_FAIL = 512
MEMORY_WARN_BYTES = 512 << 20
DISK_WARN_PERCENT, DISK_FAIL_PERCENT = 75, 90
KNOCK_S = 0.5
PORTS = {
    9876: "--namesrv-port",
    10911: "--broker-port",
    10909: "--broker-port",
    8080: "--http-port",
}
NAMES = {9876: "name server", 10911: "broker", 10909: "broker, VIP", 8080: "health"}


def software() -> list[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    checks = [
        Check("cosmodrome", THIS, OK, f"version {__version__} on {platform.platform()}"),
        Check("python", THIS, OK, version)
        if sys.version_info[:2] >= PYTHON_MIN
        else Check("python", THIS, FAIL, version, "use Python 3.11 or newer"),
    ]
    if speed.FLAVOUR == "native" and speed.HAS_LANE:
        checks.append(Check("compiled core", THIS, OK, "loaded, with the fast lane"))
    else:
        why = "COSMODROME_PURE is set" if os.environ.get("COSMODROME_PURE") else "it is not built"
        step = "unset COSMODROME_PURE" if os.environ.get("COSMODROME_PURE") else ""
        checks.append(
            Check(
                *("compiled core", THIS, WARN, f"not loaded ({why}): everything works, slowly"),
                step or "install a wheel, or build: python setup.py build_ext --inplace",
            )
        )
    return checks


def java(environ: Mapping[str, str]) -> Check:
    from cosmodrome.spark.java import find_java

    if importlib.util.find_spec("pyspark") is None:
        step = "only `cosmo pipeline` needs it: pip install 'cosmodrome[spark]'"
        return Check("java for spark", THIS, OK, "Spark is not installed", step)
    try:
        found = find_java(environ)
    except ConfigError as error:
        step = "only `cosmo pipeline` needs it; install a JDK 17 or newer and set JAVA_HOME"
        return Check("java for spark", THIS, WARN, str(error), step)
    return Check("java for spark", THIS, OK, f"Java {found.version} ({found.origin}, {found.home})")


def open_files() -> Check:
    try:
        import resource
    except ImportError:  # not a Unix
        return Check("open files", THIS, UNKNOWN, "this system does not tell its limit")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return judge_files(soft, hard, resource.RLIM_INFINITY)


def judge_files(soft: int, hard: int, infinity: int = -1) -> Check:
    if soft == infinity or soft >= FILES_WARN:
        said = "no limit" if soft == infinity else f"limit {soft}"
        return Check("open files", THIS, OK, said, "", {"limit": float(soft)})
    step = f"raise it for brokers: ulimit -n {max(65_536, FILES_WARN)}, or LimitNOFILE= in systemd"
    status = FAIL if soft < FILES_FAIL else WARN
    said = f"limit {soft} (up to {hard} may be asked for): each client and each file takes one"
    return Check("open files", THIS, status, said, step, {"limit": float(soft)})


def memory(env: Env) -> list[Check]:
    try:
        text = env.disk.read("/proc/meminfo").decode()
    except OSError:
        return [Check("memory", THIS, UNKNOWN, "this system has no /proc/meminfo")]
    swappiness = None
    with contextlib.suppress(OSError, ValueError):
        swappiness = int(env.disk.read("/proc/sys/vm/swappiness"))
    return judge_memory(text, env.memory_bytes, swappiness)


def judge_memory(meminfo: str, limit_bytes: int, swappiness: int | None) -> list[Check]:
    kib: dict[str, int] = {}
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()[:1]
        if number and number[0].isdigit():
            kib[name] = int(number[0])
    free = min(kib.get("MemAvailable", 0) << 10, limit_bytes)
    said = f"{free / 2**30:.1f} GiB available"
    figures = {"available_bytes": float(free)}
    checks = [Check("memory", THIS, OK, said, "", figures)]
    if free < MEMORY_WARN_BYTES:
        step = "give it more: brokers read through the page cache, which is what is left over"
        checks = [Check("memory", THIS, WARN, said, step, figures)]
    total, used = kib.get("SwapTotal", 0), kib.get("SwapTotal", 0) - kib.get("SwapFree", 0)
    figures = {"swap_used_bytes": float(used << 10)}
    if not total:
        checks.append(Check("swap", THIS, OK, "none", "", figures))
    elif used > kib.get("MemTotal", 0) // 100:
        said = f"{used / 2**20:.1f} GiB in use: a broker that is swapped out answers late"
        step = "swapoff -a, or sysctl vm.swappiness=1"
        checks.append(Check("swap", THIS, WARN, said, step, figures))
    else:
        said = f"{total / 2**20:.1f} GiB, hardly used, swappiness {swappiness}"
        checks.append(Check("swap", THIS, OK, said, "", figures))
    return checks


def disk_space(disk: Disk, folder: str) -> Check:
    try:
        usage = disk.usage(folder)
    except OSError as error:
        return Check("disk space", folder, UNKNOWN, str(error))
    used = usage.ratio * 100
    said = f"{used:.0f} % used, {usage.free_bytes / 2**30:.1f} GiB free"
    figures = {"used_percent": round(used, 1), "free_bytes": float(usage.free_bytes)}
    if used >= DISK_FAIL_PERCENT:
        step = "free space: a broker refuses sends at diskSpaceWarningLevelRatio (90)"
        return Check("disk space", folder, FAIL, said, step, figures)
    if used >= DISK_WARN_PERCENT:
        step = "free space: old messages go from diskMaxUsedSpaceRatio (75) on"
        return Check("disk space", folder, WARN, said, step, figures)
    return Check("disk space", folder, OK, said, "", figures)


async def ports(known: Mapping[int, str], ours: Callable[[int], Awaitable[bool]]) -> list[Check]:
    """The ports that servers listen on by default. `known` are those of servers that answered;
    `ours` tells whether a port speaks as a server of ours does."""
    checks = []
    for port, flag in PORTS.items():
        subject = f"{port} ({NAMES[port]})"
        if port in known:
            checks.append(Check("port", subject, OK, f"served by {known[port]}"))
        elif not await _listens(port):
            checks.append(Check("port", subject, OK, "free on this machine"))
        elif await ours(port):
            checks.append(Check("port", subject, OK, "served by a server of this kind"))
        else:
            said = "taken by another program on this machine"
            step = f"stop that one, or start with {flag} PORT"
            checks.append(Check("port", subject, WARN, said, step))
    return checks


async def _listens(port: int) -> bool:
    try:
        async with asyncio.timeout(KNOCK_S):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


async def speaks_http(port: int) -> bool:
    """Whether this is a health port."""
    try:
        async with asyncio.timeout(KNOCK_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /livez HTTP/1.0\r\nHost: localhost\r\n\r\n")
            line = await reader.readline()
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    return b" 200 " in line
