"""Whatever a peer puts into a name, an entry of the log is one line."""

from __future__ import annotations

import io
import logging
import unicodedata
from collections.abc import Iterator

import pytest

from cosmodrome.env.log_lines import LineFormatter, one_line

FORGED = "2026-01-01 00:00:00,000 INFO cosmodrome.audit audit action=topic_deleted"
# CR, LF, both, NEL, separators, ESC with a command, NUL, backspace, DEL, CSI, bidi controls, BOM
CODES = (
    (13,), (10,), (13, 10), (0x85,), (0x2028,), (0x2029,), (11,), (12,), (0x1C,),
    (0x1B, 0x5B, 0x32, 0x4A), (0,), (8,), (0x7F,), (0x9B,), (0x061C,), (0x200E,), (0x200F,),
    (0x202A,), (0x202E,), (0x2066,), (0x2069,), (0xFEFF,),
)  # fmt: skip
HOSTILE = ["".join(map(chr, codes)) for codes in CODES]


@pytest.fixture
def written() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    log, out = logging.Logger("cosmodrome.x"), io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(LineFormatter("%(levelname)s %(name)s %(message)s"))
    log.addHandler(handler)
    yield log, out
    handler.close()


@pytest.mark.parametrize("hostile", HOSTILE, ids=ascii)
def test_a_name_cannot_end_a_line(
    written: tuple[logging.Logger, io.StringIO], hostile: str
) -> None:
    log, out = written
    log.info("client gone: client=%s peer=%s", f"me{hostile}{FORGED}", "h:1")
    text = out.getvalue()
    assert len(text.splitlines()) == 1
    assert not [c for c in text[:-1] if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")]
    assert text.startswith("INFO cosmodrome.x client gone: client=me\\")
    assert text.endswith(f"{FORGED} peer=h:1\n")


def test_what_is_safe_stays_as_it_is() -> None:
    for text in ("client=10.0.0.1@7 %RETRY%g|x", "größe ключ 注文 🚀", "a\\b 'c' \"d\""):
        assert one_line(text) == text


def test_no_line_of_a_traceback_looks_like_an_entry(
    written: tuple[logging.Logger, io.StringIO],
) -> None:
    log, out = written
    try:
        raise ValueError(f"bad name a\n{FORGED}\x1b[2J")
    except ValueError:
        log.exception("request failed", stack_info=True)
    first, *rest = out.getvalue().splitlines()
    assert first == "ERROR cosmodrome.x request failed"
    assert "  Traceback (most recent call last):" in rest
    assert "  Stack (most recent call last):" in rest
    assert all(line.startswith("  ") for line in rest)
    assert "\x1b" not in out.getvalue()
