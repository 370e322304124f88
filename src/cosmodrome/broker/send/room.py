"""The room of sends: taking messages, replies to requests, and what is too much."""

from __future__ import annotations

import dataclasses

from cosmodrome.broker.counts.pressure import Pressure
from cosmodrome.broker.counts.put_times import PutTimes
from cosmodrome.broker.foundation import Foundation, Service
from cosmodrome.broker.later.deferral import Deferral
from cosmodrome.broker.members.room import Members
from cosmodrome.broker.send.produce import Produce
from cosmodrome.broker.send.replies import Replies


@dataclasses.dataclass(frozen=True, slots=True)
class Send:
    produce: Produce
    replies: Replies
    pressure: Pressure
    put_times: PutTimes

    @property
    def handlers(self) -> tuple[object, ...]:
        return (self.produce, self.replies)

    @property
    def services(self) -> tuple[Service, ...]:
        return (self.pressure,)


def build_send(base: Foundation, members: Members, deferral: Deferral) -> Send:
    put_times, pressure = PutTimes(), Pressure(base.options)
    produce = Produce(base, members, deferral, put_times, pressure)
    return Send(produce, Replies(base, members.clients, produce), pressure, put_times)
