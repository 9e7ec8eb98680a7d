"""Conditions in Milvus's language. What users write comes in as hexadecimal digits and whole numbers, so it cannot be a part of the language."""

from __future__ import annotations

import re

from retrieval import stores

_DIGITS = re.compile(r"[0-9a-f]*")
_WORD = re.compile(r"[a-zA-Z]*")
PARTITIONS = 16
TRUE, FALSE = "number >= 0", "number < 0"


def expression(where: stores.Condition) -> str:
    """Return a condition as Milvus reads it. Joints are nested in pairs: its parser is recursive."""
    if isinstance(where, stores.Between):
        least, most = int(where.least), int(where.most)
        return f"({where.column} >= {least} and {where.column} <= {most})"
    if isinstance(where, stores.OneOf):
        if not where.values:
            return FALSE
        values = [str(int(value)) if where.column == "number" else _text(value) for value in where.values]
        return f"{where.column} in [{', '.join(values)}]"
    if isinstance(where, stores.Has):
        if not where.terms:
            return TRUE if where.negated else FALSE
        found = f"array_contains_any(terms, [{', '.join(map(_text, where.terms))}])"
        return f"(not {found})" if where.negated else found
    if isinstance(where, stores.Every):
        return _joined([expression(part) for part in where.parts], "and", TRUE)
    if isinstance(where, stores.Either):
        return _joined([expression(part) for part in where.parts], "or", FALSE)
    field = f"orders[{_text(where.name[1:], where.name[:1])}]" if where.name else "key"
    return f"{field} {where.op} {_text(where.text)}"


def partition_of(part: str) -> str:
    """Return the partition of rows with a `Row.part`. A partition key would do this by itself, but `upsert` of Milvus 2.3 puts rows in wrong ones then."""
    return f"p{int(part or stores.LOOSE, 16) % PARTITIONS}"


def partitions(where: stores.Condition, field: str) -> list[str] | None:
    """Return the partitions that rows can be in which fulfil a condition; None for all.

    Args:
        where: the condition.
        field: the field of metadata that partitions are made by; empty for none.
    """
    found = stores.parts(where, stores.path_of((field,))) if field else None
    return None if found is None else sorted({partition_of(part) for part in {*found, stores.LOOSE}})


def _text(digits: str, before: str = "") -> str:
    """Return digits in quotes.

    Raises:
        ValueError: they are something else, which the callers see to.
    """
    if not (_DIGITS.fullmatch(digits) or _WORD.fullmatch(digits)) or not _WORD.fullmatch(before):
        raise ValueError(f"not digits: {digits!r}")
    return f'"{before}{digits}"'


def _joined(parts: list[str], joint: str, nothing: str) -> str:
    if not parts:
        return nothing
    while len(parts) > 1:
        pairs = [parts[at : at + 2] for at in range(0, len(parts), 2)]
        parts = [f"({f' {joint} '.join(pair)})" for pair in pairs]
    return parts[0]
