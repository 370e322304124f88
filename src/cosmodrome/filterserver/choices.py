"""Which filter a consumer group uses for a topic, as its clients say with each heartbeat.

Clients repeat it every 30 seconds, so nothing is kept on disk. A name without an installed
filter is refused and remembered all the same: once the operator installs the filter, pulls are
served without waiting for the next heartbeat. Java clients send source text along with the name;
it is dropped unread.
"""

from __future__ import annotations

import logging

from cosmodrome.errors import Code, Refused
from cosmodrome.filterserver.filters import Filter, Installed, is_filter_name
from cosmodrome.wire.commands.filter import RegisterMessageFilterClass
from cosmodrome.wire.names import check_group, check_topic
from cosmodrome.wire.table import Call, Reply

log = logging.getLogger(__name__)

CHOICES_MAX = 10_000


class Choices:
    def __init__(self, installed: Installed) -> None:
        self._installed = installed
        # (group, topic) -> filter name, the one heard of longest ago first
        self._names: dict[tuple[str, str], str] = {}

    def __len__(self) -> int:
        return len(self._names)

    @RegisterMessageFilterClass.handler
    def choose(self, ask: RegisterMessageFilterClass, call: Call) -> Reply:
        check_group(ask.consumer_group)
        check_topic(ask.topic)
        if not is_filter_name(ask.class_name):
            raise Refused(
                Code.SYSTEM_ERROR,
                f"{ask.class_name[:64]!r} is not a filter name; subscribe with words joined by"
                " dots, like com.acme.Green.",
            )
        self._remember((ask.consumer_group, ask.topic), ask.class_name)
        self._installed.find(ask.class_name)
        return Reply()

    def of(self, group: str, topic: str) -> Filter:
        """The filter a group uses for a topic; Refused when there is none to use."""
        name = self._names.get((group, topic))
        if name is None:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"Consumer group {group} has not named a filter for {topic} here; its clients do"
                " so with their next heartbeat, within 30 seconds.",
            )
        return self._installed.find(name)

    def _remember(self, key: tuple[str, str], name: str) -> None:
        before = self._names.pop(key, None)
        if before != name:
            log.info("filter_chosen group=%s topic=%s filter=%s before=%s", *key, name, before)
        self._names[key] = name
        if len(self._names) > CHOICES_MAX:
            gone = next(iter(self._names))
            del self._names[gone]
            log.warning("filter_choices_full max=%d dropped_group=%s", CHOICES_MAX, gone[0])
