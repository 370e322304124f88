"""What a subscription selects by: tags, or an expression that this broker can use."""

from __future__ import annotations

from cosmodrome.broker.sql92 import Expression, Sql92Error, compile_expression
from cosmodrome.errors import Code, Refused
from cosmodrome.wire.bodies import SQL92, TAG


def is_tag_type(expression_type: str | None) -> bool:
    """No type means tags (C++ sends none)."""
    return not expression_type or expression_type == TAG


def expression_of(expression_type: str | None, text: str | None) -> Expression:
    """The filter of a subscription that is not by tags; Refused when it cannot be used."""
    if expression_type != SQL92:
        raise Refused(
            Code.SUBSCRIPTION_PARSE_FAILED,
            f"The expression type {str(expression_type)[:32]!r} is unknown; use {TAG} or {SQL92}.",
        )
    try:
        return compile_expression(text or "")
    except Sql92Error as error:
        raise Refused(
            Code.SUBSCRIPTION_PARSE_FAILED, f"The SQL92 expression cannot be used: {error}"
        ) from None


def not_enabled(expression_type: str) -> Refused:
    return Refused(
        Code.SYSTEM_ERROR,
        f"This broker does not filter by {expression_type[:32]}; set enablePropertyFilter=true"
        " there, or subscribe by tags.",
    )
