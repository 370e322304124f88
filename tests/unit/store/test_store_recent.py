"""What was written lately: found while it is there, bounded, let go when it was dispatched."""

from __future__ import annotations

import pytest

from cosmodrome.store import recent as module
from cosmodrome.store.recent import Recent


def found(recent: Recent, offset: int) -> tuple[bytes, int] | None:
    got = recent.find(offset)
    return None if got is None else (bytes(got[0]), got[1])


def test_found_where_it_was_written() -> None:
    recent = Recent()
    recent.add(100, 103, bytearray(b"abc"))
    recent.add(103, 200, bytearray(b"blank"))  # the rest of the file is empty
    recent.add(200, 201, bytearray(b"d"))
    assert found(recent, 99) is None
    assert found(recent, 100) == found(recent, 102) == (b"abc", 100)
    assert found(recent, 103) == found(recent, 150) == (b"blank", 103)
    assert found(recent, 200) == (b"d", 200)
    assert found(recent, 201) is None
    recent.let_go(150)
    assert found(recent, 100) is None and found(recent, 103) == (b"blank", 103)
    recent.let_go(201)
    assert len(recent) == recent.size_bytes == 0


def test_the_oldest_go_when_it_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECENT_BYTES_MAX", 5)
    recent = Recent()
    recent.add(0, 3, bytearray(b"abc"))
    recent.add(3, 5, bytearray(b"de"))
    assert recent.size_bytes == 5 and found(recent, 0) == (b"abc", 0)
    recent.add(5, 6, bytearray(b"f"))
    assert found(recent, 0) is None and found(recent, 3) == (b"de", 3)
    assert recent.size_bytes == 3
