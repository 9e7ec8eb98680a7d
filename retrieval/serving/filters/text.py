"""Filters read from text: the grammar, and sentences that point at mistakes. Loads lark."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar

from lark import Lark, Token, Transformer, v_args
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from retrieval.errors import DataError, did_you_mean
from retrieval.serving.filters.tree import (
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
    field_of,
)

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
AND: /and\b/i
OR: /or\b/i
NOT: /not\b/i
IN: /in\b/i
EXISTS: /exists\b/i
TRUE: /true\b/i
FALSE: /false\b/i
NULL: /null\b/i
NAME: /{PLAIN_NAME}/i
QUOTED: /"[^"]*"/
TEXT: /'(?:[^']|'')*'/
NUMBER: /[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?/i
%ignore /\s+/
"""

_CONDITION = "a condition such as price < 20"
_EXPECTED = {
    "NOT": "", "EXISTS": "", "DOT": "", "LPAR": "`(`", "RPAR": "`)`", "COMMA": "a comma", "$END": "the end",
    "AND": "`and`", "OR": "`or`", "IN": "`in`", "OP": "a comparison (= != < <= > >=)", "NAME": "a field", "QUOTED": "a field",
    "TEXT": "a value ('text', a number, true, false, null)", "NUMBER": "", "TRUE": "", "FALSE": "", "NULL": "",
}  # fmt: skip
_HINTS = {
    "==": "Write = for equal.",
    "<>": "Write != for not equal.",
    "&": "Write and.",
    "|": "Write or.",
    "!": "Write != or not.",
    "between": "A range is two comparisons: price >= 5 and price < 20.",
    "is": "Write = null, or exists(field).",
}
_SHOWN = 60
Made = TypeVar("Made")


class _Misplaced(Exception):
    """A sentence about a place in the text."""

    def __init__(self, position: int, sentence: str) -> None:
        super().__init__(sentence)
        self.position = position


def parse(text: str) -> Filter:
    """Return the filter that a text means; see `retrieval.serving.filters.parse_filter`."""
    if len(text) > MOST_CHARACTERS:
        raise DataError(f"A filter's text has at most {MOST_CHARACTERS:,} characters, not {len(text):,}.")
    if not text.strip():
        raise DataError(f"The filter is empty. Write {_CONDITION}, or leave it out to get all items.")
    try:
        return _parser().parse(text)  # type: ignore[return-value]  # the transformer makes no tree
    except _Misplaced as fault:
        position, sentence = fault.position, str(fault)
    except UnexpectedInput as fault:
        position, sentence = _place(fault, text), _sentence(fault, text)
    raise DataError(f"The filter, character {position + 1}: {sentence}\n{_pointed(text, position)}")


@functools.cache
def _parser() -> Lark:
    return Lark(_GRAMMAR, parser="lalr", transformer=_Maker(), maybe_placeholders=False)


@v_args(inline=True)
class _Maker(Transformer[Token, Any]):
    """Makes the tree while the text is parsed, from the leaves up; so no depth of brackets makes it recurse."""

    def field(self, *names: Token) -> Field:
        return _at(names[0], lambda: field_of(tuple(name.strip('"') for name in names)))

    def value(self, token: Token) -> tuple[Token, Any]:
        if token.type == "TEXT":
            return token, token[1:-1].replace("''", "'")
        if token.type == "NUMBER":
            return token, _number(token)
        return token, {"TRUE": True, "FALSE": False, "NULL": None}[token.type]

    def compare(self, field: Field, op: Token, value: tuple[Token, Any]) -> Filter:
        return _at(value[0], lambda: Compare(field, str(op), value[1]))  # type: ignore[arg-type]

    def exists(self, keyword: Token, field: Field) -> Filter:
        return Exists(field)

    def one_of(self, field: Field, keyword: Token, *values: tuple[Token, Any]) -> Filter:
        return _at(keyword, lambda: In(field, tuple(value for _, value in values)))

    def none_of(self, field: Field, negation: Token, keyword: Token, *values: tuple[Token, Any]) -> Filter:
        return _at(negation, lambda: Not(In(field, tuple(value for _, value in values))))

    def negated(self, keyword: Token, part: Filter) -> Filter:
        return _at(keyword, lambda: Not(part))

    def all_of(self, *parts: Filter | Token) -> Filter:
        return _joined(And, parts)

    def any_of(self, *parts: Filter | Token) -> Filter:
        return _joined(Or, parts)


def _joined(kind: type[And | Or], parts: tuple[Filter | Token, ...]) -> Filter:
    """Of filters and the words between them."""
    word = next(part for part in parts if isinstance(part, Token))
    return _at(word, lambda: kind(tuple(part for part in parts if not isinstance(part, Token))))


def _at(token: Token, make: Callable[[], Made]) -> Made:
    """Return what `make` makes; what it refuses, it refuses at this token."""
    try:
        return make()
    except DataError as fault:
        raise _Misplaced(token.start_pos or 0, str(fault)) from None


def _number(digits: str) -> int | float:
    # Python refuses to read an integer of thousands of digits
    return int(digits) if len(digits) < 30 and re.fullmatch(r"[+-]?[0-9]+", digits) else float(digits)


def _place(fault: UnexpectedInput, text: str) -> int:
    """Where the fault is; at the end, lark gives the place of the last token."""
    if isinstance(fault, UnexpectedToken) and fault.token.type == "$END":
        return len(text.rstrip())
    return fault.pos_in_stream or 0


def _sentence(fault: UnexpectedInput, text: str) -> str:
    """Return what was expected, what is there instead, and what was perhaps meant."""
    place = _place(fault, text)
    if isinstance(fault, UnexpectedCharacters):
        found = next((sign for sign in ("==", "<>", "&", "|") if text.startswith(sign, place)), text[place])
        if found in ("'", '"'):
            what = "text" if found == "'" else "name"
            return f"the {what} that begins here has no end; it lacks {found}."
        before = _parser().parse_interactive(text[:place])
        before.exhaust_lexer()
        names = set(before.accepts())  # type: ignore[no-untyped-call]
    else:
        assert isinstance(fault, UnexpectedToken)
        names, found = set(fault.accepts or fault.expected), str(fault.token)
    shown = f"there is {_readable(found[:40])}" if found else "the text ends here"
    return f"expected {_expected(names)}, but {shown}.{_hint(found, names, text[:place])}"


def _expected(names: set[str]) -> str:
    if {"NOT", "NAME"} <= names:
        return _CONDITION
    if "DOT" in names and "OP" in names:  # the field's name is complete
        names = {"OP", "IN"}
    words = list(dict.fromkeys(_EXPECTED[name] for name in _EXPECTED if name in names and _EXPECTED[name]))
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _hint(found: str, names: set[str], before: str) -> str:
    if "TEXT" in names and re.match(r'[^\W\d]|"', found) and found.lower() not in RESERVED:
        return f" Text stands in single quotes: '{_readable(found[:40].strip(chr(34)))}'."
    whole = before[-1:] + found if before[-1:] in ("=", "<") else found
    for sign in (whole.lower(), found.lower()):
        if sign in _HINTS:
            return f" {_HINTS[sign]}"
    return did_you_mean(found[:40], [name.lower() for name in ("AND", "OR", "IN") if name in names])


def _readable(text: str) -> str:
    """Text with the same number of characters, none of which moves a terminal's cursor."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _pointed(text: str, position: int) -> str:
    """Return the line around a place, and below it a caret."""
    start = max(text.rfind("\n", 0, position) + 1, position - _SHOWN)
    line = text[start : position + _SHOWN].partition("\n")[0]
    return f"    {_readable(line)}\n    {' ' * (position - start)}^"
