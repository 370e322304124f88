"""The room for operators: figures, reports, settings, and questions to clients."""

from __future__ import annotations

import dataclasses

from cosmodrome.broker.counts.slow_requests import SlowSends
from cosmodrome.broker.counts.stats import Stats
from cosmodrome.broker.foundation import Foundation, Service
from cosmodrome.broker.later.room import Later
from cosmodrome.broker.members.room import Members
from cosmodrome.broker.operate.accounts import AccountChanges
from cosmodrome.broker.operate.cleaning import Cleaning
from cosmodrome.broker.operate.group_reports import GroupReports
from cosmodrome.broker.operate.progress_reports import ProgressReports
from cosmodrome.broker.operate.query import Query
from cosmodrome.broker.operate.relays import Relays
from cosmodrome.broker.operate.replication_view import ReplicationView
from cosmodrome.broker.operate.runtime_info import RuntimeInfo
from cosmodrome.broker.operate.settings import Settings
from cosmodrome.broker.operate.stats_view import StatsView
from cosmodrome.broker.receive.room import Receive
from cosmodrome.broker.send.room import Send
from cosmodrome.store.store import hours_of


@dataclasses.dataclass(frozen=True, slots=True)
class Operate:
    runtime_info: RuntimeInfo
    replication: ReplicationView
    progress_reports: ProgressReports
    relays: Relays
    group_reports: GroupReports
    query: Query
    settings: Settings
    stats: Stats
    stats_view: StatsView
    cleaning: Cleaning
    accounts: AccountChanges

    @property
    def handlers(self) -> tuple[object, ...]:
        return (
            self.runtime_info,
            self.replication,
            self.progress_reports,
            self.relays,
            self.group_reports,
            self.query,
            self.settings,
            self.stats_view,
            self.cleaning,
            self.accounts,
        )

    @property
    def services(self) -> tuple[Service, ...]:
        return (self.runtime_info, self.stats, self.settings)


def build_operate(
    base: Foundation, members: Members, receive: Receive, later: Later, send: Send
) -> Operate:
    options, store, stats = base.options, base.store, base.stats
    replication = ReplicationView(base)
    return Operate(
        runtime_info=_runtime_info(base, receive, later, send, replication),
        replication=replication,
        progress_reports=ProgressReports(base, members),
        relays=Relays(base, members),
        group_reports=GroupReports(base, members, receive.expressions),
        query=Query(options, store),
        settings=_settings(base, members),
        stats=stats,
        stats_view=StatsView(stats, store, base.env.clock, options.broker_cluster_name),
        cleaning=Cleaning(store, members.topics),
        accounts=AccountChanges(base),
    )


def _runtime_info(
    base: Foundation, receive: Receive, later: Later, send: Send, replication: ReplicationView
) -> RuntimeInfo:
    slow_sends = SlowSends(send.put_times, base.stats, lambda: base.options.slow_request_millis)
    return RuntimeInfo(
        base,
        receive.consume,
        send.put_times,
        figures=lambda: {
            **later.delays.figures(),
            **send.pressure.figures(),
            **replication.figures(),
        },
        each_second=slow_sends.look,
    )


def _settings(base: Foundation, members: Members) -> Settings:
    """Most live settings are read where they are used; some have to be carried somewhere."""
    options = base.options

    def follow(keys: frozenset[str]) -> None:
        base.stats.detailed = options.enable_detail_stat
        base.store.follow_settings()
        if keys & {"autoCreateTopicEnable", "brokerPermission"}:
            members.topics.follow_settings()

    groups = (options, base.store_options, base.sockets)
    settings = Settings(groups, base.env, base.config_dir, {"deleteWhen": hours_of})
    settings.changed.subscribe(follow)
    return settings
