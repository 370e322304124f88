"""How lines of the log look: text as it always was, or one JSON object per line.

The words of the code are `event key=%s key=%d`, so an object can have the values as they were
before they became text: they are taken from the template of the line and its arguments.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Iterator

from cosmodrome.env.log_lines import LineFormatter, one_line
from cosmodrome.transport.audit_log import AUDIT, FIELDS

TEXT, JSON = "text", "json"
FORMATS = (TEXT, JSON)
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"

_DIRECTIVE = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?([a-zA-Z%])")
_EVENT = re.compile(r"[a-z][a-z0-9_]*\Z")
_PAIR = re.compile(r"([A-Za-z_]\w*)=(.+)\Z", re.DOTALL)


def set_up(level: str, form: str) -> None:
    """Log to stderr. Changes are in the log whatever the level is: that is what an audit is for."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == JSON else LineFormatter(TEXT_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger(AUDIT).setLevel(min(logging.INFO, logging.getLogger().level))


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        line: dict[str, object] = {
            "time": f"{_utc(record.created)}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": message,
        }
        event = str(record.msg).split(" ", 1)[0].removesuffix(";")
        if _EVENT.match(event) and ("_" in event or record.name == AUDIT):
            line["event"] = event
        fields = getattr(record, FIELDS, None)
        if fields is None:
            fields = dict(_fields(record))
        if fields:
            line["fields"] = fields
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return one_line(json.dumps(line, ensure_ascii=False, default=str))


def of_worker(name: str, line: str) -> str:
    """A line that a worker wrote, as one of ours."""
    if line.startswith("{") and line.endswith("}"):
        return f'{{"worker": {json.dumps(name)}, {line[1:]}'
    return json.dumps({"worker": name, "message": line}, ensure_ascii=False)


def _fields(record: logging.LogRecord) -> Iterator[tuple[str, object]]:
    """The key=value pairs of a line."""
    args = record.args if isinstance(record.args, tuple) else (record.args,)
    rest = list(args) if record.args else []
    for word in str(record.msg).split(" "):
        taken = sum(found[1] != "%" for found in _DIRECTIVE.finditer(word))
        values, rest = tuple(rest[:taken]), rest[taken:]
        pair = _PAIR.match(word)
        if pair is None:
            continue
        name, form = pair[1], pair[2].removesuffix(";")
        only = _DIRECTIVE.fullmatch(form)
        if only is not None and len(values) == 1:
            plain = isinstance(values[0], bool | int | float | str)
            yield name, values[0] if plain else str(values[0])
        elif taken == len(values):
            yield name, form % values if values else form


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
