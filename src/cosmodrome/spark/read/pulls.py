"""Pulls of one queue, several on their way at once; answers come out in queue order.

Theory of operation. A broker decides how much it gives at once (upstream's: 32 messages or 256 KiB
from memory, 8 or 64 KiB from disk), so the first pull goes alone and its answer says how far one
answer reaches: the *stride*. From then on pulls leave at predicted offsets, a stride apart. Two
things may go wrong with a prediction, and both only cost time:

- an answer reaches less far: the gap before the next one is pulled as well, and the stride shrinks;
- an answer reaches farther: what the next ones repeat is left out by whoever reads them, and those
  that bring nothing new are dropped here.

Without a filter a pull asks for exactly a stride, so nothing is sent twice; now and then one asks
for more, to learn whether the broker would give more by now. With a filter the number of messages
says nothing about the offsets that an answer covers; then the broker always gives what it can.

The answers on their way are expected to stay within `bytes_max`; two are always allowed.
"""

from __future__ import annotations

import collections
import dataclasses

from cosmodrome.errors import ProtocolError
from cosmodrome.spark.cluster import pull_command
from cosmodrome.transport.plain import PlainConnection
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import EVERYTHING, TAG, CheckClientRequestBody, SubscriptionData
from cosmodrome.wire.commands.client import CheckClientConfig
from cosmodrome.wire.commands.consume import PULLED, PullMessage
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.session import RepeatedRequest

ASK_MAX = 1_024  # messages in one answer
AHEAD_MIN = 2  # one on its way while another one is taken apart
LOOK_UP_FIRST, LOOK_UP_LAST = 32, 4_096  # full answers between pulls that ask for more
_REQUESTS_KEPT = 32
_CHECKED_MAX = 1_000


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """What is pulled, and in whose name; `topic` is the full name."""

    topic: str
    queue_id: int
    group: str
    expression: str = EVERYTHING
    kind: str = TAG
    filtered: bool = False  # whether offsets may be left out of an answer

    def check(self, link: PlainConnection, timeout_ms: int) -> None:
        """Let the broker compile an SQL expression; Refused says what is wrong with it.

        Compat: a pull with an expression that cannot be compiled brings every message on 4.x
        and 5.x.
        """
        compiled = (link.address, self)
        if self.kind == TAG or compiled in _checked:
            return
        data = SubscriptionData(
            topic=self.topic, sub_string=self.expression, expression_type=self.kind
        )
        body = CheckClientRequestBody(
            client_id=self.group, group=self.group, subscription_data=data
        )
        link.call(CheckClientConfig(body=bodies.encode(body)), timeout_ms)
        if len(_checked) >= _CHECKED_MAX:
            _checked.clear()
        _checked.add(compiled)


@dataclasses.dataclass(slots=True)
class Pulled:
    """One answer. `body` is good until the next one is asked for."""

    offset: int  # that was asked for
    code: int
    next_offset: int
    min_offset: int
    max_offset: int
    body: bytes | memoryview


@dataclasses.dataclass(slots=True)
class _Pull:
    offset: int
    ask: int
    opaque: int


_checked: set[tuple[str, Selection]] = set()  # expressions and who has compiled them


class Pulls:
    """See the module. It uses one connection and passes the errors of the connection on."""

    def __init__(
        self,
        link: PlainConnection,
        selection: Selection,
        end: int,
        *,
        ahead: int,
        bytes_max: int,
        timeout_ms: int,
    ) -> None:
        self._link = link
        self._selection = selection
        self._end = end
        self._ahead = ahead
        self._bytes_max = bytes_max
        self._timeout_ms = timeout_ms
        self._next = 0  # where the pull behind the last one begins
        self._out: collections.deque[_Pull] = collections.deque()  # by offset
        self._held: dict[int, Frame] = {}  # answers that came before their turn
        self._requests: dict[int, RepeatedRequest] = {}  # by the number of messages they ask for
        self._stride = 0  # 0: not known yet
        self._message_bytes = 0.0
        self._answer_bytes = 0
        self._full = 0  # full answers since the last look for more
        self._look_up_after = LOOK_UP_FIRST

    def next(self, position: int) -> Pulled:
        """The next answer, for somebody who has everything before `position`.

        It covers `position`, or says why there is nothing. Refused when the broker says no.
        """
        out = self._out
        while True:
            while len(out) > 1 and out[1].offset <= position:
                self._forget(out.popleft())  # the one behind it covers as much
            if not out:
                out.append(self._pull(position, self._ask(position)))
                self._next = position + self._stride
            elif out[0].offset > position:
                gap = out[0].offset - position
                out.appendleft(self._pull(position, min(gap, self._ask(position))))
            self._fill()
            self._link.flush(self._timeout_ms)
            pull = out[0]
            frame = self._await(pull)
            out.popleft()
            if frame.code not in PULLED:
                raise self._link.refusal(PullMessage.name, frame)
            reply = self._reply(pull, frame)
            self._learn(pull, reply)
            if pull.offset == position or reply.next_offset > position:
                return reply

    def again(self) -> None:
        """Forget what is on its way: the next answer will be to a new pull."""
        while self._out:
            self._forget(self._out.popleft())

    # --- asking --------------------------------------------------------------------------------

    def _fill(self) -> None:
        if not self._stride:
            return  # the first answer decides
        count_max = self._ahead
        if self._answer_bytes:
            count_max = min(count_max, max(AHEAD_MIN, self._bytes_max // self._answer_bytes))
        if len(self._out) > count_max // 2:
            return  # several leave together: sending is what costs most
        while len(self._out) < count_max and self._next < self._end:
            self._out.append(self._pull(self._next, self._ask(self._next)))
            self._next += self._stride

    def _ask(self, offset: int) -> int:
        """How many messages a pull there asks for."""
        left = self._end - offset
        if not self._stride or self._selection.filtered:
            return self._ask_max() if self._selection.filtered else min(left, self._ask_max())
        if self._full >= self._look_up_after:
            self._full = 0
            self._look_up_after = min(2 * self._look_up_after, LOOK_UP_LAST)
            return min(left, self._ask_max())
        return min(left, self._stride)

    def _ask_max(self) -> int:
        if not self._message_bytes:
            return ASK_MAX
        fitting = int(self._bytes_max / AHEAD_MIN / self._message_bytes)
        return min(ASK_MAX, max(1, fitting))

    def _pull(self, offset: int, ask: int) -> _Pull:
        request = self._requests.get(ask)
        if request is None:
            if len(self._requests) >= _REQUESTS_KEPT:
                self._requests.clear()
            selection = self._selection
            command = pull_command(
                selection.topic,
                selection.queue_id,
                0,
                ask,
                group=selection.group,
                expression=selection.expression,
                kind=selection.kind,
                bytes_max=self._bytes_max,
            )
            request = self._requests[ask] = RepeatedRequest(command, "queueOffset")
        return _Pull(offset, ask, self._link.write_repeated(request, offset))

    # --- answers -------------------------------------------------------------------------------

    def _await(self, pull: _Pull) -> Frame:
        held = self._held.pop(pull.opaque, None)
        if held is not None:
            return held
        while True:
            frame = self._link.read(self._timeout_ms, PullMessage.name)
            if frame.opaque == pull.opaque:
                return frame
            if any(other.opaque == frame.opaque for other in self._out):
                # Brokers with several threads answer in any order.
                frame.body = bytes(frame.body)
                self._held[frame.opaque] = frame

    def _forget(self, pull: _Pull) -> None:
        self._held.pop(pull.opaque, None)

    def _reply(self, pull: _Pull, frame: Frame) -> Pulled:
        ext = frame.ext
        try:
            return Pulled(
                pull.offset,
                frame.code,
                int(ext["nextBeginOffset"]),
                int(ext["minOffset"]),
                int(ext["maxOffset"]),
                frame.body,
            )
        except (KeyError, ValueError):
            raise ProtocolError(
                f"{self._link.address} answered a pull without its offsets: {ext}"
            ) from None

    def _learn(self, pull: _Pull, reply: Pulled) -> None:
        span = reply.next_offset - reply.offset
        if span <= 0 or not (reply.body or self._selection.filtered):
            return
        size = len(reply.body)
        self._answer_bytes = size if size > self._answer_bytes else (self._answer_bytes + size) // 2
        if self._selection.filtered:
            self._stride = span
            return
        self._message_bytes = size / span
        if not self._stride:
            self._stride = span
        elif span < pull.ask and pull.ask <= self._stride:
            # A little less than it gave: the next answers may hold larger messages.
            self._stride = max(1, span - span // 16)
            self._full = 0
        elif pull.ask > self._stride:
            if span > self._stride:
                self._stride = span
                self._look_up_after = LOOK_UP_FIRST
        else:
            self._full += 1
