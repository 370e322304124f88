"""Files that are replaced as a whole: the file itself, and the one before it under `.bak`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from cosmodrome.env.base import Disk

T = TypeVar("T")

ABSENT = "it does not exist"


class Unreadable(Exception):
    """Neither generation can be used; the text says why, for each of them."""


class Generation(NamedTuple, Generic[T]):
    content: T
    damage: str  # why the previous generation had to be used; empty when it is the file itself


def previous(path: str) -> str:
    return path + ".bak"


def newest(disk: Disk, path: str, decode: Callable[[bytes], T]) -> Generation[T] | None:
    """The newest generation that can be read, or None when nothing was ever saved.

    `decode` raises ValueError for content that cannot be used.
    """
    problems = []
    for candidate in (path, previous(path)):
        if not disk.exists(candidate):
            problems.append(ABSENT)
            continue
        try:
            return Generation(decode(disk.read(candidate)), problems[0] if problems else "")
        except (OSError, ValueError) as error:
            problems.append(str(error))
    if problems == [ABSENT, ABSENT]:
        return None
    raise Unreadable(
        f"{path} cannot be used ({problems[0]}) and neither can {previous(path)} ({problems[1]})"
    )
