"""Options that set fields of a configuration struct.

Type, range and help of an option come from the field, so a struct says once what its fields mean.
A command gets each value under the name of its field, and None where the option was not used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, get_args, get_origin

import click
import msgspec

from cosmodrome.cli.support.arguments import PERMISSION, ParamType
from cosmodrome.wire.bodies import SubscriptionGroupConfig, TopicConfig

F = TypeVar("F", bound=Callable[..., Any])

TOPIC_FLAGS = {
    "read_queue_nums": "--read-queues",
    "write_queue_nums": "--write-queues",
    "perm": "--perm",
    "order": "--order/--no-order",
}
GROUP_FLAGS = {
    "consume_enable": "--consume",
    "consume_broadcast_enable": "--broadcast",
    "retry_max_times": "--retries",
    "retry_queue_nums": "--retry-queues",
}


class _OnOff(click.Choice):  # type: ignore[type-arg]
    """`on` or `off`, as a truth value."""

    def __init__(self) -> None:
        super().__init__(["on", "off"])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool:
        return bool(super().convert(value, param, ctx) == "on")


_ON_OFF = _OnOff()


def topic_options(defaults: Mapping[str, str]) -> Callable[[F], F]:
    """The options of a topic's settings. `defaults` are words for help, by field."""
    return _options(TopicConfig, TOPIC_FLAGS, defaults)


def group_options(command: F) -> F:
    """The options of a group's settings."""
    return _options(SubscriptionGroupConfig, GROUP_FLAGS, {})(command)


def used(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields whose options were used."""
    return {name: value for name, value in settings.items() if value is not None}


def field_type(config: type[msgspec.Struct], name: str) -> Any:
    """What click checks a number or a permission with; None for any other field."""
    kind, meta = _described(config, name)
    if name == "perm":
        return PERMISSION
    if kind is not int:
        return None
    extra = meta.extra or {}
    return click.IntRange(extra.get("least"), extra.get("most"))


def _options(
    config: type[msgspec.Struct], flags: Mapping[str, str], defaults: Mapping[str, str]
) -> Callable[[F], F]:
    def add(command: F) -> F:
        for name, flag in reversed(list(flags.items())):
            kind, meta = _described(config, name)
            text = meta.description or ""
            if name in defaults:
                text += f"  [default: {defaults[name]}]"
            chosen: ParamType | type | None = field_type(config, name)
            if kind is bool:
                chosen = bool if "/" in flag else _ON_OFF
            command = click.option(flag, name, type=chosen, default=None, help=text)(command)
        return command

    return add


def _described(config: type[msgspec.Struct], name: str) -> tuple[Any, msgspec.Meta]:
    """The plain type of a field, and what the struct says about it."""
    kind = next(field.type for field in msgspec.structs.fields(config) if field.name == name)
    if get_origin(kind) is Annotated:
        plain, meta = get_args(kind)
        return plain, meta
    return kind, msgspec.Meta()
