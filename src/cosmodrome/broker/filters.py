"""Which messages of a queue a subscription wants, decided from the tags code alone.

A queue entry carries the Java hash of its message's tag, so a tag filter is a set of hashes;
two tags with equal hashes both pass and the consumer compares the text again. `None` stands
for "everything", which lets the store skip the test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cosmodrome.errors import Code, Refused
from cosmodrome.wire.bodies import EVERYTHING, TAG, SubscriptionData
from cosmodrome.wire.message import tags_code

Matches = Callable[[int], bool]

EXPRESSION_CHARACTERS_MAX = 32_767


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


def matcher_of_text(expression_type: str | None, expression: str | None) -> Matches | None:
    """The filter of a subscription that came with a pull. No type means tags (C++ sends none)."""
    text = expression or ""
    if not _is_tag_type(expression_type):
        if not text.strip():
            raise Refused(
                Code.SUBSCRIPTION_PARSE_FAILED,
                f"The {expression_type} subscription is empty; give an expression.",
            )
        raise _not_served(expression_type)
    tags = parse_tags(text)
    return _codes_matcher(map(tags_code, tags)) if tags else None


def matcher_of_subscription(subscription: SubscriptionData) -> Matches | None:
    """The filter of a subscription that came with a heartbeat."""
    if subscription.class_filter_mode:
        return None  # Compat: a filter server between broker and consumer chooses.
    if not _is_tag_type(subscription.expression_type):
        raise _not_served(subscription.expression_type)
    if subscription.sub_string.strip() in ("", EVERYTHING):
        return None
    return _codes_matcher(subscription.code_set)


def _is_tag_type(expression_type: str | None) -> bool:
    return not expression_type or expression_type == TAG


def _not_served(expression_type: str | None) -> Refused:
    return Refused(
        Code.SYSTEM_ERROR,
        f"Filtering by {str(expression_type)[:32]} is not served by this version yet;"
        " subscribe by tags (expression type TAG).",
    )


def _codes_matcher(codes: Iterable[int]) -> Matches:
    wanted = frozenset(code & 0xFFFFFFFF for code in codes)
    if len(wanted) == 1:
        (only,) = wanted
        return lambda code: code & 0xFFFFFFFF == only
    return lambda code: code & 0xFFFFFFFF in wanted
