"""One JSON object per line of the log, with the values as they were."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from cosmodrome.cli.serve.log_format import JsonFormatter, of_worker
from cosmodrome.transport.audit_log import AUDIT, FIELDS


def formatted(text: str, *args: Any, **more: Any) -> dict[str, Any]:
    extra = more.pop("extra", {})
    record = logging.LogRecord(
        more.get("name", "cosmodrome.x"), logging.INFO, "f.py", 1, text, args, more.get("error")
    )
    for key, value in extra.items():
        setattr(record, key, value)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    read: dict[str, Any] = json.loads(line)
    return read


def test_values_keep_their_types() -> None:
    line = formatted(
        "slow_request request=%s code=%d took_ms=%.1f peer=%s:%d ok=%s", "X", 17, 1.25, "h", 9, True
    )
    assert line["event"] == "slow_request"
    assert line["message"] == "slow_request request=X code=17 took_ms=1.2 peer=h:9 ok=True"
    assert line["fields"] == {
        "request": "X",
        "code": 17,
        "took_ms": 1.25,
        "peer": "h:9",
        "ok": True,
    }
    assert (line["level"], line["logger"]) == ("INFO", "cosmodrome.x")


def test_times_are_utc() -> None:
    record = logging.LogRecord("x", logging.INFO, "f.py", 1, "x", (), None)
    record.created, record.msecs = 1_700_000_000.25, 250.0
    line = json.loads(JsonFormatter().format(record))
    assert line["time"] == "2023-11-14T22:13:20.250Z"


@pytest.mark.parametrize(
    ("text", "args", "fields"),
    [
        ("broker_id_ignored id=%d role=%s; a master is 0", (3, "M"), {"id": 3, "role": "M"}),
        ("listening: name=%s port=%d", ("name server", 9), {"name": "name server", "port": 9}),
        ("thing why=%r", ("a 'b'",), {"why": "a 'b'"}),
        ("thing reason='no stop within %g s' name=%s", (3, "n"), {"name": "n"}),
        ("share=%d%% of=%s", (5, "x"), {"share": "5%", "of": "x"}),
        ("fixed a=b", (), {"a": "b"}),
        ("odd key=%s", ([1, 2],), {"key": "[1, 2]"}),
        ("none at all", (), None),
    ],
)
def test_fields(text: str, args: tuple[Any, ...], fields: dict[str, Any] | None) -> None:
    found: Any = formatted(text, *args).get("fields")
    if fields is not None and "reason" in text:
        found = {key: found[key] for key in fields}  # a quoted sentence is in the message
    assert found == fields


def test_only_names_of_events_are_events() -> None:
    assert "event" not in formatted("request failed unexpectedly: x=%d", 1)
    assert "event" not in formatted("listening: name=%s", "x")
    assert formatted("supervisor_gone; stopping")["event"] == "supervisor_gone"


def test_audits_have_their_values_whole() -> None:
    fields = {"action": "kv_put", "after": {"a": [1, None]}}
    line = formatted("audit %s", "action=kv_put ...", name=AUDIT, extra={FIELDS: fields})
    assert line["event"] == "audit" and line["fields"] == fields


def test_errors_have_their_trace_in_the_same_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        line = formatted("it_failed", error=sys.exc_info())
    assert line["exception"].startswith("Traceback") and "ValueError" in line["exception"]


def test_lines_of_workers_stay_objects() -> None:
    marked = json.loads(of_worker("b-1", '{"time": "t", "fields": {"worker": 1}}'))
    assert marked == {"worker": "b-1", "time": "t", "fields": {"worker": 1}}
    assert json.loads(of_worker("b-1", 'cosmo: "bad" {x}')) == {
        "worker": "b-1",
        "message": 'cosmo: "bad" {x}',
    }
    assert json.loads(of_worker("b", "{broken"))["message"] == "{broken"


def test_changes_are_logged_whatever_the_level() -> None:
    program = (
        "import logging\n"
        "from cosmodrome.cli.serve import log_format\n"
        "from cosmodrome.transport.audit_log import changed\n"
        "log_format.set_up('error', 'json')\n"
        "logging.getLogger('x').warning('not_shown')\n"
        "changed(None, 'topic_created', topic='T')\n"
        "logging.getLogger('x').error('shown_too a=%d', 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in lines] == ["audit", "shown_too"]
    assert lines[0]["fields"] == {"action": "topic_created", "topic": "T"}


@pytest.mark.parametrize("form", ["text", "json"])
def test_peers_forge_no_lines(form: str) -> None:
    program = (
        "import logging; from cosmodrome.cli.serve.log_format import set_up;"
        f"set_up('info', {form!r});"
        "name = 'me' + ''.join(map(chr, (10, 13, 0, 27, 0x85, 0x2028, 0x202e))) + 'INFO forged';"
        "logging.getLogger('cosmodrome.x').info('client gone: client=%s', name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, encoding="utf-8", check=True
    )
    (line,) = done.stderr.splitlines()
    escaped = "me\\n\\r\\u0000\\u001b\\u0085\\u2028\\u202eINFO forged"
    assert escaped in line
    if form == "json":
        name = json.loads(line)["fields"]["client"]
        assert name == "me\n\r\0\x1b\x85\u2028\u202eINFO forged"
