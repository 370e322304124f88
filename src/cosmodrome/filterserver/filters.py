"""The filters an operator has installed, and the message as they see it.

A filter is a callable that takes a `Message` and returns True or False. It has a name, the one
that consumers write where Java's client wants a class name. Names come from two places:

- every `*.py` file of the folder `filterPath`: `FILTERS = {"com.acme.Green": is_green}`;
- installed packages: entry points of the group `cosmodrome.filters`.

Code never comes from anywhere else. If two places claim one name, or a file does not load, the
whole set is refused: with half a set consumers would wait for the other half.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import logging
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping

from cosmodrome.env.base import Disk, Env
from cosmodrome.errors import Code, ConfigError, Refused
from cosmodrome.wire import message as wire_message
from cosmodrome.wire.record import Record

log = logging.getLogger(__name__)

ENTRY_POINTS = "cosmodrome.filters"
TABLE = "FILTERS"
FILES_MAX = 1000
FILE_BYTES_MAX = 1024 * 1024
PLAIN_BODY_BYTES_MAX = 64 * 1024 * 1024
NAME_CHARACTERS_MAX = 255
NAMES_SHOWN_MAX = 10
_MODULE_PREFIX = "cosmodrome_installed_filter_"
_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*(?:\.[A-Za-z_$][A-Za-z0-9_$]*)*\Z")


class Message:
    """A stored message, read-only. What costs time is worked out when it is first asked for."""

    __slots__ = ("_body", "_group", "_properties", "_record")

    def __init__(self, record: Record, consumer_group: str) -> None:
        self._record = record
        self._group = consumer_group
        self._properties: Mapping[str, str] | None = None
        self._body: bytes | None = None

    @property
    def consumer_group(self) -> str:
        """Who would get the message."""
        return self._group

    @property
    def topic(self) -> str:
        return self._record.topic

    @property
    def properties(self) -> Mapping[str, str]:
        """All properties: the sender's own and the system's."""
        if self._properties is None:
            self._properties = types.MappingProxyType(self._record.pairs())
        return self._properties

    @property
    def tags(self) -> str:
        """Empty when the message has none."""
        return self.properties.get(wire_message.TAGS, "")

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.properties.get(wire_message.KEYS, "").split())

    @property
    def body(self) -> bytes:
        """As the sender wrote it: decompressed."""
        if self._body is None:
            record = self._record
            self._body = wire_message.decompress(record.body, record.sys_flag, PLAIN_BODY_BYTES_MAX)
        return self._body

    @property
    def message_id(self) -> str:
        """The sender's unique id, else the one that says where the message is stored."""
        return self.properties.get(wire_message.UNIQ_KEY) or self._record.message_id

    @property
    def queue_id(self) -> int:
        return self._record.queue_id

    @property
    def queue_offset(self) -> int:
        return self._record.queue_offset

    @property
    def flag(self) -> int:
        """The number a sender may attach; the system gives it no meaning."""
        return self._record.flag

    @property
    def born_ms(self) -> int:
        return self._record.born_ms

    @property
    def born_host(self) -> tuple[str, int]:
        return wire_message.unpack_host(self._record.born_host)

    @property
    def store_ms(self) -> int:
        return self._record.store_ms

    @property
    def reconsume_times(self) -> int:
        return self._record.reconsume_times


@dataclasses.dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Filter:
    name: str
    matches: Callable[[Message], object]  # bool is asked for; what comes is checked
    origin: str  # the file or package it came from


class Installed:
    """The filters in use. `load` replaces all of them at once, or none."""

    def __init__(self, folder: str, env: Env) -> None:
        self._folder = folder
        self._env = env
        self._filters: Mapping[str, Filter] = {}

    def __len__(self) -> int:
        return len(self._filters)

    def names(self) -> list[str]:
        return sorted(self._filters)

    async def load(self) -> None:
        """Read all filters again; ConfigError leaves those in use as they are."""
        found = await self._env.offload(lambda: load_filters(self._folder, self._env.disk))
        self._filters = found
        if not found:
            log.warning(
                "filters_missing folder=%s; no consumer can be served, install a filter and send"
                " SIGHUP",
                self._folder,
            )
        for one in found.values():
            log.info("filter_loaded name=%s origin=%s", one.name, one.origin)

    def find(self, name: str) -> Filter:
        """The filter of that name; Refused says how to install it."""
        one = self._filters.get(name)
        if one is None:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"Filter {name[:NAME_CHARACTERS_MAX]!r} is not installed on this filter server,"
                " and code sent by clients is never run. Its operator installs it: a Python file"
                f" in filterPath that says {TABLE} = {{{name[:NAME_CHARACTERS_MAX]!r}: function}},"
                f" then SIGHUP. Installed now: {self._shown()}.",
            )
        return one

    def _shown(self) -> str:
        names = self.names()
        more = ", ..." if len(names) > NAMES_SHOWN_MAX else ""
        return ", ".join(names[:NAMES_SHOWN_MAX]) + more or "none"


def load_filters(
    folder: str,
    disk: Disk,
    entry_points: Iterable[importlib.metadata.EntryPoint] | None = None,
) -> dict[str, Filter]:
    """Every filter of the folder and of installed packages; ConfigError names what is wrong."""
    if entry_points is None:
        entry_points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    filters: dict[str, Filter] = {}
    for found, function, origin in (*_of_folder(folder, disk), *_of_packages(entry_points)):
        name = _checked(found, function, origin)
        if name in filters:
            raise ConfigError(
                f"filter {name} comes from {filters[name].origin} and from {origin};"
                " remove or rename one of them"
            )
        filters[name] = Filter(name, function, origin)
    return filters


def is_filter_name(name: str) -> bool:
    return len(name) <= NAME_CHARACTERS_MAX and _NAME.match(name) is not None


Found = tuple[object, Callable[[Message], object], str]


def _of_folder(folder: str, disk: Disk) -> Iterator[Found]:
    names = [
        name
        for name in disk.list(folder)
        if name.endswith(".py") and not name.startswith(("_", "."))
    ]
    if len(names) > FILES_MAX:
        raise ConfigError(
            f"{folder} has {len(names)} Python files, at most {FILES_MAX} are read;"
            " check filterPath"
        )
    for name in names:
        path = f"{folder}/{name}"
        table = _run_file(path, name.removesuffix(".py"), disk).get(TABLE)
        if not isinstance(table, Mapping):
            raise ConfigError(
                f"{path} has no table {TABLE}; end it with"
                f' {TABLE} = {{"com.acme.Name": function}}, or move it out of the folder'
            )
        for key, function in table.items():
            yield key, function, path


def _run_file(path: str, stem: str, disk: Disk) -> dict[str, object]:
    try:
        size = disk.size(path)
        if size > FILE_BYTES_MAX:
            raise ConfigError(
                f"{path} has {size} bytes; a filter may have at most {FILE_BYTES_MAX}"
            )
        source = disk.read(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    module = types.ModuleType(_MODULE_PREFIX + stem)
    module.__file__ = path
    sys.modules[module.__name__] = module  # dataclasses, for one, look their module up
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{path}{_line(error, path)}: {type(error).__name__}: {error};"
            " correct the file or move it out of the folder"
        ) from error
    return module.__dict__


def _of_packages(entry_points: Iterable[importlib.metadata.EntryPoint]) -> Iterator[Found]:
    for point in entry_points:
        package = point.dist.name if point.dist is not None else point.module
        try:
            function = point.load()
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"filter {point.name} of package {package} does not load from {point.value}:"
                f" {type(error).__name__}: {error}; correct or uninstall the package"
            ) from error
        yield point.name, function, f"package {package}"


def _checked(name: object, function: object, origin: str) -> str:
    if not isinstance(name, str) or not is_filter_name(name):
        raise ConfigError(
            f"{origin}: {str(name)[:64]!r} is not a filter name; use words joined by dots, like"
            " com.acme.Green"
        )
    if not callable(function) or isinstance(function, type):
        raise ConfigError(
            f"{origin}: filter {name} is a {type(function).__name__}; give a function that takes"
            " a message and returns True or False"
        )
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{origin}: filter {name} is an async function; write it without async")
    return name


def _line(error: BaseException, path: str) -> str:
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}"
    frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename == path]
    return f", line {frames[-1].lineno}" if frames else ""
