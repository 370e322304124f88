"""Pulls of consumers: forwarded to the broker, answered with what the group's filter lets pass.

The broker is asked for everything, in the name of the consumer's group, so that its checks, its
long polling and the commit a pull may carry work as in a direct pull. Records that pass travel
on byte for byte. `nextBeginOffset` is the broker's: it lies behind what was filtered out, too.
"""

from __future__ import annotations

from typing import Protocol

from cosmodrome.errors import Code, Refused, TimedOut, Unreachable
from cosmodrome.filterserver.choices import Choices
from cosmodrome.filterserver.sieve import Sieve
from cosmodrome.layout import PULL_COMMIT, PULL_SUBSCRIPTION, PULL_SUSPEND
from cosmodrome.wire.bodies import EVERYTHING, MASTER_ID, TAG
from cosmodrome.wire.commands.consume import PullMessage, PullReply
from cosmodrome.wire.names import check_group, check_topic
from cosmodrome.wire.table import Call

HOLD_MS_MAX = 120_000
ANSWER_MS = 10_000  # for the broker, beyond the time it may hold a pull


class Broker(Protocol):
    """The one call that is needed of the channel to the broker."""

    async def call(self, command: PullMessage, timeout_ms: int = ...) -> PullReply: ...


class Pulls:
    """The totals count messages that came from the broker and those that passed."""

    def __init__(self, broker: Broker, choices: Choices, sieve: Sieve, in_flight_max: int) -> None:
        self._broker = broker
        self._choices = choices
        self._sieve = sieve
        self._in_flight_max = in_flight_max
        self.in_flight = 0
        self.seen_total = 0
        self.passed_total = 0

    @PullMessage.handler
    async def pull(self, ask: PullMessage, call: Call) -> PullReply:
        # Compat: as upstream's, this server does not ask for the class-filter bit of sysFlag.
        check_group(ask.consumer_group)
        check_topic(ask.topic)
        chosen = self._choices.of(ask.consumer_group, ask.topic)
        if self.in_flight >= self._in_flight_max:
            raise Refused(
                Code.SYSTEM_BUSY,
                f"This filter server already has {self.in_flight} pulls under way"
                " (pullsInFlightMax); pull again, or start another one.",
            )
        self.in_flight += 1
        try:
            reply = await self._forward(ask)
            if reply.code == Code.SUCCESS:
                sifted = await self._sieve.run(chosen, reply.body, ask.consumer_group)
                self.seen_total += sifted.seen
                self.passed_total += sifted.passed
                reply.body = sifted.data
                if not sifted.passed:
                    reply.code = Code.PULL_RETRY_IMMEDIATELY
                    reply.remark = "NO_MATCHED_MESSAGE"
        finally:
            self.in_flight -= 1
        # Compat: as upstream's. A broker may suggest a slave, which need not have a filter server.
        reply.suggest_which_broker_id = MASTER_ID
        return reply

    async def _forward(self, ask: PullMessage) -> PullReply:
        hold_ms = 0
        if ask.sys_flag & PULL_SUSPEND:
            hold_ms = min(max(ask.suspend_timeout_millis, 0), HOLD_MS_MAX)
        everything = PullMessage(
            consumer_group=ask.consumer_group,
            topic=ask.topic,
            queue_id=ask.queue_id,
            queue_offset=ask.queue_offset,
            max_msg_nums=ask.max_msg_nums,
            sys_flag=ask.sys_flag & (PULL_COMMIT | PULL_SUSPEND) | PULL_SUBSCRIPTION,
            commit_offset=ask.commit_offset,
            suspend_timeout_millis=hold_ms,
            subscription=EVERYTHING,
            sub_version=ask.sub_version,
            expression_type=TAG,
        )
        try:
            return await self._broker.call(everything, timeout_ms=hold_ms + ANSWER_MS)
        except (TimedOut, Unreachable) as error:
            raise Refused(
                Code.SYSTEM_ERROR, f"The broker of this filter server gives no answer: {error}"
            ) from error
