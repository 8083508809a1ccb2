"""The readable form of a relation: ``q - k < 1024 or k < 4``.

Grammar, with the usual precedence (``//`` and ``%`` bind tighter than ``+`` and ``-``, those
tighter than comparisons, then ``and``, then ``or``); parentheses group terms or predicates::

    relation   := conjunct ("or" conjunct)*
    conjunct   := predicate ("and" predicate)*
    predicate  := "true" | "false" | "(" relation ")" | sum ("<" | "<=" | "==") sum
    sum        := factor (("+" | "-") factor)*
    factor     := atom (("//" | "%") integer)*
    atom       := "q" | "k" | integer | "(" sum ")"

Printing is ``str``: the text of a relation parses back to an equal relation.  The printed
text is also what the plan digest covers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from codec.errors import RetentionError
from policies.retention.ir import (
    MAX_DEPTH,
    AtMost,
    Constant,
    Difference,
    Equal,
    FloorDivision,
    Key,
    Less,
    Modulo,
    Query,
    Relation,
    Sum,
    Term,
    Truth,
    all_of,
    any_of,
)

MAX_TEXT = 65_536
"""Longest text that is read, in characters."""

_TOKEN = re.compile(r"\s*(?:(\d+)|(<=|==|//|[a-z]+|[-+%<()])|(\S))", re.ASCII)
_COMPARISONS: dict[str, type[Less | AtMost | Equal]] = {
    "<": Less,
    "<=": AtMost,
    "==": Equal,
}


def parse_relation(text: str) -> Relation:
    """Read the form that ``str`` writes.

    Raises
    ------
    RetentionError
        ``syntax`` if the text is not of the grammar; else whatever `ir` refuses.

    Examples
    --------
    >>> str(parse_relation("q-k<1024 or k<4"))
    'q - k < 1024 or k < 4'
    """
    parser = _Parser(text, _split(text))
    relation = parser.relation()
    parser.expect("")
    return relation


def _split(text: str) -> list[str]:
    """Tokens of ``text``, closed by an empty one."""
    if len(text) > MAX_TEXT:
        raise RetentionError("syntax", f"{text[:32]}...", f"longer than {MAX_TEXT} characters")
    tokens = []
    for number, symbol, stray in _TOKEN.findall(text.rstrip()):
        if stray:
            raise RetentionError("syntax", repr(text), f"unexpected {stray!r}")
        tokens.append(number or symbol)
    return [*tokens, ""]


@dataclass(slots=True)
class _Parser:
    """Recursive descent over a list of tokens."""

    text: str
    tokens: list[str]
    #: Index of the token to read next; never past the closing one.
    position: int = 0
    #: Parentheses open now.
    depth: int = 0

    def next_token(self) -> str:
        return self.tokens[self.position]

    def accept(self, *wanted: str) -> str | None:
        token = self.next_token()
        if token not in wanted:
            return None
        self.position += token != ""
        return token

    def expect(self, wanted: str) -> None:
        if self.accept(wanted) is None:
            self.refuse(f"expected {wanted or 'the end'!r}")

    def refuse(self, why: str) -> NoReturn:
        found = self.next_token() or "the end"
        raise RetentionError("syntax", repr(self.text), f"{why}, found {found!r}")

    def open(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.refuse(f"more than {MAX_DEPTH} open parentheses")

    def close(self) -> None:
        self.expect(")")
        self.depth -= 1

    def relation(self) -> Relation:
        parts = [self.conjunct()]
        while self.accept("or"):
            parts.append(self.conjunct())
        return any_of(*parts)

    def conjunct(self) -> Relation:
        parts = [self.predicate()]
        while self.accept("and"):
            parts.append(self.predicate())
        return all_of(*parts)

    def predicate(self) -> Relation:
        if word := self.accept("true", "false"):
            return Truth(word == "true")
        if self.next_token() == "(" and not self.term_follows():
            self.accept("(")
            self.open()
            inner = self.relation()
            self.close()
            return inner
        left = self.sum()
        sign = self.accept(*_COMPARISONS)
        if sign is None:
            self.refuse("expected a comparison")
        return _COMPARISONS[sign](left, self.sum())

    def term_follows(self) -> bool:
        """Whether the parenthesis here encloses a term, not a predicate."""
        depth = 0
        for token in self.tokens[self.position :]:
            depth += (token == "(") - (token == ")")
            if depth == 0:
                return True
            if token in _COMPARISONS or token in ("true", "false"):
                return False
        return True

    def sum(self) -> Term:
        term = self.factor()
        while sign := self.accept("+", "-"):
            right = self.factor()
            term = Sum(term, right) if sign == "+" else Difference(term, right)
        return term

    def factor(self) -> Term:
        term = self.atom()
        while sign := self.accept("//", "%"):
            divisor = self.integer()
            term = FloorDivision(term, divisor) if sign == "//" else Modulo(term, divisor)
        return term

    def atom(self) -> Term:
        if self.accept("q"):
            return Query()
        if self.accept("k"):
            return Key()
        if self.accept("("):
            self.open()
            term = self.sum()
            self.close()
            return term
        return Constant(self.integer())

    def integer(self) -> int:
        sign = -1 if self.accept("-") else 1
        token = self.next_token()
        if not token.isdecimal():
            self.refuse("expected 'q', 'k' or an integer")
        if len(token) > 20:
            self.refuse("an integer of at most 20 digits")
        self.position += 1
        return sign * int(token)
