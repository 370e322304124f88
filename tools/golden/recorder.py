"""A TCP proxy that writes down every remoting frame that passes.

It hides sockets, frame cutting and header decoding. It is independent of `cosmodrome` on purpose:
what is recorded here judges that code. Each frame is recorded before it is passed on, so the
order of the records is an order in which both sides can have acted.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Line = dict[str, Any]
Names = Mapping[int, str]

LANGUAGES = (
    *("JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY", "OTHER", "HTTP", "GO"),
    *("PHP", "OMS", "RUST"),
)
_FRAME_BYTES_MAX = 16 << 20
# Look-ups that change nothing (offsets of a group, its members, routes), and goodbyes.
_REPEATED = (14, 35, 38, 105)


class Recorder:
    """Proxies in front of servers, and the frames they saw, per scenario."""

    def __init__(self, request_names: Names, response_names: Names) -> None:
        self.scenario = "boot"
        self.lines: dict[str, list[Line]] = {}
        self._request_names = request_names
        self._response_names = response_names
        self._asked: dict[tuple[int, str, int], int] = {}
        self._connections = 0
        self._seq = 0
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="recorder")
        self._thread.start()

    def listen(
        self, link: str, port: int, target_port: int, rewrite: tuple[bytes, bytes] | None = None
    ) -> None:
        """Passes connections to `port` on to `target_port`.

        `rewrite` replaces text in what clients send, so that a server announces the proxy's
        address instead of its own; both texts have the same length.
        """
        if rewrite and len(rewrite[0]) != len(rewrite[1]):
            raise ValueError("a rewrite keeps the length")

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                await self._pass_on(link, reader, writer, target_port, rewrite)
            finally:
                self._tasks.discard(task)

        async def start() -> None:
            self._servers.append(await asyncio.start_server(accept, "127.0.0.1", port))

        asyncio.run_coroutine_threadsafe(start(), self._loop).result(10)

    def close(self) -> None:
        """Ends all connections and the thread; safe to call twice."""
        if not self._thread.is_alive():
            return

        async def end() -> None:
            for server in self._servers:
                server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _pass_on(
        self,
        link: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        target_port: int,
        rewrite: tuple[bytes, bytes] | None,
    ) -> None:
        self._connections += 1
        conn = self._connections
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target_port)
        except OSError:
            writer.close()
            return

        def seen(direction: str) -> Callable[[bytes], None]:
            return lambda frame: self._record(link, conn, direction, frame)

        try:
            await asyncio.gather(
                _pump(reader, far_writer, seen("c2s"), rewrite),
                _pump(far_reader, writer, seen("s2c"), None),
            )
        finally:
            far_writer.close()
            writer.close()

    def _record(self, link: str, conn: int, direction: str, frame: bytes) -> None:
        line = decode(frame)
        header, flag = line["header"], line["header"]["flag"]
        code = header["code"]
        self._seq += 1
        out: Line = {
            "seq": self._seq,
            "t": round(time.time(), 4),
            "link": link,
            "conn": conn,
            "dir": direction,
            "kind": "response" if flag & 1 else "oneway" if flag & 2 else "request",
            "code": code,
        }
        if flag & 1:
            out["name"] = self._response_names.get(code, str(code))
            other = "s2c" if direction == "c2s" else "c2s"
            asked = self._asked.pop((conn, other, header["opaque"]), None)
            if asked is not None:
                out["request"] = self._request_names.get(asked, str(asked))
                out["request_code"] = asked
        else:
            out["name"] = self._request_names.get(code, str(code))
            if not flag & 2:
                self._asked[conn, direction, header["opaque"]] = code
        out.update(line)
        self.lines.setdefault(self.scenario, []).append(out)


async def _pump(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    seen: Callable[[bytes], None],
    rewrite: tuple[bytes, bytes] | None,
) -> None:
    try:
        while True:
            head = await reader.readexactly(4)
            size = int.from_bytes(head, "big")
            if size > _FRAME_BYTES_MAX:
                raise ValueError(f"a frame of {size} bytes is not the remoting protocol")
            frame = head + await reader.readexactly(size)
            if rewrite:
                frame = frame.replace(*rewrite)
            seen(frame)
            writer.write(frame)
            await writer.drain()
    except (asyncio.IncompleteReadError, OSError):
        pass
    finally:
        # The other side may have gone first.
        with contextlib.suppress(OSError):
            if not writer.is_closing():
                writer.write_eof()


def decode(frame: bytes) -> Line:
    """The members of a recorded line that follow from the frame alone."""
    kind, header_size = frame[4], int.from_bytes(frame[5:8], "big")
    header, body = frame[8 : 8 + header_size], frame[8 + header_size :]
    line: Line = {
        "serialize": "ROCKETMQ" if kind else "JSON",
        "header": _binary_header(header) if kind else json.loads(header),
        "body_len": len(body),
    }
    text = _json_like(body)
    if text is not None:
        line["body_text"] = text
        try:
            json.loads(text)
        except ValueError:
            line["body_strict_json"] = False
    line["frame_b64"] = base64.b64encode(frame).decode()
    return line


def _json_like(body: bytes) -> str | None:
    if body[:1] not in (b"{", b"["):
        return None
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


def _binary_header(data: bytes) -> Line:
    code, language, version, opaque, flag, size = struct.unpack_from(">hbhiii", data)
    at = struct.calcsize(">hbhiii")
    header: Line = {
        "code": code,
        "language": LANGUAGES[language],
        "version": version,
        "opaque": opaque,
        "flag": flag,
    }
    if size:
        header["remark"] = data[at : at + size].decode()
    at += size
    (size,) = struct.unpack_from(">i", data, at)
    at += 4
    end = at + size
    fields = {}
    while at < end:
        (size,) = struct.unpack_from(">h", data, at)
        name = data[at + 2 : at + 2 + size].decode()
        at += 2 + size
        (size,) = struct.unpack_from(">i", data, at)
        fields[name] = data[at + 4 : at + 4 + size].decode()
        at += 4 + size
    if fields:
        header["extFields"] = fields
    return header


def without_repetition(scenarios: Mapping[str, list[Line]]) -> dict[str, list[Line]]:
    """Leaves out questions that got the answer they had got before in the same run.

    Clients look up routes, members and offsets all the time, and leave once per group; the first
    exchange says it all.
    """
    answers = {
        (line["conn"], line["header"]["opaque"]): line
        for lines in scenarios.values()
        for line in lines
        if line["kind"] == "response" and line.get("request_code") in _REPEATED
    }
    known = set()
    left_out = set()
    for lines in scenarios.values():
        for line in lines:
            answer = answers.get((line["conn"], line["header"]["opaque"]))
            if answer is None or line["kind"] != "request" or line["code"] not in _REPEATED:
                continue
            key = (*_essence(line), *_essence(answer))
            if key in known:
                left_out |= {line["seq"], answer["seq"]}
            known.add(key)
    return {
        name: [line for line in lines if line["seq"] not in left_out]
        for name, lines in scenarios.items()
    }


def _essence(line: Line) -> tuple[str, bytes]:
    """All of a frame but the number that pairs it with its answer, and who asks."""
    frame = base64.b64decode(line["frame_b64"])
    header = {name: value for name, value in line["header"].items() if name != "opaque"}
    fields = header.get("extFields") or {}
    header["extFields"] = {name: value for name, value in fields.items() if name != "clientID"}
    return json.dumps(header, sort_keys=True), frame[len(frame) - line["body_len"] :]


def write(lines: list[Line], path: Path, neutral: Mapping[bytes, bytes]) -> None:
    """Writes one scenario; `neutral` replaces text by text of the same length."""
    out = []
    for line in lines:
        frame = base64.b64decode(line["frame_b64"])
        for old, new in neutral.items():
            if len(old) != len(new):
                raise ValueError(f"{new!r} is not as long as {old!r}")
            frame = frame.replace(old, new)
        out.append(json.dumps({**line, **decode(frame)}, ensure_ascii=False, separators=(",", ":")))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(out) + "\n", encoding="utf-8")
