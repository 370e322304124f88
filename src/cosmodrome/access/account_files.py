"""Account files: `plain_acl.yml`, and every `.yml` in the folder `acl` beside it.

Compat: the form of the files, which account wins when two files have it (the first), and that
`dataVersion` counts the changes are upstream's. `peer: true` is ours; upstream ignores it.

Everything is read as text, so a key made of digits stays what it is. Anchors, deep nesting and
large files are refused: an account needs none of them.
"""

from __future__ import annotations

import dataclasses
import os.path
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import yaml

from cosmodrome.access.accounts import Account
from cosmodrome.access.addresses import Addresses
from cosmodrome.env.base import Disk
from cosmodrome.errors import ConfigError
from cosmodrome.wire.needs import PUB, SUB, Right

FOLDER = "acl"
ENDINGS = (".yml", ".yaml")
NOT_ACCOUNTS = "tools.yml"  # Compat: what upstream's tools sign with
FILE_BYTES_MAX = 1024 * 1024
FILES_MAX = 100
ACCOUNTS_MAX = 10_000
DEPTH_MAX = 6
KEY_CHARACTERS_MIN = 7  # Compat: upstream's, for access keys and secret keys
KEY_CHARACTERS_MAX = 255

# Compat: any other text is DENY.
_RIGHTS: Final[Mapping[str, Right]] = {
    "PUB": PUB,
    "SUB": SUB,
    "PUB|SUB": PUB | SUB,
    "SUB|PUB": PUB | SUB,
}
_TEXTS: Final[Mapping[Right, str]] = {right: text for text, right in reversed([*_RIGHTS.items()])}
_LOADER: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)

Document = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class FileState:
    """One file as it was read."""

    path: str
    access_keys: frozenset[str]
    counter: int  # of its changes
    changed_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """All files together."""

    accounts: Mapping[str, Account]
    white: Addresses  # who need not sign requests about messages
    files: tuple[FileState, ...]


NOTHING = Snapshot({}, Addresses(), ())


def paths_of(disk: Disk, path: str) -> list[str]:
    """The files that there are, the main one first."""
    folder = os.path.join(os.path.dirname(path), FOLDER)
    names = [name for name in disk.list(folder) if name.endswith(ENDINGS) and name != NOT_ACCOUNTS]
    if len(names) > FILES_MAX:
        raise ConfigError(f"{folder} has {len(names)} account files; use at most {FILES_MAX}")
    main = [path] if disk.exists(path) else []
    return main + [os.path.join(folder, name) for name in names]


def read_all(
    disk: Disk, paths: Sequence[str], instead: Mapping[str, bytes] | None = None
) -> Snapshot:
    """ConfigError names the file and the entry at fault. `instead` has what some files would."""
    accounts: dict[str, Account] = {}
    white: list[str] = []
    files = []
    for path in paths:
        data = (instead or {}).get(path)
        document = read(disk, path) if data is None else parse(data, path)
        try:
            own = [_account(entry) for entry in entries_of(document)]
            white += _texts(document.get("globalWhiteRemoteAddresses"))
            Addresses(white)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        for account in own:
            accounts.setdefault(account.access_key, account)
        counter, changed_ms = version_of(document)
        keys = frozenset(account.access_key for account in own)
        files.append(FileState(path, keys, counter, changed_ms))
    if len(accounts) > ACCOUNTS_MAX:
        raise ConfigError(f"there are {len(accounts)} accounts; at most {ACCOUNTS_MAX} are served")
    return Snapshot(accounts, Addresses(white), tuple(files))


def read(disk: Disk, path: str) -> Document:
    """The file as maps, lists and texts."""
    try:
        data = disk.read(path) if disk.size(path) <= FILE_BYTES_MAX else None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    if data is None:
        raise ConfigError(f"{path} is larger than {FILE_BYTES_MAX} bytes; that is no account file")
    return parse(data, path)


def parse(data: bytes, path: str) -> Document:
    try:
        _check_plain(data)
        document = yaml.load(data, Loader=_LOADER)  # texts only, no objects
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"{path} is no YAML that an account file may have: {error}") from None
    if document in (None, ""):
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path} does not begin with a map; see docs/security.md")
    return document


def text_of(document: Document) -> bytes:
    text: str = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    return text.encode()


def entries_of(document: Document) -> list[Document]:
    """The accounts of a document, one map each; changing them changes the document."""
    entries = document.get("accounts") or []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError("accounts must be a list of maps; see docs/security.md")
    return entries


def version_of(document: Document) -> tuple[int, int]:
    """How often the document was changed by requests, and when for the last time."""
    rows = document.get("dataVersion")
    row = rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], dict) else {}
    return _whole(row.get("counter")), _whole(row.get("timestamp"))


def check_key(name: str, text: str) -> None:
    if not KEY_CHARACTERS_MIN <= len(text) <= KEY_CHARACTERS_MAX or not text.isprintable():
        raise ConfigError(
            f"{name} must have {KEY_CHARACTERS_MIN} to {KEY_CHARACTERS_MAX} printable characters"
        )


def is_true(value: object) -> bool:
    return str(value).strip().lower() == "true"


def _account(entry: Document) -> Account:
    access_key = _text(entry, "accessKey")
    check_key("accessKey", access_key)
    try:
        secret = _text(entry, "secretKey")
        check_key("secretKey", secret)
        return Account(
            access_key=access_key,
            secret=secret.encode(),
            white=Addresses([_text(entry, "whiteRemoteAddress")]),
            admin=is_true(entry.get("admin")),
            peer=is_true(entry.get("peer")),
            default_topic=right_of(_text(entry, "defaultTopicPerm")),
            default_group=right_of(_text(entry, "defaultGroupPerm")),
            topics=dict(_rights("topicPerms", entry)),
            groups=dict(_rights("groupPerms", entry)),
        )
    except ConfigError as error:
        raise ConfigError(f"account {access_key}: {error}") from None


def text_of_right(right: Right) -> str:
    return _TEXTS.get(right, "DENY")


def right_of(text: str) -> Right:
    return _RIGHTS.get(text.replace(" ", ""), Right.NONE)


def _rights(key: str, entry: Document) -> Iterator[tuple[str, Right]]:
    for item in _texts(entry.get(key)):
        name, equals, right = item.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{key} has {item[:64]!r}; write NAME=PUB, NAME=SUB or NAME=PUB|SUB")
        yield name.strip(), right_of(right)


def _text(entry: Document, key: str) -> str:
    value = entry.get(key) or ""
    if not isinstance(value, str):
        raise ConfigError(f"{key} must be one text")
    return value.strip()


def _texts(value: object) -> list[str]:
    if value in (None, ""):
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError("a list of texts was expected; write one item per line, each after a -")
    return [item for item in value if item.strip()]


def _whole(value: object) -> int:
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0


def _check_plain(data: bytes) -> None:
    """Before anything is built of it: no references, and no deeper than an account file is."""
    depth = 0
    for event in yaml.parse(data, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has references (*name); write each value out")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > DEPTH_MAX:
                raise ValueError(f"it is nested more than {DEPTH_MAX} levels deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
