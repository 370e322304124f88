from __future__ import annotations

import pytest

from cosmodrome.broker.members.expression_types import expression_of, is_tag_type
from cosmodrome.broker.receive.filters import (
    EXPRESSION_CHARACTERS_MAX,
    matcher_of_subscription,
    matcher_of_text,
    parse_tags,
)
from cosmodrome.errors import Code, Refused
from cosmodrome.wire.bodies import SubscriptionData
from cosmodrome.wire.message import tags_code


def subscribed(text: str, kind: str = "TAG", *, class_filter: bool = False) -> SubscriptionData:
    return SubscriptionData(
        topic="T", sub_string=text, expression_type=kind, class_filter_mode=class_filter
    )


@pytest.mark.parametrize(
    ("expression", "tags"),
    [
        ("*", set()),
        ("", set()),
        ("  ", set()),
        (" * ", set()),
        ("A", {"A"}),
        ("A||B", {"A", "B"}),
        (" A  ||  B ||", {"A", "B"}),
        ("A | B", {"A | B"}),
        ("中文 || x", {"中文", "x"}),
    ],
)
def test_tags_are_split_and_trimmed(expression: str, tags: set[str]) -> None:
    assert parse_tags(expression) == tags


@pytest.mark.parametrize("expression", ["||", " || || ", "x" * (EXPRESSION_CHARACTERS_MAX + 1)])
def test_an_expression_without_tags_or_end_is_refused(expression: str) -> None:
    with pytest.raises(Refused) as refused:
        parse_tags(expression)
    assert refused.value.code == Code.SUBSCRIPTION_PARSE_FAILED


@pytest.mark.parametrize(
    ("kind", "by_tags"), [(None, True), ("", True), ("TAG", True), ("SQL92", False)]
)
def test_no_type_means_tags(kind: str | None, by_tags: bool) -> None:
    assert is_tag_type(kind) is by_tags


def test_tag_text_matches_by_hash() -> None:
    matches = matcher_of_text("TagA || TagB")
    assert matches is not None
    assert matches(2598919)
    assert matches(2598920)
    assert not matches(2598921)
    assert not matches(0)


def test_everything_needs_no_test() -> None:
    assert matcher_of_text("*") is None
    assert matcher_of_text(None) is None
    assert matcher_of_subscription(subscribed("*")) is None
    assert matcher_of_subscription(subscribed("")) is None
    assert matcher_of_subscription(subscribed("A", class_filter=True)) is None


def test_tags_with_equal_hashes_both_pass() -> None:
    matches = matcher_of_text("HashAa")
    assert matches is not None
    assert matches(tags_code("HashBB"))


def test_only_the_low_32_bits_count() -> None:
    negative = next(t for t in (f"tag{n}" for n in range(1000)) if tags_code(t) < 0)
    matches = matcher_of_text(negative)
    assert matches is not None
    assert matches(tags_code(negative))
    assert matches(tags_code(negative) & 0xFFFFFFFF)
    assert matches(tags_code(negative) & 0xFFFFFFFF | 7 << 32)
    assert not matches(tags_code(negative) + 1)


def test_a_heartbeat_decides_by_its_codes() -> None:
    matches = matcher_of_subscription(subscribed("A || B"))
    assert matches is not None
    assert matches(tags_code("A"))
    assert matches(tags_code("B"))
    assert not matches(tags_code("C"))


def test_a_heartbeat_that_names_no_tag_wants_nothing() -> None:
    matches = matcher_of_subscription(subscribed("||"))
    assert matches is not None
    assert not matches(0)


def test_a_type_that_does_not_exist_is_named() -> None:
    with pytest.raises(Refused, match="'GROOVY' is unknown") as refused:
        expression_of("GROOVY", "a > 1")
    assert refused.value.code == Code.SUBSCRIPTION_PARSE_FAILED


@pytest.mark.parametrize("text", [None, "", " "])
def test_an_empty_sql_expression_cannot_be_parsed(text: str | None) -> None:
    with pytest.raises(Refused, match="is empty") as refused:
        expression_of("SQL92", text)
    assert refused.value.code == Code.SUBSCRIPTION_PARSE_FAILED
