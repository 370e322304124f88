"""Is this machine in order for a broker, or for a client of one? One `Finding` per question.

Everything here is about the machine that the command runs on; the cluster's own answers are in
`client/operate/diagnosis/checkup.py`.
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
from cosmodrome.client.operate.diagnosis.checkup import DISK_FULL_PERCENT, DISK_REFUSING_PERCENT
from cosmodrome.env.base import Disk, Env
from cosmodrome.env.ports import BROKER_PORT, HEALTH_PORT, NAMESRV_PORT
from cosmodrome.errors import ConfigError
from cosmodrome.findings import Finding, Severity
from cosmodrome.speed import lane
from cosmodrome.transport.ports import VIP_OFFSET

THIS = "this machine"
PYTHON_MIN = (3, 11)
FILES_WARN = 10_000
FILES_FAIL = 512
MEMORY_WARN_BYTES = 512 << 20
KNOCK_S = 0.5
VIP_PORT = BROKER_PORT + VIP_OFFSET
PORTS = {  # who listens there, and the option of `cosmo up` that chooses another
    NAMESRV_PORT: ("name server", "--namesrv-port"),
    BROKER_PORT: ("broker", "--broker-port"),
    VIP_PORT: ("broker, VIP", "--broker-port"),
    HEALTH_PORT: ("health", "--http-port"),
}


def software() -> list[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    checks = [
        Finding("cosmodrome", THIS, Severity.OK, f"version {__version__} on {platform.platform()}"),
        Finding("python", THIS, Severity.OK, version)
        if sys.version_info[:2] >= PYTHON_MIN
        else Finding("python", THIS, Severity.ERROR, version, "use Python 3.11 or newer"),
    ]
    if speed.FLAVOUR == "native" and lane.HAS_LANE:
        checks.append(Finding("compiled core", THIS, Severity.OK, "loaded, with the fast lane"))
    else:
        why = "COSMODROME_PURE is set" if os.environ.get("COSMODROME_PURE") else "it is not built"
        step = "unset COSMODROME_PURE" if os.environ.get("COSMODROME_PURE") else ""
        checks.append(
            Finding(
                "compiled core",
                THIS,
                Severity.WARNING,
                f"not loaded ({why}): everything works, slowly",
                step or "install a wheel, or build: python setup.py build_ext --inplace",
            )
        )
    return checks


def java(environ: Mapping[str, str]) -> Finding:
    from cosmodrome.spark.runtime.java import find_java

    if importlib.util.find_spec("pyspark") is None:
        step = "only `cosmo pipeline` needs it: pip install 'cosmodrome[spark]'"
        return Finding("java for spark", THIS, Severity.OK, "Spark is not installed", step)
    try:
        found = find_java(environ)
    except ConfigError as error:
        step = "only `cosmo pipeline` needs it; install a JDK 17 or newer and set JAVA_HOME"
        return Finding("java for spark", THIS, Severity.WARNING, str(error), step)
    return Finding(
        "java for spark", THIS, Severity.OK, f"Java {found.version} ({found.origin}, {found.home})"
    )


def open_files() -> Finding:
    try:
        import resource
    except ImportError:  # not a Unix
        return Finding("open files", THIS, Severity.UNKNOWN, "this system does not tell its limit")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return judge_files(soft, hard, resource.RLIM_INFINITY)


def judge_files(soft: int, hard: int, infinity: int = -1) -> Finding:
    if soft == infinity or soft >= FILES_WARN:
        text = "no limit" if soft == infinity else f"limit {soft}"
        return Finding("open files", THIS, Severity.OK, text, evidence={"limit": float(soft)})
    step = f"raise it for brokers: ulimit -n {max(65_536, FILES_WARN)}, or LimitNOFILE= in systemd"
    severity = Severity.ERROR if soft < FILES_FAIL else Severity.WARNING
    text = f"limit {soft} (up to {hard} may be asked for): each client and each file takes one"
    return Finding("open files", THIS, severity, text, step, evidence={"limit": float(soft)})


def memory(env: Env) -> list[Finding]:
    try:
        text = env.disk.read("/proc/meminfo").decode()
    except OSError:
        return [Finding("memory", THIS, Severity.UNKNOWN, "this system has no /proc/meminfo")]
    swappiness = None
    with contextlib.suppress(OSError, ValueError):
        swappiness = int(env.disk.read("/proc/sys/vm/swappiness"))
    return judge_memory(text, env.memory_bytes, swappiness)


def judge_memory(meminfo: str, limit_bytes: int, swappiness: int | None) -> list[Finding]:
    kib: dict[str, int] = {}
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()[:1]
        if number and number[0].isdigit():
            kib[name] = int(number[0])
    free = min(kib.get("MemAvailable", 0) << 10, limit_bytes)
    text = f"{free / 2**30:.1f} GiB available"
    figures = {"available_bytes": float(free)}
    checks = [Finding("memory", THIS, Severity.OK, text, evidence=figures)]
    if free < MEMORY_WARN_BYTES:
        step = "give it more: brokers read through the page cache, which is what is left over"
        checks = [Finding("memory", THIS, Severity.WARNING, text, step, evidence=figures)]
    total, used = kib.get("SwapTotal", 0), kib.get("SwapTotal", 0) - kib.get("SwapFree", 0)
    figures = {"swap_used_bytes": float(used << 10)}
    if not total:
        checks.append(Finding("swap", THIS, Severity.OK, "none", evidence=figures))
    elif used > kib.get("MemTotal", 0) // 100:
        text = f"{used / 2**20:.1f} GiB in use: a broker that is swapped out answers late"
        step = "swapoff -a, or sysctl vm.swappiness=1"
        checks.append(Finding("swap", THIS, Severity.WARNING, text, step, evidence=figures))
    else:
        text = f"{total / 2**20:.1f} GiB, hardly used, swappiness {swappiness}"
        checks.append(Finding("swap", THIS, Severity.OK, text, evidence=figures))
    return checks


def disk_space(disk: Disk, folder: str) -> Finding:
    try:
        usage = disk.usage(folder)
    except OSError as error:
        return Finding("disk space", folder, Severity.UNKNOWN, str(error))
    used = usage.ratio * 100
    text = f"{used:.0f} % used, {usage.free_bytes / 2**30:.1f} GiB free"
    figures = {"used_percent": round(used, 1), "free_bytes": float(usage.free_bytes)}
    if used >= DISK_REFUSING_PERCENT:
        step = (
            "free space: a broker refuses sends at diskSpaceWarningLevelRatio"
            f" ({DISK_REFUSING_PERCENT})"
        )
        return Finding("disk space", folder, Severity.ERROR, text, step, evidence=figures)
    if used >= DISK_FULL_PERCENT:
        step = f"free space: old messages go from diskMaxUsedSpaceRatio ({DISK_FULL_PERCENT}) on"
        return Finding("disk space", folder, Severity.WARNING, text, step, evidence=figures)
    return Finding("disk space", folder, Severity.OK, text, evidence=figures)


async def ports(known: Mapping[int, str], ours: Callable[[int], Awaitable[bool]]) -> list[Finding]:
    """The ports that servers listen on by default. `known` are those of servers that answered;
    `ours` tells whether a port speaks as a server of ours does."""
    checks = []
    for port, (listener, flag) in PORTS.items():
        subject = f"{port} ({listener})"
        if port in known:
            checks.append(Finding("port", subject, Severity.OK, f"served by {known[port]}"))
        elif not await _listens(port):
            checks.append(Finding("port", subject, Severity.OK, "free on this machine"))
        elif await ours(port):
            checks.append(Finding("port", subject, Severity.OK, "served by a server of this kind"))
        else:
            text = "taken by another program on this machine"
            step = f"stop that one, or start with {flag} PORT"
            checks.append(Finding("port", subject, Severity.WARNING, text, step))
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
