"""`cosmo bundle`: one archive with what support needs to understand a cluster, secrets masked.

Every part is asked for on its own, and one that fails leaves its error in the archive instead. No
message and no message's properties are in it. Values whose names sound like secrets are masked,
in settings, tables and the ends of log files alike.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import re
import sys
import zipfile
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import click
import msgspec

from cosmodrome import __version__, speed
from cosmodrome.cli.diagnose.doctor import diagnosed, row
from cosmodrome.cli.support.context import namesrv_option
from cosmodrome.cli.support.exits import EXIT_ERROR, EXIT_PARTLY, Failure
from cosmodrome.cli.support.masking import masked, masked_text
from cosmodrome.cli.support.operating import finish, note, opened, timeout_option
from cosmodrome.cli.support.output import iso
from cosmodrome.cli.support.settings import UP_DATA
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.fleet import attempt
from cosmodrome.client.operate.flows import at_once
from cosmodrome.client.operate.standing import standing
from cosmodrome.client.operate.topics import ORDER_NAMESPACE
from cosmodrome.env.real import RealDisk, WallClock
from cosmodrome.errors import CosmodromeError
from cosmodrome.speed import lane
from cosmodrome.wire.names import is_system_group

LOG_BYTES_MAX = 4 << 20
GROUPS_MAX = 500
KV_NAMESPACES = (ORDER_NAMESPACE,)


@click.command()
@click.option(
    "-f", "--file", "path", metavar="FILE", help="Archive to write.  [default: cosmo-bundle-….zip]"
)
@click.option(
    "--log",
    "logs",
    multiple=True,
    metavar="FILE",
    help="Log file whose end goes in; may be repeated.",
)
@click.option(
    "--data", metavar="DIR", default=UP_DATA, help="Store root of a broker on this machine."
)
@namesrv_option
@timeout_option
def bundle(
    path: str | None, logs: tuple[str, ...], data: str, namesrv: str, timeout: float
) -> None:
    """Write one archive with the state of the cluster and of this machine, for support.

    It holds settings, topics, groups with their lag, connections and checks, but no messages;
    secrets are masked. The exit code is 7 when a part is missing; the archive says why.
    """
    now = WallClock().now_ms()
    stamp = re.sub(r"\D", "", iso(now)[:19])
    path = path or f"cosmo-bundle-{stamp}.zip"
    ends = {
        f"logs/{number}-{_safe(os.path.basename(name))}": _log_end(name)
        for number, name in enumerate(logs, 1)
    }
    parts, failures = finish(_collected(namesrv, timeout, data))
    parts |= ends
    parts["manifest.json"] = {
        "made_ms": now,
        "made": iso(now),
        "cosmodrome": __version__,
        "name_servers": namesrv,
        "parts": sorted(parts),
        "not_answered": failures,
    }
    archive = _zipped(parts)
    try:
        RealDisk().replace(path, archive, keep=False)
    except OSError as error:
        text = f"{path} cannot be written: {error.strerror or error}"
        raise Failure(text, EXIT_ERROR) from error
    with contextlib.suppress(OSError):
        os.chmod(path, 0o600)  # addresses and names are nobody else's business
    click.echo(path)
    note(f"{len(parts)} parts, {len(archive):,} bytes")
    if failures:
        note("not answered: " + "; ".join(f"{name}: {why}" for name, why in failures.items()))
        raise click.exceptions.Exit(EXIT_PARTLY)


# --- what goes in ------------------------------------------------------------------------------


async def _collected(
    namesrv: str, timeout: float, data: str
) -> tuple[dict[str, object], dict[str, str]]:
    parts: dict[str, object] = {"machine.json": _machine()}
    failures: dict[str, str] = {}

    async def put(
        name: str, ask: Awaitable[object], shape: Callable[[Any], object] = _plain
    ) -> Any:
        answer = await attempt(ask)
        if isinstance(answer, CosmodromeError):
            failures[name] = str(answer)
            parts[name] = {"error": str(answer)}
            return None
        parts[name] = shape(answer)
        return answer

    await put("doctor.json", diagnosed(namesrv, timeout, data, offline=False), _rows)
    async with opened(namesrv, timeout) as admin:
        info = await put("cluster.json", admin.brokers.cluster())
        await put("namesrv/config.json", admin.name_servers.config())
        for namespace in KV_NAMESPACES:
            await put(f"namesrv/kv-{namespace}.json", admin.name_servers.entries(namespace))
        if info is None:
            return parts, failures
        for name, facts in sorted(info.broker_addr_table.items()):
            for number, address in sorted(facts.broker_addrs.items()):
                folder = f"brokers/{_safe(name)}-{number}"
                await put(f"{folder}/runtime.json", admin.brokers.runtime(address))
                await put(f"{folder}/config.json", admin.brokers.config(address))
        await put("topics.json", admin.topics.configs())
        await put("producers.json", admin.groups.producers())
        configs = await attempt(admin.groups.configs(partial=True))
        if isinstance(configs, CosmodromeError):
            failures["groups.json"] = str(configs)
            return parts, failures
        names = [name for name in sorted(configs) if not is_system_group(name)]
        if len(names) > GROUPS_MAX:
            failures["groups.json"] = f"only the first {GROUPS_MAX} of {len(names)} groups are here"
        described = await at_once(
            lambda name: _group(admin, name, configs[name]), names[:GROUPS_MAX], 8
        )
        parts["groups.json"] = dict(zip(names, described, strict=False))
    return parts, failures


async def _group(admin: Admin, name: str, settings: object) -> dict[str, object]:
    connections = await attempt(admin.groups.connections(name))
    where = await attempt(standing(admin.fleet, name))
    out: dict[str, object] = {"settings": _plain(settings), "connections": _plain(connections)}
    if isinstance(where, CosmodromeError):
        out["lag"] = str(where)
        return out
    out |= {"lag": where.lag, "age_ms": where.age_ms, "members": where.members}
    out["queues"] = [
        {
            "topic": row.queue.topic,
            "broker": row.queue.broker_name,
            "queue": row.queue.queue_id,
            "first": row.first,
            "end": row.end,
            "offset": row.offset,
            "lag": row.lag,
            "age_ms": row.age_ms,
            "unknown_because": row.why or None,
        }
        for row in where.queues
    ]
    return out


def _machine() -> dict[str, object]:
    names = ("COSMO_", "NAMESRV", "ROCKETMQ", "JAVA_HOME", "XDG_", "LANG", "TZ")
    return {
        "platform": platform.platform(),
        "python": sys.version,
        "cosmodrome": __version__,
        "compiled": speed.FLAVOUR,
        "fast_lane": lane.HAS_LANE,
        "processors": os.cpu_count(),
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(names)
        },
    }


def _rows(checks: Any) -> object:
    return [row(check) for check in checks]


def _plain(value: Any) -> object:
    if isinstance(value, CosmodromeError):
        return {"error": str(value)}
    return msgspec.to_builtins(value, str_keys=True)


def _log_end(path: str) -> str:
    disk = RealDisk()
    try:
        text = disk.read(path)[-LOG_BYTES_MAX:].decode(errors="replace")
    except OSError as error:
        raise click.UsageError(f"--log {path}: {error.strerror or error}") from None
    return masked_text(text)


# --- writing -------------------------------------------------------------------------------------


def _safe(name: str) -> str:
    """What a server calls itself must not choose a place outside of the archive."""
    return re.sub(r"[^\w.-]", "_", name).lstrip(".") or "_"


def _zipped(parts: Mapping[str, object]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in sorted(parts.items()):
            if isinstance(part, str):
                text = part
            else:
                text = json.dumps(masked(part), indent=2, ensure_ascii=False, default=str) + "\n"
            archive.writestr(f"cosmo-bundle/{name}", text)
    return out.getvalue()
