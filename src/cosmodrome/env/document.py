"""Renders docs/settings.md from the settings themselves: `python -m cosmodrome.env.document`."""

from __future__ import annotations

import sys

from cosmodrome.env.config import describe
from cosmodrome.env.options import (
    BrokerOptions,
    FilterServerOptions,
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

Keys marked *live* may be changed while the server runs (`mqadmin updateBrokerConfig`,
`updateNamesrvConfig`): at once, all of a request or none of it. A broker keeps them in
`config/brokerOverrides.properties` below its store (the generation before in `.bak`), which is read
at the start after the settings file: an override wins over the file, the environment and flags win
over the override. Set the key again, or remove its line while the broker is stopped, to undo it.
A name server rewrites its settings file. All other keys are refused: set them in the file, restart.
"""


def render() -> str:
    parts = [HEAD]
    groups: tuple[tuple[str, type[Options]], ...] = (
        ("Broker", BrokerOptions),
        ("Store", StoreOptions),
        ("Sockets (all servers)", SocketOptions),
        ("Name server", NameServerOptions),
        ("Filter server", FilterServerOptions),
    )
    for title, group in groups:
        parts.append(
            f"\n## {title}\n\n| key | value | default | live | meaning |\n|---|---|---|---|---|\n"
        )
        for key, kind, default, meaning, live in describe(group):
            mark = "yes" if live else ""
            parts.append(f"| `{key}` | {kind} | {default or '—'} | {mark} | {meaning} |\n")
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
