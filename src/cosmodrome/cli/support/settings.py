"""Flags of the command line joined with environment, file and defaults, one kind per command."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence

import msgspec

from cosmodrome.cli.support.masking import MASK, SECRET
from cosmodrome.env.config import (
    OVERRIDES_NAME,
    Settings,
    Source,
    environment_source,
    flag_source,
    resolve,
)
from cosmodrome.env.options import (
    AccessOptions,
    BrokerOptions,
    FilterServerOptions,
    NameServerOptions,
    Options,
    SocketOptions,
    StoreOptions,
    TlsOptions,
)
from cosmodrome.env.real import RealDisk
from cosmodrome.env.reload import live_keys, text_of
from cosmodrome.errors import ConfigError, CosmodromeError
from cosmodrome.wire import properties_text

log = logging.getLogger("cosmo.config")

BROKER_GROUPS: tuple[type[Options], ...] = (BrokerOptions, StoreOptions, SocketOptions, TlsOptions)
NAMESERVER_GROUPS: tuple[type[Options], ...] = (NameServerOptions, SocketOptions, TlsOptions)
FILTERSERVER_GROUPS: tuple[type[Options], ...] = (FilterServerOptions, SocketOptions, TlsOptions)
EVERY_GROUP = (*BROKER_GROUPS, *NAMESERVER_GROUPS, *FILTERSERVER_GROUPS)
UP_DATA = "cosmo-data"
# `cosmo up` runs two servers; these keys mean the broker's, the name server has its own flags.
_BROKER_FIRST = frozenset({"listenPort", "bindAddress"})


@dataclasses.dataclass(frozen=True, slots=True)
class Chosen:
    """What a command runs with; a part it does not run is None."""

    broker: Settings | None = None
    nameserver: Settings | None = None
    filterserver: Settings | None = None
    broker_words: tuple[str, ...] = ()  # with which `cosmo broker run` reads the same sources

    def text(self) -> str:
        """The effective settings as properties, for --print-config."""
        merged: dict[str, str] = {}
        for settings in (self.nameserver, self.broker, self.filterserver):
            if settings is not None:
                merged.update((key, _shown(key, value)) for key, value in settings.items())
        return properties_text.dumps(dict(sorted(merged.items()))).decode()


def for_broker(
    environ: Mapping[str, str],
    *,
    file: str | None = None,
    pairs: Sequence[str] = (),
    namesrv: str | None = None,
    host: str | None = None,
    data: str | None = None,
    port: int | None = None,
) -> Chosen:
    flags = _flags(
        namesrvAddr=namesrv, bindAddress=host, storePathRootDir=_absolute(data), listenPort=port
    )
    home = os.path.join(os.path.expanduser("~"), "store")
    return Chosen(
        broker=_resolve(BROKER_GROUPS, {"storePathRootDir": home}, file, environ, flags, pairs),
        broker_words=_words(file, pairs),
    )


def for_nameserver(
    environ: Mapping[str, str],
    *,
    file: str | None = None,
    pairs: Sequence[str] = (),
    host: str | None = None,
    port: int | None = None,
) -> Chosen:
    home = environ.get("ROCKETMQ_HOME") or os.path.expanduser("~")
    defaults = {"kvConfigPath": os.path.join(home, "namesrv", "kvConfig.json")}
    if file is not None:
        defaults["configStorePath"] = os.path.abspath(file)
    flags = _flags(bindAddress=host, listenPort=port)
    return Chosen(nameserver=_resolve(NAMESERVER_GROUPS, defaults, file, environ, flags, pairs))


def for_filterserver(
    environ: Mapping[str, str],
    *,
    file: str | None = None,
    pairs: Sequence[str] = (),
    broker: str | None = None,
    host: str | None = None,
    port: int | None = None,
    filters: str | None = None,
) -> Chosen:
    home = environ.get("ROCKETMQ_HOME") or os.path.expanduser("~")
    defaults = {"filterPath": os.path.join(home, "filters")}
    flags = _flags(
        connectWhichBroker=broker, bindAddress=host, listenPort=port, filterPath=_absolute(filters)
    )
    return Chosen(filterserver=_resolve(FILTERSERVER_GROUPS, defaults, file, environ, flags, pairs))


def for_up(
    environ: Mapping[str, str],
    *,
    file: str | None = None,
    pairs: Sequence[str] = (),
    data: str | None = None,
    host: str | None = None,
    namesrv_port: int | None = None,
    broker_port: int | None = None,
) -> Chosen:
    own = _keys(NAMESERVER_GROUPS) - _BROKER_FIRST
    shared = own & _keys(BROKER_GROUPS)
    values = flag_source(pairs).values
    for_own = [f"{key}={value}" for key, value in values.items() if key in own]
    for_broker_ = [
        f"{key}={value}" for key, value in values.items() if key not in own or key in shared
    ]
    broker = _resolve(
        BROKER_GROUPS,
        {"storePathRootDir": os.path.abspath(UP_DATA)},
        file,
        {name: value for name, value in environ.items() if name != "NAMESRV_ADDR"},
        _flags(storePathRootDir=_absolute(data), bindAddress=host, listenPort=broker_port),
        for_broker_,
        neighbours=NAMESERVER_GROUPS,
    )
    root = broker.get(StoreOptions).store_path_root_dir
    nameserver = _resolve(
        NAMESERVER_GROUPS,
        {
            "kvConfigPath": os.path.join(root, "config", "kvConfig.json"),
            **_access(broker),
        },
        None,
        {name: value for name, value in environ.items() if name == "ROCKETMQ_HOME"},
        _flags(bindAddress=host, listenPort=namesrv_port),
        for_own,
    )
    return Chosen(broker=broker, nameserver=nameserver, broker_words=_words(file, for_broker_))


def _access(broker: Settings) -> dict[str, str]:
    """What `cosmo up` has in common for both servers, wherever it was said."""
    options = broker.get(BrokerOptions)
    return {
        field.encode_name: text_of(getattr(options, field.name))
        for field in msgspec.structs.fields(AccessOptions)
    }


def _words(file: str | None, pairs: Sequence[str]) -> tuple[str, ...]:
    from_file = () if file is None else ("-c", os.path.abspath(file))
    return (*from_file, *(word for pair in pairs for word in ("--set", pair)))


def _resolve(
    groups: Sequence[type[Options]],
    defaults: Mapping[str, str],
    file: str | None,
    environ: Mapping[str, str],
    flags: Source,
    pairs: Sequence[str],
    *,
    neighbours: Sequence[type[Options]] = (),
) -> Settings:
    weak = [Source("default", defaults)]
    if file is not None:
        weak.append(Source(file, _read(file)))
    of_environment = environment_source(environ, groups, neighbours=EVERY_GROUP)
    strong = [of_environment, flag_source(pairs), flags]
    settings = resolve(groups, [*weak, *strong], neighbours=neighbours)
    tls_file = settings.get(TlsOptions).tls_config_file
    if tls_file:
        weak.append(_tls_source(tls_file))
        settings = resolve(groups, [*weak, *strong], neighbours=neighbours)
    if StoreOptions not in groups:
        return settings
    # What requests changed is kept in the store, and where that is is known only now.
    overrides = _overrides(settings.get(StoreOptions).store_path_root_dir, groups)
    if overrides is None:
        return settings
    settings = resolve(groups, [*weak, overrides, *strong], neighbours=neighbours)
    for key in overrides.values:
        if settings.origins[key] != overrides.name:
            log.warning(
                "override without effect key=%s file=%s reason=%r",
                key,
                overrides.name,
                f"set by {settings.origins[key]}",
            )
    return settings


def _tls_source(path: str) -> Source:
    """Upstream keeps settings of TLS in a file of their own."""
    source = Source(path, _read(path))
    resolve((TlsOptions,), [source])  # other settings do not belong there
    return source


def _overrides(root: str, groups: Sequence[type[Options]]) -> Source | None:
    """What was changed while the broker ran; the generation before when the file is damaged."""
    path = os.path.join(root, "config", OVERRIDES_NAME)
    disk = RealDisk()
    if not root or not disk.exists(path):
        return None
    try:
        return _override_source(path, _read(path), groups)
    except ConfigError as error:
        if not disk.exists(path + ".bak"):
            raise
        log.error(
            "overrides_damaged file=%s error=%s; using the previous generation %s.bak: the last"
            " change may be missing",
            path,
            error,
            path,
        )
        return _override_source(path, _read(path + ".bak"), groups)


def _override_source(
    path: str, values: Mapping[str, str], groups: Sequence[type[Options]]
) -> Source:
    live = {key for group in groups for key in live_keys(group)}
    fixed = sorted(set(values) - live)
    if fixed:
        raise ConfigError(
            f"{path}: {fixed[0][:64]} cannot be set here, only what may change while the broker"
            " runs; move it to the settings file (-c)"
        )
    source = Source(path, values)
    resolve(groups, [source])  # a bad value is this file's fault
    return source


def _read(path: str) -> dict[str, str]:
    try:
        return properties_text.loads(RealDisk().read(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; check -c/--config") from None
    except CosmodromeError as error:
        raise ConfigError(f"{path}: {error}") from None


def _flags(**values: str | int | None) -> Source:
    return Source("flag", {key: str(value) for key, value in values.items() if value is not None})


def _keys(groups: Sequence[type[Options]]) -> set[str]:
    return {key for key, _ in Settings(groups).items()}


def _absolute(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(path)


def _shown(key: str, value: object) -> str:
    if value and SECRET.search(key):
        return MASK
    return str(value).lower() if isinstance(value, bool) else str(value)
