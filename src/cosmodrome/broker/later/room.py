"""The room of messages that wait: delay levels, timers, retries and transactions."""

from __future__ import annotations

import dataclasses

from cosmodrome.broker.counts.transaction_counts import TransactionCounts
from cosmodrome.broker.foundation import Foundation, Service
from cosmodrome.broker.later.check_back import CheckBack
from cosmodrome.broker.later.deferral import Deferral
from cosmodrome.broker.later.delay import Delays
from cosmodrome.broker.later.delivery import DeliverySettings
from cosmodrome.broker.later.halves import Decisions
from cosmodrome.broker.later.recall import Recall
from cosmodrome.broker.later.retry import Retry
from cosmodrome.broker.later.timer_list import TimerList
from cosmodrome.broker.later.timers import Timers
from cosmodrome.broker.later.transactions import Transactions
from cosmodrome.broker.members.room import Members
from cosmodrome.store.store import DelayLevels


@dataclasses.dataclass(frozen=True, slots=True)
class Later:
    deferral: Deferral
    delays: Delays
    timers: Timers
    timer_list: TimerList
    recall: Recall
    retry: Retry
    transactions: Transactions
    check_back: CheckBack
    transaction_counts: TransactionCounts

    @property
    def handlers(self) -> tuple[object, ...]:
        return (self.delays, self.retry, self.recall, self.timer_list, self.transactions)

    @property
    def services(self) -> tuple[Service, ...]:
        return (self.delays, self.timers, self.check_back)


def build_later(base: Foundation, members: Members) -> Later:
    store, env, topics = base.store, base.env, members.topics
    levels = DelayLevels(base.store_options.message_delay_level)
    settings = DeliverySettings(
        save_interval_ms=base.store_options.flush_delay_offset_interval,
        role=base.role,
        stats=base.stats,
    )
    delays = Delays(levels, base.config_file("delayOffset.json"), store, env, settings)
    timers = Timers(base.config_file("timerOffset.json"), store, env, settings)
    deferral = Deferral(
        levels,
        topics,
        env.clock,
        timer_delay_seconds_max=base.store_options.timer_max_delay_sec,
        timers_full=timers.full,
    )
    decisions, counts = Decisions(), TransactionCounts()
    topics.gone.subscribe(counts.forget_topic)
    return Later(
        deferral=deferral,
        delays=delays,
        timers=timers,
        timer_list=TimerList(base.options.broker_name, timers),
        recall=Recall(base, topics, deferral),
        retry=Retry(base, members, deferral),
        transactions=Transactions(base, members, deferral, decisions, counts),
        check_back=CheckBack(base, members, decisions),
        transaction_counts=counts,
    )
