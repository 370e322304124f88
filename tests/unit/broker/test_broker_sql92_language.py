"""The filter language. The outcomes of MATCHES were compared with 4.9.7's own evaluator, except
those marked "5.x" and the two deliberate differences at the end."""

from __future__ import annotations

import time

import pytest

from cosmodrome.broker import sql92
from cosmodrome.broker.sql92 import CHARACTERS_MAX, Sql92Error, compile_expression

MESSAGE = {
    "a": "5",
    "neg": "-3",
    "big": "3000000000",
    "dec": "2.5",
    "text": "it's",
    "word": "abc",
    "yes": "True",
    "no": "nope",
    "TAGS": "TagA",
    "_d$1": "x",
    "padded": " 7 ",
    "nan": "NaN",
    "zero": "-0.0",
}

MATCHES = [
    # ordering
    ("a > 4", True),
    ("a > 5", False),
    ("a >= 5", True),
    ("a < 6 and a <= 5", True),
    ("4 < a", True),
    ("neg < 0", True),
    ("neg > -4", True),
    ("neg > +-4", True),
    ("- - 5 = a", True),
    ("a > 4.5", True),
    ("a = 5.0", True),
    ("dec > 2", False),  # not an integer, so not comparable with one
    ("dec > 2.", True),
    ("dec = 25E-1", True),
    ("dec < .5e1", True),
    ("a < dec", False),
    ("dec < a", True),  # two properties compare as doubles
    ("a < word", False),
    ("NOT (a < word)", False),  # a failed conversion is not false
    ("a < word OR a = 5", False),
    ("a = 5 OR a < word", True),  # not reached
    ("a <> 6 AND a < word", False),
    ("padded = 7", False),
    ("padded = 7.0", True),  # doubles are trimmed
    # integers have 32 bits unless the constant needs 64
    ("big > 5", False),
    ("big > 5L", False),
    ("big > 2147483648", True),
    ("big = 3000000000", True),
    ("big = 3000000000l", True),
    ("a < 9223372036854775807", True),
    # a total order of doubles
    ("nan > 1E300", True),
    ("nan = nan", True),
    ("zero < 1E-300", True),
    # equality
    ("text = 'it''s'", True),
    ("word = 'ABC'", False),
    ("word <> 'ABC'", True),
    ("a = '5'", True),
    ("a = '5.0'", False),
    ("'5' = a", True),
    ("word = 5", False),
    ("NOT (word = 5)", False),
    ("yes = TRUE", True),
    ("no = false", True),
    ("no = TRUE", False),
    ("1 = TRUE", False),
    ("'true' = TRUE", True),
    ("TRUE = FALSE", False),
    ("1 = 1.0", True),
    ("1 < 2", True),
    ("a = neg", False),
    ("(a = 5) = TRUE", True),
    ("a = 5 = TRUE", True),
    # nothing
    ("missing = 1", False),
    ("missing <> 1", False),
    ("NOT (missing = 1)", False),
    ("1 <> missing", True),
    ("missing = gone", True),
    ("missing <> gone", False),
    ("missing IS NULL", True),
    ("missing IS NOT NULL", False),
    ("a is not null", True),
    ("(missing > 1) IS NULL", True),
    ("NULL IS NULL", True),
    ("a IS NULL IS NOT NULL", True),
    ("missing > 1 OR a = 5", True),
    ("missing > 1 AND a = 5", False),
    ("NOT (missing > 1 AND a = 6)", True),  # unknown AND false is false
    ("NULL OR a = 5", True),
    ("NOT NULL", False),
    ("-word IS NULL", True),
    # between
    ("a BETWEEN 5 AND 5", True),
    ("a between 1 and 4 or a = 5", True),
    ("a NOT BETWEEN 1 AND 4", True),
    ("a NOT BETWEEN 9 AND 1", True),
    ("a BETWEEN neg AND 6", True),
    ("a BETWEEN -9 AND -12", False),
    ("missing NOT BETWEEN 1 AND 4", False),
    ("missing BETWEEN 1 AND 4", False),
    ("5 BETWEEN 1 AND a", True),
    # in
    ("word IN ('x', 'abc')", True),
    ("word in ('x')", False),
    ("word NOT IN ('x', 'y', 'z', 'u', 'v', 'w')", True),
    ("missing IN ('x')", False),
    ("missing NOT IN ('x')", False),
    ("(a) IN ('5')", True),
    # structure
    ("a = 1 OR a = 5 AND word = 'abc'", True),
    ("(a = 1 OR a = 5) AND word = 'x'", False),
    ("NOT a = 1", False),  # (NOT a) = 1
    ("NOT (a = 1) AND NOT (word = 'x')", True),
    ("TAGS = 'TagA' AND _d$1 = 'x'", True),
    ("tags IS NULL", True),  # names keep their case
    ("TRUE", True),
    ("FALSE OR NULL", False),
    ("/* one */ a = 5 -- two\n AND word = 'abc'", True),
    ("a\t=\r\n5", True),
    ("a='5'aNd(word='abc')", True),
]

TEXT_OPERATORS = [  # 5.x
    ("word CONTAINS 'b'", True),
    ("word contains 'x'", False),
    ("word NOT CONTAINS 'x'", True),
    ("word STARTSWITH 'ab'", True),
    ("word STARTSWITH 'bc'", False),
    ("word NOT STARTSWITH 'bc'", True),
    ("word ENDSWITH 'bc'", True),
    ("word NOT ENDSWITH 'bc'", False),
    ("missing CONTAINS 'x'", False),
    ("missing NOT CONTAINS 'x'", False),
    ("NOT (missing CONTAINS 'x')", True),
    ("word CONTAINS ''", False),
    ("word NOT CONTAINS ''", False),
    ("text ENDSWITH '''s'", True),
]


@pytest.mark.parametrize(("text", "wanted"), [*MATCHES, *TEXT_OPERATORS])
def test_what_matches(text: str, wanted: bool) -> None:
    assert compile_expression(text).matches(MESSAGE) is wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        # 4.9.7 lets no property be true, and fails on a truth value to the left of a text.
        ("yes", True),
        ("no", False),
        ("NOT yes", False),
        ("NOT no", True),
        ("missing", False),
        ("NOT missing", False),
        ("yes AND a = 5", True),
        ("TRUE = yes", True),
        ("FALSE = no", True),
        # 4.9.7 takes no zero among the decimals.
        ("a > 0.0", True),
        # A property may have the name of an operator that only 5.x knows.
        ("contains IS NULL", True),
        ("startswith CONTAINS 'x'", False),
    ],
)
def test_where_it_is_kinder_than_upstream(text: str, wanted: bool) -> None:
    assert compile_expression(text).matches(MESSAGE) is wanted


ERRORS = [
    ("", 0, "empty"),
    (" -- only a comment", 0, "empty"),
    ("a >", 3, "expected a property, a constant or ("),
    ("a > AND b", 4, "found AND"),
    ("(a = 1", 6, "expected an operator or )"),
    ("a = 1)", 5, "expected an operator or the end"),
    ("a = 1 b", 6, "found b"),
    ("a LIKE 'x%'", 2, "there is no LIKE"),
    ("a + 1 > 2", 2, "expected an operator"),
    ("a != 1", 2, "use <>"),
    ("a == 1", 3, "expected a property"),
    ("a = 1;", 5, "without a semicolon"),
    ('a = "x"', 4, "single quotes"),
    ("a = 'x", 4, "no closing quote"),
    ("a = 'it's'", 9, "no closing quote"),
    ("a * 2 = 4", 2, "arithmetic"),
    ("a = 1 /* open", 6, "a comment ends with */"),
    ("größe > 1", 2, "names consist of"),
    # constants
    ("a = NULL", 4, "IS NULL"),
    ("NULL <> a", 0, "IS NULL"),
    ("TRUE = 1", 7, "TRUE and FALSE"),
    ("a > 'x'", 4, "only properties and numbers have an order"),
    ("'x' < a", 0, "only properties and numbers have an order"),
    ("a > TRUE", 4, "only properties and numbers have an order"),
    ("a > NULL", 4, "only properties and numbers have an order"),
    ("a > (b = 1)", 5, "only properties and numbers have an order"),
    ("NOT a > 1", 0, "only properties and numbers have an order"),
    ("1 < a < 9", 0, "only properties and numbers have an order"),
    ("a BETWEEN 5 AND 1", 10, "above the second"),
    ("a BETWEEN 5.5 AND 5", 10, "above the second"),
    ("a BETWEEN 'a' AND 'b'", 10, "only properties and numbers have an order"),
    ("a BETWEEN NULL AND 1", 10, "only properties and numbers have an order"),
    ("a BETWEEN 1 OR 5", 12, "AND between the two limits"),
    ("a = 007", 4, "begins with 0"),
    ("a = 12abc", 4, "not a number"),
    ("a = 9223372036854775808", 4, "at most 64 bits"),
    ("a = -9223372036854775809", 5, "at most 64 bits"),
    (f"a = {'9' * 10_000}", 4, "at most 64 bits"),
    ("a = 1e999", 4, "too large for a double"),
    ("a = 1e-999", 4, "too small for a double"),
    # lists and texts
    ("a IN 'x'", 5, "( behind IN"),
    ("a IN ()", 6, "a text in single quotes"),
    ("a IN (1, 2)", 6, "a text in single quotes"),
    ("a IN ('x' 'y')", 10, ", or )"),
    ("a IN ('x',)", 10, "a text in single quotes"),
    ("'x' IN ('x')", 0, "expected a property in front of IN"),
    ("a CONTAINS b", 11, "a text in single quotes behind CONTAINS"),
    ("'x' CONTAINS 'x'", 0, "expected a property in front of CONTAINS"),
    ("a NOT 5", 6, "behind NOT"),
    ("a NOT > 5", 6, "behind NOT"),
    ("a IS 5", 5, "NULL or NOT NULL behind IS"),
    ("a IS NOT 5", 9, "NULL or NOT NULL behind IS"),
    # not conditions
    ("1", 0, "a condition is expected"),
    ("'x'", 0, "a condition is expected"),
    ("-a", 0, "a condition is expected"),
    ("a = 1 AND 2", 10, "a condition is expected"),
    ("'x' OR a = 1", 0, "a condition is expected"),
    ("NOT 5", 4, "a condition is expected"),
]


@pytest.mark.parametrize(("text", "position", "why"), ERRORS)
def test_errors_point_at_their_place(text: str, position: int, why: str) -> None:
    with pytest.raises(Sql92Error) as caught:
        compile_expression(text)
    assert why in str(caught.value)
    assert caught.value.position == position
    assert f"character {position + 1}:" in str(caught.value)


def test_the_caret_stands_below_the_fault() -> None:
    with pytest.raises(Sql92Error) as caught:
        compile_expression("a = 1 AND\n\tb ! 2")
    _, excerpt, caret = str(caught.value).split("\n")
    assert excerpt == "a = 1 AND  b ! 2"
    assert excerpt[caret.index("^")] == "!"


def test_a_long_expression_is_shown_in_part() -> None:
    with pytest.raises(Sql92Error) as caught:
        compile_expression(f"{'a = 1 AND ' * 200}b ! 2{' AND a = 1' * 50}")
    _, excerpt, caret = str(caught.value).split("\n")
    assert len(excerpt) < 100
    assert excerpt[caret.index("^")] == "!"


# --- limits -----------------------------------------------------------------------------------


def test_nesting_has_a_limit() -> None:
    assert compile_expression("(" * 100 + "a = 5" + ")" * 100).matches(MESSAGE)
    for opening in ("(", "NOT ", "- ", "+", "NOT ("):
        with pytest.raises(Sql92Error, match="nested too deeply"):
            compile_expression(opening * 400 + "a")


def test_chains_of_tests_have_a_limit() -> None:
    assert compile_expression("a" + " IS NOT NULL" * 200).matches(MESSAGE)
    for link in (" IS NULL", " = TRUE", " <> b"):
        with pytest.raises(Sql92Error, match="nested too deeply"):
            compile_expression("a" + link * 400)


def test_a_sign_does_not_hide_depth() -> None:
    text = "a"
    with pytest.raises(Sql92Error, match="nested too deeply"):
        for _ in range(10):
            text = f"a > -({text}{' IS NULL' * 200})"
            compile_expression(text).matches(MESSAGE)


def test_deep_and_wide_together() -> None:
    text = "a = 5"
    for _ in range(60):
        text = f"NOT (a = 6 AND ({text}) OR a = 7)"
        try:
            compile_expression(text).matches(MESSAGE)
        except Sql92Error as error:
            assert "nested too deeply" in str(error)
            return
    raise AssertionError("no limit was met")


def test_long_runs_are_not_deep() -> None:
    run = " OR ".join(f"a = {n}" for n in range(100, 350))
    assert not compile_expression(run).matches(MESSAGE)
    assert compile_expression(f"{run} OR a = 5").matches(MESSAGE)
    assert compile_expression(" AND ".join(["a = 5"] * 256)).matches(MESSAGE)


def test_the_number_of_comparisons_has_a_limit() -> None:
    """It bounds what one test of one message takes, and what reading the text takes."""
    assert [compile_expression(text).comparisons for text in ("a = 5", "a > 1 AND a < 9")] == [2, 3]
    longest = compile_expression(" OR ".join(["a = 1"] * 256))
    assert longest.comparisons == 257
    for text in (" OR ".join(["a = 1"] * 257), f"a IN ({','.join(['1'] * 600)})", "- " * 16_000):
        with pytest.raises(Sql92Error, match="more than 1024 words and signs"):
            compile_expression(text)


def test_length_has_a_limit() -> None:
    text = "a = 5"
    assert compile_expression(text + " " * (CHARACTERS_MAX - len(text))).matches(MESSAGE)
    with pytest.raises(Sql92Error, match=f"{CHARACTERS_MAX} is the limit"):
        compile_expression(text + " " * (CHARACTERS_MAX + 1 - len(text)))


@pytest.mark.parametrize("part", ["'", "''", "/*", "(", "a=", "1", "1.", "-", "IN("])
def test_nothing_takes_long_to_refuse(part: str) -> None:
    begin = time.process_time()
    try:
        compile_expression(part * (CHARACTERS_MAX // len(part)))
    except Sql92Error:
        pass
    assert time.process_time() - begin < 2


def test_readings_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql92, "_memo", sql92._Memo())
    first = compile_expression("a = 1")
    assert compile_expression("a = 1") is first
    for n in range(sql92.CACHED_EXPRESSIONS_MAX):
        compile_expression(f"a = {n + 10}")
    assert compile_expression("a = 1") is not first, "the oldest made room"
    assert len(sql92._memo._known) == sql92.CACHED_EXPRESSIONS_MAX
    for n in range(100):
        compile_expression(f"a = {n}{' ' * 30_000}")
    assert sql92._memo._characters <= sql92.CACHED_CHARACTERS_MAX
    assert sum(map(len, sql92._memo._known)) == sql92._memo._characters


def test_a_remembered_error_is_raised_anew() -> None:
    errors = []
    for _ in range(2):
        with pytest.raises(Sql92Error) as caught:
            compile_expression("b >")
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    assert str(errors[0]) == str(errors[1])
