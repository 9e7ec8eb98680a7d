"""Parse filters from text with lark; error messages point at mistakes of syntax."""

from __future__ import annotations

import functools
import re
from typing import Any

from lark import Lark, Token, Transformer, v_args
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from retrieval.errors import DataError, did_you_mean
from retrieval.store.filters.tree import (
    MOST_CHARACTERS,
    PLAIN_NAME,
    RESERVED,
    And,
    Compare,
    Exists,
    Field,
    Filter,
    In,
    Not,
    Or,
    Value,
    field_of,
    keyword,
)

_KEYWORDS = "\n".join(rf"{word.upper()}: /{keyword(word)}\b/" for word in RESERVED)
_GRAMMAR = rf"""
?start: any_of
?any_of: all_of (OR all_of)*
?all_of: unary (AND unary)*
?unary: NOT unary -> negated
    | "(" any_of ")"
    | EXISTS "(" field ")" -> exists
    | field OP value -> compare
    | field IN "(" value ("," value)* ")" -> one_of
    | field NOT IN "(" value ("," value)* ")" -> none_of
field: (NAME | QUOTED) ("." (NAME | QUOTED))*
value: TEXT | NUMBER | TRUE | FALSE | NULL

OP: "<=" | ">=" | "!=" | "<" | ">" | "="
{_KEYWORDS}
NAME: /{PLAIN_NAME}/
QUOTED: /"[^"]*"/
TEXT: /'(?:[^']|'')*'/
NUMBER: /[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?/
%ignore /\s+/
"""

_CONDITION = "a condition such as price < 20"
_EXPECTED = {
    "LPAR": "`(`",
    "RPAR": "`)`",
    "COMMA": "a comma",
    "$END": "the end",
    "AND": "`and`",
    "OR": "`or`",
    "IN": "`in`",
    "OP": "a comparison (= != < <= > >=)",
    "NAME": "a field",
    "TEXT": "a value ('text', a number, true, false, null)",
}
"""Names of expected tokens in error messages."""
_SHOWN_CHARACTERS = 60  # shown on each side of a mistake


def parse(text: str) -> Filter:
    """Parse a filter; see `retrieval.store.filters.parse_filter`."""
    if len(text) > MOST_CHARACTERS:
        raise DataError(
            f"A filter's text has at most {MOST_CHARACTERS:,} characters, not {len(text):,}."
        )
    if not text.strip():
        raise DataError(
            f"The filter is empty. Write {_CONDITION}, or omit the filter to get all items."
        )
    try:
        return _parser().parse(text)  # type: ignore[return-value]  # a Filter
    except UnexpectedInput as fault:
        position, sentence = _explained(fault, text)
    start = max(text.rfind("\n", 0, position) + 1, position - _SHOWN_CHARACTERS)
    line = _readable(text[start : position + _SHOWN_CHARACTERS].partition("\n")[0])
    caret = " " * (position - start) + "^"
    raise DataError(f"The filter, character {position + 1}: {sentence}\n    {line}\n    {caret}")


@functools.cache
def _parser() -> Lark:
    return Lark(_GRAMMAR, parser="lalr", transformer=_FilterBuilder(), maybe_placeholders=False)


@v_args(inline=True)
class _FilterBuilder(Transformer[Token, Any]):
    """Builds the filter; lark calls one method per grammar rule, from the leaves up."""

    def field(self, *names: Token) -> Field:
        return field_of(tuple(name.strip('"') for name in names))

    def value(self, token: Token) -> Value:
        if token.type == "TEXT":
            return token[1:-1].replace("''", "'")
        if token.type == "NUMBER":
            # Python's `int` refuses thousands of digits, and 30 are too long for a filter.
            whole = re.fullmatch(r"[+-]?[0-9]+", token)
            if whole:
                return int(token[:30])
            return float(token)
        return {"TRUE": True, "FALSE": False, "NULL": None}[token.type]

    def compare(self, field: Field, op: Token, value: Value) -> Filter:
        return Compare(field, str(op), value)  # type: ignore[arg-type]

    def exists(self, keyword: Token, field: Field) -> Filter:
        return Exists(field)

    def one_of(self, field: Field, keyword: Token, *values: Value) -> Filter:
        return In(field, values)

    def none_of(self, field: Field, negation: Token, keyword: Token, *values: Value) -> Filter:
        return Not(In(field, values))

    def negated(self, keyword: Token, part: Filter) -> Filter:
        return Not(part)

    def all_of(self, *parts: Filter | Token) -> Filter:
        return And(parts[::2])  # type: ignore[arg-type]  # filters and keywords alternate

    def any_of(self, *parts: Filter | Token) -> Filter:
        return Or(parts[::2])  # type: ignore[arg-type]


def _explained(fault: UnexpectedInput, text: str) -> tuple[int, str]:
    """Return the position of a mistake, and a sentence that explains it."""
    position = fault.pos_in_stream or 0
    if isinstance(fault, UnexpectedCharacters):
        actual = text[position]
        if actual in ("'", '"'):
            if actual == "'":
                token = "text"
            else:
                token = "name"
            return position, f"the {token} that begins here has no end. Add {actual} to close it."
        tokens = set(fault.allowed)
    else:
        assert isinstance(fault, UnexpectedToken)
        tokens = set(fault.accepts or fault.expected)
        actual = str(fault.token)
        # lark reports the position of the last token.
        if fault.token.type == "$END":
            position = len(text.rstrip())
    if {"NOT", "NAME"} <= tokens:
        expected = _CONDITION
    else:
        if "DOT" in tokens and "OP" in tokens:
            # A field has just ended. Lark may list `)` too, which fits only in `exists(field)`.
            tokens = {"OP", "IN"}
        words = [word for token, word in _EXPECTED.items() if token in tokens]
        expected = " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    if actual:
        rest = f"there is {_readable(actual[:40])}"
    else:
        rest = "the text ends here"
    is_name = re.match(r'[^\W\d]|"', actual) and actual.lower() not in RESERVED
    if "TEXT" in tokens and is_name:
        hint = f" Write text in single quotes: '{_readable(actual[:40].strip(chr(34)))}'."
    else:
        hint = did_you_mean(
            actual[:40], [name for name in ("and", "or", "in") if name.upper() in tokens]
        )
    return position, f"expected {expected}, but {rest}.{hint}"


def _readable(text: str) -> str:
    """Return text of the same length with each unprintable character replaced."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
