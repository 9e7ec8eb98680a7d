"""Answers that were given to requests under a key: kept in the record, in the transaction that they speak of."""

from __future__ import annotations

import time

import apsw

from retrieval.serving.local.record import ANSWERS, ask, value

MOST = 10_000
SECONDS = 86_400.0
"""So many answers are kept, for so long: the newest."""


def answered(connection: apsw.Connection, key: str) -> tuple[str, bytes] | None:
    """Return the request and the answer under a key; None where there is none, or no more."""
    if not value(connection, "select 1 from sqlite_master where name = 'answers'"):
        return None
    sql = "select request, answer from answers where key = ? and made > ?"
    found = ask(connection, sql, (key, time.time() - SECONDS))
    return (str(found[0][0]), bytes(found[0][1])) if found else None


def keep_answer(connection: apsw.Connection, key: str, request: str, answer: bytes) -> None:
    """Keep an answer inside a transaction, and forget those that are too many or too old."""
    connection.execute(ANSWERS.replace("create table", "create table if not exists"))
    now = time.time()
    connection.execute("insert or replace into answers values (?, ?, ?, ?)", (key, request, answer, now))
    connection.execute("delete from answers where made <= ?", (now - SECONDS,))
    over = "select key from answers order by made desc, key limit -1 offset ?"
    connection.execute(f"delete from answers where key in ({over})", (MOST,))
