"""Which messages of a queue a pull wants, by tags or by an SQL92 expression.

A queue entry carries the Java hash of its message's tag, so a tag filter is a set of hashes;
two tags with equal hashes both pass and the consumer compares the text again. An SQL filter
needs the properties, so it looks at the record. `None` stands for "everything", which lets the
store skip the test.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from cosmodrome.broker.members.expression_types import expression_of, is_tag_type, not_enabled
from cosmodrome.broker.receive.expressions import Registered
from cosmodrome.broker.sql92 import Expression
from cosmodrome.env.options import BrokerOptions
from cosmodrome.errors import Code, Refused
from cosmodrome.layout import PULL_SUBSCRIPTION
from cosmodrome.wire.bodies import (
    EVERYTHING,
    SQL92,
    SubscriptionData,
    SubscriptionGroupConfig,
)
from cosmodrome.wire.commands.consume import PullRequest
from cosmodrome.wire.message import RETRY_TOPIC, tags_code
from cosmodrome.wire.names import RETRY_PREFIX
from cosmodrome.wire.record import record_properties

Matches = Callable[[int], bool]
MatchesRecord = Callable[[memoryview], bool]

BROADCASTING = "BROADCASTING"
EXPRESSION_CHARACTERS_MAX = 32_767
RETRY_COMPARISONS = 64  # what a retried message is tested by is known when it is read


@dataclasses.dataclass(frozen=True, slots=True)
class PullFilter:
    """What a subscription wants: tests of the tags code and of the record, None for all."""

    code: Matches | None = None
    record: MatchesRecord | None = None
    expression: str | None = None  # the text behind `record`, when it alone decides
    comparisons: int = 1  # of `record`, for one message

    def records_max(self, comparisons_max: int) -> int | None:
        """How many records this many comparisons are enough for; None when no record is tested."""
        return None if self.record is None else max(1, comparisons_max // self.comparisons)

    def same_records(self, other: PullFilter) -> bool:
        """Whether the other filter, too, passes over everything that this one passed over."""
        return self.expression is not None and self.expression == other.expression


class OnlineGroup(Protocol):
    """A group that has members right now, as their heartbeats describe it."""

    @property
    def message_model(self) -> str: ...
    @property
    def subscriptions(self) -> Mapping[str, SubscriptionData]: ...


class OnlineGroups(Protocol):
    def group(self, name: str) -> OnlineGroup | None: ...


class KnownExpressions(Protocol):
    def find(self, topic: str, group: str) -> Registered | None: ...


class Filters:
    """Finds the filter of a pull: in the pull itself, or in earlier heartbeats of its group."""

    def __init__(
        self, options: BrokerOptions, clients: OnlineGroups, expressions: KnownExpressions
    ) -> None:
        self._options = options
        self._clients = clients
        self.online = clients.group
        self._expressions = expressions

    def of(self, ask: PullRequest, config: SubscriptionGroupConfig) -> PullFilter:
        """The filter of a pull; Refused when there is none or it cannot be used."""
        code: Matches | None = None
        expression: Expression | None = None
        if ask.sys_flag & PULL_SUBSCRIPTION:
            if is_tag_type(ask.expression_type):
                code = matcher_of_text(ask.subscription)
            else:
                expression = expression_of(ask.expression_type, ask.subscription)
        else:
            subscription = self._subscription(ask, config)
            if is_tag_type(subscription.expression_type) or subscription.class_filter_mode:
                code = matcher_of_subscription(subscription)
            else:
                expression = self._registered(ask, subscription)
        if expression is not None and not self._options.enable_property_filter:
            raise not_enabled(SQL92)
        if ask.topic.startswith(RETRY_PREFIX):
            return self._retry(ask.topic.removeprefix(RETRY_PREFIX), code)
        return PullFilter(code) if expression is None else _by_properties(expression)

    def _subscription(self, ask: PullRequest, config: SubscriptionGroupConfig) -> SubscriptionData:
        name = ask.consumer_group
        group = self._clients.group(name)
        if group is None:
            raise Refused(
                Code.SUBSCRIPTION_NOT_EXIST,
                f"Consumer group {name} has no member that sent a heartbeat here; the client"
                " sends one within 30 seconds.",
            )
        if group.message_model == BROADCASTING and not config.consume_broadcast_enable:
            raise Refused(
                Code.NO_PERMISSION,
                f"Consumer group {name} may not consume by broadcast; its"
                " consumeBroadcastEnable is off.",
            )
        subscription = group.subscriptions.get(ask.topic)
        if subscription is None:
            raise Refused(
                Code.SUBSCRIPTION_NOT_EXIST,
                f"Consumer group {name} is not subscribed to {ask.topic}; all members of a group"
                " must subscribe to the same topics.",
            )
        if subscription.sub_version < ask.sub_version:
            raise Refused(
                Code.SUBSCRIPTION_NOT_LATEST,
                f"The newest subscription of group {name} has not arrived here yet; the next"
                " heartbeat brings it.",
            )
        return subscription

    def _registered(self, ask: PullRequest, subscription: SubscriptionData) -> Expression:
        known = self._expressions.find(ask.topic, ask.consumer_group)
        if known is None or known.expression is None:
            # Say what is wrong with the expression, if that is why it was not registered.
            text = subscription.sub_string
            if text.strip():
                expression_of(subscription.expression_type, text)
            raise Refused(
                Code.FILTER_DATA_NOT_EXIST,
                f"The filter of group {ask.consumer_group} for {ask.topic} is not known here;"
                " the next heartbeat brings it, unless the expression is empty.",
            )
        if known.client_version < ask.sub_version:
            raise Refused(
                Code.FILTER_DATA_NOT_LATEST,
                f"The newest filter of group {ask.consumer_group} for {ask.topic} has not arrived"
                " here yet; the next heartbeat brings it.",
            )
        return known.expression

    def _retry(self, group: str, code: Matches | None) -> PullFilter:
        """Retried messages passed their filter before, so they normally pass as they are."""
        options = self._options
        if not (options.filter_support_retry and options.enable_property_filter):
            return PullFilter(code)
        find = self._expressions.find

        def matches(record: memoryview) -> bool:
            properties = record_properties(record)
            known = find(properties.get(RETRY_TOPIC, ""), group)
            if known is None or known.dead or known.expression is None:
                return True
            return known.expression.matches(properties)

        return PullFilter(code, matches, comparisons=RETRY_COMPARISONS)


def parse_tags(expression: str) -> frozenset[str]:
    """The tags of `A || B`; the empty set means all messages (`*` or nothing)."""
    expression = expression.strip()
    if expression in ("", EVERYTHING):
        return frozenset()
    if len(expression) > EXPRESSION_CHARACTERS_MAX:
        raise Refused(
            Code.SUBSCRIPTION_PARSE_FAILED,
            f"The subscription expression has {len(expression)} characters;"
            f" shorten it to {EXPRESSION_CHARACTERS_MAX} or fewer.",
        )
    tags = frozenset(tag for part in expression.split("||") if (tag := part.strip()))
    if not tags:
        raise Refused(
            Code.SUBSCRIPTION_PARSE_FAILED,
            f"The subscription expression {expression[:64]!r} names no tag;"
            " write tags separated by ||, or * for all messages.",
        )
    return tags


@functools.lru_cache(maxsize=1024)
def matcher_of_text(expression: str | None) -> Matches | None:
    """The filter of a tag subscription that came with a pull."""
    tags = parse_tags(expression or "")
    return _codes_matcher(map(tags_code, tags)) if tags else None


def matcher_of_subscription(subscription: SubscriptionData) -> Matches | None:
    """The filter of a tag subscription that came with a heartbeat."""
    if subscription.class_filter_mode:
        return None  # Compat: a filter server between broker and consumer chooses.
    if subscription.sub_string.strip() in ("", EVERYTHING):
        return None
    return _codes_matcher(subscription.code_set)


def _by_properties(expression: Expression) -> PullFilter:
    matches = expression.matches
    return PullFilter(
        record=lambda record: matches(record_properties(record)),
        expression=expression.text,
        comparisons=expression.comparisons,
    )


class Codes(frozenset[int]):
    """Tags codes that are wanted, as unsigned numbers: a test, and a set for compiled code."""

    __slots__ = ()

    def __call__(self, code: int) -> bool:
        return code & 0xFFFFFFFF in self


def _codes_matcher(codes: Iterable[int]) -> Matches:
    return Codes(code & 0xFFFFFFFF for code in codes)
