"""Renders docs/settings.md from the settings themselves: `python -m cosmodrome.env.document`."""

from __future__ import annotations

import sys

from cosmodrome.env.config import describe
from cosmodrome.env.options import (
    BrokerOptions,
    NameServerOptions,
    Options,
    SocketOptions,
    StoreOptions,
)
from cosmodrome.env.unused import REFUSED, UNUSED

HEAD = """# Settings

Made from `src/cosmodrome/env/options.py` by `make docs`.

Names are RocketMQ's own, so `broker.conf` and `namesrv.conf` are read unchanged (`-c FILE`).
A flag wins over the environment, the environment over the file, the file over the default.
`--set key=value` sets any key; `COSMO_BROKER_NAME=x` in the environment sets `brokerName`;
`NAMESRV_ADDR` and `ROCKETMQ_HOME` are honoured as upstream does. `-p` prints what is in effect.
An unknown key stops the start and names the nearest one. "(ours)" marks keys that upstream lacks.
"""


def render() -> str:
    parts = [HEAD]
    groups: tuple[tuple[str, type[Options]], ...] = (
        ("Broker", BrokerOptions),
        ("Store", StoreOptions),
        ("Sockets (broker and name server)", SocketOptions),
        ("Name server", NameServerOptions),
    )
    for title, group in groups:
        parts.append(f"\n## {title}\n\n| key | value | default | meaning |\n|---|---|---|---|\n")
        for key, kind, default, meaning in describe(group):
            parts.append(f"| `{key}` | {kind} | {default or '—'} | {meaning} |\n")
    parts.append(
        "\n## Accepted without effect\n\nRocketMQ knows these keys; here they are accepted with"
        " one log line, for the reason given.\n\n| reason | keys |\n|---|---|\n"
    )
    reasons: dict[str, list[str]] = {}
    for key, reason in UNUSED.items():
        reasons.setdefault(reason, []).append(f"`{key}`")
    for reason, keys in reasons.items():
        parts.append(f"| {reason} | {', '.join(sorted(keys))} |\n")
    parts.append("\n## Refused when switched on\n\n| key | why |\n|---|---|\n")
    for key, reason in REFUSED.items():
        parts.append(f"| `{key}` | {reason} |\n")
    return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(render())
