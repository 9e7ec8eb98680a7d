"""The words of items in Postgres: a table with a list of words per item, and BM25 in SQL.

Postgres's own full-text search does not know how rare a word is, so it would rank a text by its
most common words. This computes what SQLite's FTS5 does for an index in a folder.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from psycopg.sql import Identifier
from retrieval.errors import DataError
from retrieval.store.copy_store import PAGE
from retrieval.store.filters import Filter
from retrieval.store.items import Generation, usable
from retrieval.store.words import MAX_TERMS, WITHOUT_WORDS

from retrieval_engines.postgres.store import PostgresStore, all_of
from retrieval_engines.rows import Row

MOST_CHARACTERS = 100
"""Characters of a word that count; an entry of Postgres's index has at most 2,700 bytes."""
COLUMNS = {"id": "text", "words": "text[]"}
CREATE = """
create table {table} (id text collate "C" primary key, number bigint generated always as identity,
 words text[] collate "C" not null);
create index on {table} using gin (words)
"""
# The sum has an order of its own, so that items with the same words have the same score.
SEARCH = """
with found as materialized (
 select id, number, cardinality(words) as length, term,
  cardinality(array_positions(words, term)) as times
 from {table}, unnest(%s::text[]) as term where words && %s and term = any(words)
), totals as (
 select count(*) as items, avg(cardinality(words))::float8 as mean from {table}
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


class PostgresWords(PostgresStore):
    """A store in Postgres that keeps the words of its items, if told to.

    All generations share the table. The note "words" is the id up to which the items' words were
    read, or True for all.
    """

    capabilities = PostgresStore.capabilities | {"words"}

    @property
    def _words(self) -> str:
        return Identifier(f"{self._prefix}words").as_string()

    def _has_words(self, generation: Generation) -> bool:
        """Return whether a write to a generation changes words."""
        return generation.state == "served" and "words" in self._read_notes()

    def _write_rows(self, generation: Generation, rows: Sequence[Row]) -> None:
        super()._write_rows(generation, rows)
        if self._has_words(generation):
            self._write_words(rows)

    def _write_words(self, rows: Sequence[Row]) -> None:
        self._copy(self._words, COLUMNS, [(row.id, words_of(row)) for row in rows])

    def _delete_rows(self, generation: Generation, ids: Sequence[str]) -> None:
        super()._delete_rows(generation, ids)
        if generation.number and self._has_words(generation):
            self._execute(f"delete from {self._words} where id = any(%s)", list(ids))

    def keep_words(self, report: Callable[[int], object] = lambda count: None) -> None:
        """Keep the words of all items from now on; see `Store`."""
        while not self.keeps_words():
            with self._writing():
                served = self._read_register().served
                after = self._read_notes().get("words")
                if after is None:
                    self._execute(CREATE.format(table=self._words))
                rows = self._read_page(served, (), after, PAGE)
                # Those that were written since the first page have their words.
                text = f"select id from {self._words} where id = any(%s)"
                present = set(self._execute(text, [row.id for row in rows]))
                self._write_words([row for row in rows if (row.id,) not in present])
                self._write_notes({"words": not rows or rows[-1].id})
            report(len(rows))

    def keeps_words(self) -> bool:
        """Return whether the index has the words of all items."""
        return self._read_notes().get("words") is True

    def search_words(
        self, text: str, count: int, *, filter: Filter | None = None, also: Sequence[str] = ()
    ) -> list[tuple[str, float]]:
        """Return the items that fit the words of a text best; see `Store`."""
        with self._reading():
            register = self._read_register()
            if register.notes.get("words") is not True:
                raise DataError(WITHOUT_WORDS)
            where, values = all_of(self._conditions(filter))
            if filter is not None:
                where = f"id in (select id from {self._table(register.served)} where {where})"
            statement = SEARCH.format(table=self._words, where=where)
            terms = terms_of(text)
            return self._execute(statement, terms, terms, *values, count, usable(also), count)


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
