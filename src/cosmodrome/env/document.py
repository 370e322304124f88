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
    TlsOptions,
)
from cosmodrome.env.unused import REFUSED, UNUSED

HEAD = """# Settings

Made from `src/cosmodrome/env/options.py` by `make docs`.

The keys are those of RocketMQ, so you can use your `broker.conf` and `namesrv.conf` unchanged
(`-c FILE`). "(ours)" marks keys that RocketMQ does not have.

A flag wins over the environment, the environment over the file, and the file over the default.

- `--set key=value` sets any key.
- An environment variable such as `COSMO_BROKER_NAME=x` sets the key `brokerName`. `NAMESRV_ADDR`
  and `ROCKETMQ_HOME` work as in RocketMQ.
- `-p` prints the settings that are in effect, and exits.
- A server does not start with an unknown key. The error names the nearest known one.

Keys marked *live* can be changed while the server runs (`mqadmin updateBrokerConfig`,
`updateNamesrvConfig`). A change takes effect at once. If one key of a request is refused, the whole
request changes nothing. All other keys are refused: set them in the file and restart. A number that
is live has a range, and a value outside of it is refused.

Keys marked *dangerous* are live too, but can remove messages or stop every client. A request that
comes over the loopback address may change them. One from another machine is refused, unless
`dangerousSettingsLive=true` stands in the settings file.

A broker stores such changes in `config/brokerOverrides.properties` below its store, and the
previous version of that file in `.bak`. When it starts, these changes win over the settings file;
the environment and flags win over them. To undo a change, set the key again, or stop the broker and
remove its line. A name server writes changes into its settings file.
"""


def render() -> str:
    parts = [HEAD]
    groups: tuple[tuple[str, type[Options]], ...] = (
        ("Broker", BrokerOptions),
        ("Store", StoreOptions),
        ("Sockets (all servers)", SocketOptions),
        ("TLS (all servers)", TlsOptions),
        ("Name server", NameServerOptions),
        ("Filter server", FilterServerOptions),
    )
    for title, group in groups:
        parts.append(
            f"\n## {title}\n\n| key | value | default | live | meaning |\n|---|---|---|---|---|\n"
        )
        for key, kind, default, meaning, live in describe(group):
            parts.append(f"| `{key}` | {kind} | {default or '—'} | {live} | {meaning} |\n")
    parts.append(
        "\n## Accepted without effect\n\nRocketMQ has these keys. Here they do nothing; the server"
        " starts and logs one line with the reason.\n\n| reason | keys |\n|---|---|\n"
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
