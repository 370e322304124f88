"""Namespaces: a prefix of topic and group names. Brokers know only the full names."""

from __future__ import annotations

from cosmodrome.wire.names import (
    DLQ_PREFIX,
    RETRY_PREFIX,
    SYSTEM_GROUP_PREFIX,
    is_system_topic,
)

SEPARATOR = "%"


def wrap(namespace: str, name: str) -> str:
    """The full name of a topic or group: `ns%name`, `%RETRY%ns%group`."""
    if not namespace or not name or is_system_topic(name) or name.startswith(SYSTEM_GROUP_PREFIX):
        return name
    kind, plain = _split(name)
    if plain.startswith(namespace + SEPARATOR):
        return name
    return f"{kind}{namespace}{SEPARATOR}{plain}"


def unwrap(namespace: str, name: str) -> str:
    """The name as the user knows it; names of other namespaces stay as they are."""
    if not namespace:
        return name
    kind, plain = _split(name)
    return kind + plain.removeprefix(namespace + SEPARATOR)


def _split(name: str) -> tuple[str, str]:
    for prefix in (RETRY_PREFIX, DLQ_PREFIX):
        if name.startswith(prefix):
            return prefix, name[len(prefix) :]
    return "", name
