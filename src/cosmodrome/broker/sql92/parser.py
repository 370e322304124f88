"""Reads an SQL92 filter: precedence, and the rules about what may stand where.

Precedence, loosest first: OR, AND, equality (= <> IS), ordering (> >= < <= BETWEEN IN CONTAINS
STARTSWITH ENDSWITH), then the signs + - and NOT. So `NOT a = 1` means `(NOT a) = 1`, as
upstream reads it. Unlike upstream, text behind a complete expression is an error: `a LIKE 'x'`
would otherwise silently mean `a`.

Reading takes time linear in the text and recurses at most `NESTING_MAX` levels; the tests it
makes are nested at most `DEPTH_MAX` deep.
"""

from __future__ import annotations

from collections.abc import Callable

from cosmodrome.broker.sql92.operands import (
    NOTHING,
    ORDERINGS,
    TEXT_TESTS,
    Operand,
    Test,
    all_of,
    any_of,
    comparison,
    equals,
    is_in,
    is_null,
    is_set,
    negation,
    negative,
    number_operand,
    ordered_test,
    text_test,
    truth,
    unknown,
)
from cosmodrome.broker.sql92.tokens import TEXT_WORDS, Kind, Sql92Error, Token, tokens_of
from cosmodrome.broker.sql92.values import number_of

WORDS_PER_COMPARISON = 4  # a > 5 AND
NESTING_MAX = 100  # of parentheses and signs while reading
DEPTH_MAX = 250  # of tests inside tests while testing


_LEVELS = {"OR": 1, "AND": 2, "=": 3, "<>": 3, "IS": 3}
_LEVELS |= dict.fromkeys((">", ">=", "<", "<=", "BETWEEN", "IN", "NOT", *TEXT_WORDS), 4)


def parse(text: str) -> tuple[Test, int]:
    """The test that a text describes, and how many comparisons it makes at most; Sql92Error when
    it describes none."""
    parser = _Parser(text)
    return parser.whole(), parser.comparisons


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = tokens_of(text)
        self._next = 0
        self._nesting = 0
        self.comparisons = 1 + len(self._tokens) // WORDS_PER_COMPARISON

    def whole(self) -> Test:
        if self._seen().kind is Kind.END:
            raise self._error(0, "the expression is empty; write a condition such as a > 5")
        test = self._boolean(self._expression(1))
        token = self._seen()
        if token.kind is not Kind.END:
            raise self._error(token.at, _expected("an operator or the end", token))
        return test

    # --- grammar ------------------------------------------------------------------------------

    def _expression(self, level: int) -> Operand:
        """Everything that binds at least as tightly as `level`."""
        left = self._unary()
        while True:
            token = self._seen()
            mine = _LEVELS.get(_operator(token), 0)
            if mine < level or token.kind not in (Kind.SYMBOL, Kind.WORD):
                return left
            if mine <= _LEVELS["AND"]:
                left = self._joined(left, token)
            elif mine == _LEVELS["="]:
                left = self._equality(left, self._take())
            else:
                left = self._ordering(left, self._take())
            if left.depth > DEPTH_MAX:
                raise self._error(token.at, _TOO_DEEP)

    def _joined(self, left: Operand, first: Token) -> Operand:
        """A run of ANDs or of ORs, as one test: long runs must not become deep ones."""
        word = first.text
        tests = [self._boolean(left)]
        depth = left.depth
        while self._seen().text == word and self._seen().kind is Kind.WORD:
            self._take()
            right = self._expression(_LEVELS[word] + 1)
            tests.append(self._boolean(right))
            depth = max(depth, right.depth)
        join = any_of if word == "OR" else all_of
        return truth(join(tests), left.at, depth + 1)

    def _equality(self, left: Operand, token: Token) -> Operand:
        if token.text == "IS":
            negated = self._accept("NOT")
            self._demand("NULL", "NULL or NOT NULL behind IS")
            return truth(is_null(left, negated=negated), left.at, left.depth + 1)
        right = self._expression(4)
        for side in (left, right):
            if side.constant and side.kind is NOTHING:
                raise self._error(side.at, "NULL equals nothing; write IS NULL or IS NOT NULL")
        if left.constant and right.constant and left.kind is bool and right.kind is not bool:
            raise self._error(right.at, "TRUE and FALSE can only be compared with a property")
        test = equals(left, right)
        depth = max(left.depth, right.depth) + 1
        return truth(negation(test) if token.text == "<>" else test, left.at, depth)

    def _ordering(self, left: Operand, token: Token) -> Operand:
        negated = token.text == "NOT"
        if negated:
            token = self._take()
        word = _operator(token)
        if word in ORDERINGS and not negated:
            return self._ordered(left, self._unary(), ORDERINGS[word])
        if word == "BETWEEN":
            return self._between(left, negated=negated)
        if word == "IN":
            return self._in(left, negated=negated)
        if word in TEXT_TESTS and token.kind is Kind.WORD:
            name = self._property(left, word)
            text = self._string(f"a text in single quotes behind {word}")
            return truth(text_test(name, word, text, negated=negated), left.at, 1)
        raise self._error(
            token.at,
            _expected("BETWEEN, IN, CONTAINS, STARTSWITH or ENDSWITH behind NOT", token),
        )

    def _between(self, value: Operand, *, negated: bool) -> Operand:
        low = self._unary()
        self._demand("AND", "AND between the two limits of BETWEEN")
        high = self._unary()
        if negated:
            below = self._ordered(value, low, ORDERINGS["<"])
            above = self._ordered(value, high, ORDERINGS[">"])
            test = any_of([self._boolean(below), self._boolean(above)])
        else:
            above = self._ordered(value, low, ORDERINGS[">="])
            below = self._ordered(value, high, ORDERINGS["<="])
            test = all_of([self._boolean(above), self._boolean(below)])
            if (
                low.constant
                and high.constant
                and comparison(low, high)(low.get({}), high.get({})) > 0
            ):
                raise self._error(low.at, "the first limit of BETWEEN is above the second")
        return truth(test, value.at, max(below.depth, above.depth) + 1)

    def _in(self, left: Operand, *, negated: bool) -> Operand:
        name = self._property(left, "IN")
        self._demand("(", "( behind IN")
        texts = [self._string("a text in single quotes")]
        while self._accept(","):
            texts.append(self._string("a text in single quotes"))
        self._demand(")", ", or ) in the list of IN")
        return truth(is_in(name, frozenset(texts), negated=negated), left.at, 1)

    def _unary(self) -> Operand:
        token = self._take()
        if token.kind is Kind.SYMBOL and token.text in "+-(":
            self._enter(token)
            if token.text == "(":
                inside = self._expression(1)
                self._demand(")", "an operator or )")
            else:
                inside = self._unary()
                if token.text == "-":
                    inside = negative(inside, token.at)
            self._nesting -= 1
            return inside
        if token.kind is Kind.WORD and token.text == "NOT":
            self._enter(token)
            inside = self._unary()
            test = negation(self._boolean(inside))
            self._nesting -= 1
            return truth(test, token.at, inside.depth + 1)
        return self._primary(token)

    def _primary(self, token: Token) -> Operand:
        if token.kind is Kind.STRING:
            text = token.text[1:-1].replace("''", "'")
            return Operand(str, lambda _: text, token.at, constant=True)
        if token.kind is Kind.NUMBER:
            number, why = number_of(token.text)
            if number is None:
                raise self._error(token.at, why)
            return number_operand(number, token.at, constant=True)
        word = token.text
        if token.kind is Kind.WORD and word in ("TRUE", "FALSE"):
            truth = word == "TRUE"
            return Operand(bool, lambda _: truth, token.at, constant=True)
        if token.kind is Kind.WORD and word == "NULL":
            return Operand(NOTHING, unknown, token.at, constant=True)
        if token.kind is Kind.NAME or word.upper() in TEXT_WORDS:
            return Operand(str, lambda properties: properties.get(word), token.at, name=word)
        raise self._error(token.at, _expected("a property, a constant or (", token))

    def _ordered(self, left: Operand, right: Operand, accept: Callable[[int], bool]) -> Operand:
        for side in (left, right):
            if side.kind is bool or (side.constant and side.kind is not int):
                raise self._error(
                    side.at, "only properties and numbers have an order; use parentheses, = or IN"
                )
        depth = max(left.depth, right.depth) + 1
        return truth(ordered_test(left, right, accept), left.at, depth)

    # --- steps --------------------------------------------------------------------------------

    def _boolean(self, operand: Operand) -> Test:
        if operand.kind is bool:
            return operand.get  # type: ignore[return-value]  # its kind says so
        if operand.kind is NOTHING and operand.constant:
            return unknown
        if operand.name is not None:
            return is_set(operand.name)
        raise self._error(
            operand.at,
            "a condition is expected here, this is only a value; compare it with something",
        )

    def _property(self, operand: Operand, word: str) -> str:
        if operand.name is None:
            raise self._error(operand.at, f"expected a property in front of {word}")
        return operand.name

    def _string(self, expected: str) -> str:
        token = self._take()
        if token.kind is not Kind.STRING:
            raise self._error(token.at, _expected(expected, token))
        return token.text[1:-1].replace("''", "'")

    def _seen(self) -> Token:
        return self._tokens[self._next]

    def _take(self) -> Token:
        token = self._tokens[self._next]
        if token.kind is not Kind.END:
            self._next += 1
        return token

    def _accept(self, text: str) -> bool:
        token = self._seen()
        if token.text != text or token.kind not in (Kind.SYMBOL, Kind.WORD):
            return False
        self._next += 1
        return True

    def _demand(self, text: str, expected: str) -> None:
        if not self._accept(text):
            raise self._error(self._seen().at, _expected(expected, self._seen()))

    def _enter(self, token: Token) -> None:
        self._nesting += 1
        if self._nesting > NESTING_MAX:
            raise self._error(token.at, _TOO_DEEP)

    def _error(self, at: int, why: str) -> Sql92Error:
        return Sql92Error(at, why, self._text)


_TOO_DEEP = f"nested too deeply; {NESTING_MAX} levels are the limit, use fewer parentheses"


def _operator(token: Token) -> str:
    return token.text.upper() if token.kind is Kind.WORD else token.text


def _expected(expected: str, found: Token) -> str:
    hint = ""
    if found.kind is Kind.NAME and found.text.upper() == "LIKE":
        hint = "; there is no LIKE, use CONTAINS, STARTSWITH or ENDSWITH"
    return f"expected {expected}, found {found}{hint}"
