"""The words of items in Postgres: a table with a list of words per item, and BM25 in SQL.

Postgres's own full-text search does not know how rare a word is, so it would rank a text by its
most common words. This computes what SQLite's FTS5 does for an index in a folder.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

from retrieval.store.words import MAX_TERMS

from retrieval_engines.rows import Row

MOST_CHARACTERS = 100
"""Characters of a word that count; an entry of Postgres's index has at most 2,700 bytes."""
COLUMNS = {"id": "text", "words": "text[]"}
CREATE = (
    'create table {words} (id text collate "C" primary key,'
    ' number bigint generated always as identity, words text[] collate "C" not null)',
    "create index on {words} using gin (words)",
)
# The sum has an order of its own, so that items with the same words have the same score.
SEARCH = """
with found as materialized (
 select id, number, cardinality(words) as length, term,
  cardinality(array_positions(words, term)) as times
 from {words}, unnest(%s::text[]) as term where words && %s and term = any(words)
), totals as (
 select count(*) as items, avg(cardinality(words))::float8 as mean from {words}
), terms as (
 select term, greatest(ln((items - count(*) + 0.5::float8) / (count(*) + 0.5)), 1e-6) as weight
 from found, totals group by term, items
), scored as (
 select id, number, sum(
  weight * times * 2.2 / (times + 1.2 * (0.25 + 0.75 * (length / mean))) order by term
 ) as score
 from found join terms using (term), totals where {where} group by number, id
), placed as (
 select id, score, row_number() over (order by score desc, number) as place from scored
)
select id, score from placed
where place <= %s or id = any(%s) and score = (select score from placed where place = %s)
order by place
"""
_WORD = re.compile(r"[^\W_]+")


def words_of(row: Row) -> list[str]:
    """Return the words of an item's label, and of the texts and numbers in its metadata."""
    return words_in(" ".join(_texts([row.record["label"], row.record["metadata"]])))


def terms_of(text: str) -> list[str]:
    """Return the first different words of a query."""
    return list(dict.fromkeys(words_in(text)))[:MAX_TERMS]


def words_in(text: str) -> list[str]:
    """Return the series of letters and digits in a text, without case and accents."""
    apart = unicodedata.normalize("NFD", text.lower())
    plain = "".join(sign for sign in apart if not unicodedata.combining(sign))
    return [word[:MOST_CHARACTERS] for word in _WORD.findall(plain)]


def _texts(values: Sequence[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, dict):
            yield from _texts(list(value.values()))
        elif isinstance(value, list):
            yield from _texts(value)
        elif value is not None and not isinstance(value, bool):
            yield str(value)
