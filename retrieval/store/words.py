"""The words of items in a local index: an inverted index of SQLite (FTS5) in the record.

The words of an item are those of its label, and of the texts and numbers in its metadata. The
transaction that writes items reads their words, and a trigger forgets those of an item that is
deleted. The index has no copy of the texts.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import apsw

from retrieval.errors import DataError
from retrieval.store.filters import Filter
from retrieval.store.items import ItemColumns, usable
from retrieval.store.masks import sql_of
from retrieval.store.record import ask, insert, last_number, value

MAX_TERMS = 64  # different words of a query that count
WITHOUT_WORDS = (
    "This index does not keep the words of its items. Run 'retrieval index words' on it (in Python"
    " index.keep_words()), or search by vectors alone."
)
# Items whose words a transaction reads; their metadata have at most 1 MB each.
_READ_AT_ONCE = 5000
_TERM = re.compile(r"[^\W_]+")

# Names of metadata are left out, because most items share them. Ids are left out, because a number
# in an id is rarer than the same number in metadata, and would weigh more.
_TEXT = """concat_ws(' ', item.label, (select group_concat(atom, ' ') from
 json_tree(item.metadata) where type in ('text', 'integer', 'real')))"""
_SCHEMA = """
create virtual table words using
 fts5(text, content = '', contentless_delete = 1, tokenize = 'unicode61 remove_diacritics 2');
create trigger words_removed after delete on items begin
 delete from words where rowid = old.n; end;
"""


def read_block(connection: apsw.Connection) -> int:
    """Read the words of the next items, in a write transaction; return how many, 0 at the end.

    The first call also creates the tables and triggers. Then the items are read from the newest to
    the oldest: the entry 'words' of the table `state` is the number of the next one.
    """
    upto = _unread_upto(connection)
    if upto is None:
        connection.execute(_SCHEMA)
        upto = last_number(connection)
    sql = "select count(*), min(n) from (select n from items where n <= ? order by n desc limit ?)"
    ((count, first),) = ask(connection, sql, (upto, _READ_AT_ONCE))
    _read(connection, first, upto)
    row = ("words", (first or 1) - 1)
    connection.execute("insert or replace into state values (?, ?)", row)
    return int(count)


def insert_items(connection: apsw.Connection, items: ItemColumns) -> range:
    """Write new items as `record.insert` does, and read their words if the index keeps words.

    A trigger would read them item by item, which takes four times as long.
    """
    numbers = insert(connection, items)
    if numbers and _unread_upto(connection) is not None:
        _read(connection, numbers[0], numbers[-1])
    return numbers


def _read(connection: apsw.Connection, first: int | None, last: int) -> None:
    connection.execute(
        f"insert into words (rowid, text) select n, {_TEXT} from items as item"
        " where n between ? and ? order by n",
        (first, last),
    )


def _unread_upto(connection: apsw.Connection) -> int | None:
    """Return the number up to which items' words are still to be read, or None without words."""
    number: int | None = value(connection, "select value from state where key = 'words'")
    return number


def are_kept(connection: apsw.Connection) -> bool:
    """Return whether the index has the words of all items."""
    return _unread_upto(connection) == 0


def merge(connection: apsw.Connection) -> None:
    """Merge the parts of the inverted index, in a write transaction; this drops deleted words."""
    if _unread_upto(connection) is not None:
        connection.execute("insert into words (words) values ('optimize')")


def count_faults(connection: apsw.Connection) -> int:
    """Return the number of items without words that should have some, or with words of no item."""
    upto = _unread_upto(connection)
    if upto is None:
        return 0
    sql = (
        "select (select count(*) from items where n > ? and n not in (select id from"
        " words_docsize)) + (select count(*) from words_docsize where id not in (select n from"
        " items))"
    )
    return int(value(connection, sql, (upto,)))


def best_items(
    connection: apsw.Connection,
    text: str,
    count: int,
    filter: Filter | None,
    also: Sequence[str],
) -> list[tuple[str, float]]:
    """Return the ids and scores of the items that fit a text best; see `Store.search_words`."""
    if not are_kept(connection):
        raise DataError(WITHOUT_WORDS)
    condition, values = sql_of(connection, filter)
    match = match_of(text)
    if not match:
        return []
    if filter is not None:
        # As `exists (…)`, SQLite would read all items first.
        condition = f"(select {condition} from items where n = words.rowid)"
    best = _ranked(connection, match, condition, values, count)
    if len(best) == count and also:
        ids = usable(also)
        # The plus sign keeps SQLite from matching the text once per item.
        among = "+rowid in (select n from items where id in (select value from json_each(?)))"
        ranked = _ranked(connection, match, among, (json.dumps(ids),), len(ids))
        known = {id for id, _ in best}
        lowest = best[-1][1]
        best += [(id, score) for id, score in ranked if score >= lowest and id not in known]
    return best


def match_of(text: str) -> str:
    """Return a query of FTS5 for any of the first words of a text; "" if it has none."""
    # A word has only letters and digits, and stands in quotes: no text is FTS5's syntax.
    terms = dict.fromkeys(_TERM.findall(unicodedata.normalize("NFC", text)))
    return " OR ".join(f'"{term}"' for term in list(terms)[:MAX_TERMS])


def _ranked(
    connection: apsw.Connection, match: str, condition: str, values: Sequence[Any], count: int
) -> list[tuple[str, float]]:
    """Return the ids and scores (BM25) of the `count` best items that meet a condition."""
    sql = (
        "select id, -score from (select rowid as n, bm25(words) as score from words"
        f" where words match ? and {condition} order by score, n limit ?)"
        " join items using (n) order by score, n"
    )
    return ask(connection, sql, (match, *values, count))
