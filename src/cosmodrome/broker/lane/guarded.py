"""The fast lane behind access control: it is given what is proven, and nothing else.

Compiled code (`speed.signed`) walks through the frames first and says how far each is signed by
an account that may do what it asks; the lane serves these as if there were no access control. The
first frame that is not proven goes to the slow lane, whose gate decides about it and says what is
wrong. So nothing here refuses anything, and nothing that the gate would refuse gets into the lane.
Which rights a request takes is what its row in the table of commands needs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cosmodrome.access.gate import Gate
from cosmodrome.broker.lane.lane import Lane
from cosmodrome.layout import CODE_COMMIT, CODE_PULL, CODE_SEND, CODE_SEND_BATCH, CODE_SEND_V2
from cosmodrome.speed import signed as core
from cosmodrome.transport.connection import SocketConnection
from cosmodrome.wire import table
from cosmodrome.wire.frame import frame_end
from cosmodrome.wire.table import Command

CODES = (CODE_SEND, CODE_SEND_V2, CODE_SEND_BATCH, CODE_PULL, CODE_COMMIT)


class GuardedLane:
    """A `transport.peers.Lane`; see the module."""

    def __init__(self, lane: Lane, gate: Gate) -> None:
        self._lane = lane
        self._gate = gate
        self._rows = {code: _Row(table.rows()[code]) for code in CODES}
        wire_names = {code: row.wire_names for code, row in self._rows.items()}
        self._signatures = core.Signatures(wire_names, self._secret, self._grants)
        self._accounts = gate.accounts
        self._generation = self._accounts.generation
        self._white = self._accounts.white  # addresses that need not sign, of this generation
        # A frame that the lane leaves comes back with the rest of its buffer: what was proven of
        # that stays so.
        self._view: memoryview | None = None
        self._end = 0

    def feed(self, connection: SocketConnection, view: memoryview, at: int) -> int:
        """Serve whole frames from `at` on; where the first one begins that is left over."""
        if self._accounts.generation != self._generation:
            self._begin_generation()
        if self._white and self._white.has(connection.peer[0]):
            return self._lane.feed(connection, view, at)
        if view is self._view and at < self._end:
            end = self._end
        else:
            self._view = view
            end = self._end = self._signatures.proven_end(view, at)
        if end == len(view):
            return self._lane.feed(connection, view, at)
        more = frame_end(view, end) > 0
        return self._lane.feed(connection, view[:end], at, more=more)

    def _begin_generation(self) -> None:
        """Accounts may have changed: nothing that was proven counts any more."""
        self._generation = self._accounts.generation
        self._white = self._accounts.white
        self._signatures.forget()
        self._view = None

    def _secret(self, access_key: str) -> bytes | None:
        account = self._gate.account(access_key)
        return None if account is None else account.secret

    def _grants(self, access_key: str, code: int, values: tuple[str, ...]) -> bool:
        row = self._rows[code]
        ask = SimpleNamespace(**dict(zip(row.names, values, strict=True)))
        return self._gate.grants(access_key, row.command, ask)


class _Row:
    """A row whose rights depend on some header fields only: their names here and on the wire."""

    def __init__(self, command: type[Command[Any]]) -> None:
        needs = command.needs
        assert needs is not None and needs.fields, f"{command.describe()}: rights beyond its header"
        self.command = command
        self.names = needs.fields
        on_wire = {field.name: field.encode_name for field in table.header_fields(command)}
        self.wire_names = tuple(on_wire[name] for name in self.names)
