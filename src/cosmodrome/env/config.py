"""Reads settings from flags, environment, files and defaults, in that order of precedence.

A key nobody knows is an error that names the nearest one; a key that RocketMQ knows but that
means nothing here is accepted with one log line. Every value remembers where it came from.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

import msgspec
from msgspec import Meta

from cosmodrome.env.options import Options
from cosmodrome.env.unused import REFUSED, UNUSED
from cosmodrome.errors import ConfigError

log = logging.getLogger("cosmo.config")

O = TypeVar("O", bound=Options)  # noqa: E741

ENVIRONMENT_PREFIX = "COSMO_"
# For commands that talk to a cluster; whoever has set them may start a server all the same.
ENVIRONMENT_OF_CLIENTS = frozenset(
    f"{ENVIRONMENT_PREFIX}{name}"
    for name in (
        *("NAMESRV", "ACCESS_KEY", "SECRET_KEY", "SECURITY_TOKEN", "SPARK_MASTER"),
        *("TLS", "TLS_CA", "TLS_CERT", "TLS_KEY", "TLS_NO_VERIFY"),
    )
)
# Below the store's config directory: what requests changed, so that a restart keeps it.
OVERRIDES_NAME = "brokerOverrides.properties"
# Compat: the two variables upstream's start scripts and programs read.
ENVIRONMENT_UPSTREAM = {"NAMESRV_ADDR": "namesrvAddr", "ROCKETMQ_HOME": "rocketmqHome"}


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where settings come from: a name for messages, and the raw texts."""

    name: str
    values: Mapping[str, str]


class Settings:
    """The effective value of every key of some option groups, and its origin."""

    def __init__(self, groups: Sequence[type[Options]]) -> None:
        self._groups = tuple(groups)
        self._values: dict[str, object] = {}
        self.origins: dict[str, str] = {}

    def get(self, group: type[O]) -> O:
        chosen = {
            field.name: self._values[field.encode_name]
            for field in msgspec.structs.fields(group)
            if field.encode_name in self._values
        }
        return group(**chosen)

    def items(self) -> list[tuple[str, object]]:
        """All keys with their effective values, sorted, for --print-config."""
        everything = {
            field.encode_name: getattr(self.get(group), field.name)
            for group in self._groups
            for field in msgspec.structs.fields(group)
        }
        return sorted(everything.items())

    def _set(self, key: str, value: object, origin: str) -> None:
        self._values[key] = value
        self.origins[key] = origin


def resolve(
    groups: Sequence[type[Options]],
    sources: Sequence[Source],
    *,
    neighbours: Sequence[type[Options]] = (),
) -> Settings:
    """Merge `sources`, the weakest first, over the defaults of `groups`.

    Keys of `neighbours` are not accepted, but an unknown key may be meant as one of theirs.
    """
    fields = {
        field.encode_name: field for group in groups for field in msgspec.structs.fields(group)
    }
    settings = Settings(groups)
    for source in sources:
        for key, text in source.values.items():
            field = fields.get(key)
            if field is not None:
                settings._set(key, _convert(key, text, field.type, source.name), source.name)
            else:
                _without_meaning(key, text, source.name, [*fields, *_keys(neighbours)])
    return settings


def environment_source(
    environ: Mapping[str, str],
    groups: Sequence[type[Options]],
    *,
    neighbours: Sequence[type[Options]] = (),
) -> Source:
    """`COSMO_BROKER_NAME=x` sets brokerName; NAMESRV_ADDR and ROCKETMQ_HOME as upstream.

    What is meant for `neighbours`, other servers that are started from the same shell, is theirs.
    """
    known = {_screaming(key): key for key in _keys(groups)}
    theirs = {_screaming(key) for key in _keys(neighbours)}
    values: dict[str, str] = {}
    for variable, key in ENVIRONMENT_UPSTREAM.items():
        if environ.get(variable) and key in known.values():
            values[key] = environ[variable]
    for variable, text in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in ENVIRONMENT_OF_CLIENTS:
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if name not in known:
            if name in theirs:
                continue
            raise ConfigError(
                f"environment variable {variable} names no setting"
                f"{nearest(name, known, ENVIRONMENT_PREFIX)}"
            )
        values[known[name]] = text
    return Source("environment", values)


def flag_source(pairs: Sequence[str]) -> Source:
    """The repeated `--set key=value`."""
    values: dict[str, str] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"--set {pair!r} is not of the form key=value")
        values[key.strip()] = value.strip()
    return Source("--set", values)


def describe(group: type[Options]) -> list[tuple[str, str, str, str, str]]:
    """Rows of (key, type, default, meaning, whether it may change later) for the documentation."""
    rows = []
    blank = group()
    for field in msgspec.structs.fields(group):
        kind, meta = _kind(field.type)
        default = getattr(blank, field.name)
        shown = str(default).lower() if isinstance(default, bool) else str(default)
        marks = meta.extra or {}
        live = "dangerous" if marks.get("dangerous") else "yes" if marks.get("live") else ""
        rows.append((field.encode_name, kind, shown, meta.description or "", live))
    return rows


def _keys(groups: Sequence[type[Options]]) -> list[str]:
    return [field.encode_name for group in groups for field in msgspec.structs.fields(group)]


def _convert(key: str, text: str, kind: Any, origin: str) -> object:
    text = text.strip()
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{key}={text} ({origin}): {_plain(str(error))}") from None


def _without_meaning(key: str, text: str, origin: str, known: Sequence[str]) -> None:
    if key in REFUSED:
        if text.strip().lower() == "true":
            raise ConfigError(f"{key}={text} ({origin}): {REFUSED[key]}")
        return
    if key in UNUSED:
        log.info("setting without effect key=%s origin=%s reason=%r", key, origin, UNUSED[key])
        return
    everything = [*known, *UNUSED, *REFUSED]
    raise ConfigError(f"unknown setting {key} ({origin}){nearest(key, everything)}")


def nearest(name: str, known: Mapping[str, object] | Sequence[str], prefix: str = "") -> str:
    lowered = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {prefix}{lowered[close[0]]}?"
    return "; see docs/settings.md for all settings"


def _screaming(key: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).replace(".", "_").upper()


def _kind(annotation: Any) -> tuple[str, Meta]:
    base, meta = get_args(annotation)[:2]
    if isinstance(base, type):
        name = {"int": "int", "bool": "true/false", "str": "text"}[base.__name__]
        return (_range(meta) if base is int else name), meta
    return " or ".join(str(choice) for choice in get_args(base)), meta


def _range(meta: Meta) -> str:
    if meta.ge is None:
        return "int"
    return f"int ≥ {meta.ge}" if meta.le is None else f"int {meta.ge}–{meta.le}"


def _plain(text: str) -> str:
    return text.replace("Expected", "expected").replace("`", "")
