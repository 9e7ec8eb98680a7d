"""Generations: all items under one bundle, one of them served; the others are being embedded, or kept for going back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import apsw
import numpy as np

from retrieval.errors import DataError, StoreError, listed
from retrieval.serving.bundle import Bundle
from retrieval.serving.local.generation_table import BUNDLES, add_generation, all_of, keep_bundle
from retrieval.serving.local.record import ask, value
from retrieval.serving.local.rows import COLUMNS
from retrieval.serving.local.writer import Writer, files_of, remove_files
from retrieval.serving.stores.contract import Generation, Item
from retrieval.serving.stores.items import checked


class Generations:
    """Begins, fills, serves and drops generations of a store.

    A generation that is not served has arrays of all items up to a number: items are numbered in the order in which they come, and one
    that changes gets a new number.

    Args:
        writer: of the store.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._pending: dict[int, dict[str, int]] = {}

    def begin(self, bundle: Bundle, widths: Mapping[str, int]) -> Generation:
        """See `Store.begin`."""
        writer = self._writer
        with writer.turn:
            writer.hold()
            with writer.record.reading() as connection:
                there = all_of(connection)
                for known in there:
                    if (known.bundle, known.variant, dict(known.widths)) == (
                        bundle.sha256,
                        bundle.variant,
                        dict(widths),
                    ):
                        return known
            keep_bundle(bundle, writer.folder, known=any(one.bundle == bundle.sha256 for one in there))
            with writer.transaction() as (connection, _):
                number = add_generation(connection, bundle, widths, "building")
                return next(one for one in all_of(connection) if one.number == number)

    def pending(
        self, connection: apsw.Connection, generation: Generation, limit: int
    ) -> list[tuple[Any, ...]]:
        """Return rows of items that a generation lacks; see `Store.pending`."""
        if self._state(connection, generation) == "served":
            return []
        upto = value(connection, "select upto from generations where g = ?", (generation.number,))
        rows = ask(connection, f"select {COLUMNS} from items where n > ? order by n limit ?", (upto, limit))  # fmt: skip
        self._pending[generation.number] = {row[1]: row[0] for row in rows}
        return rows

    def embed(self, generation: Generation, items: Sequence[Item], left_out: Sequence[str]) -> None:
        """See `Store.embed`."""
        self._writer.record.require_open()
        numbers = self._pending.get(generation.number, {})
        checked(items, generation.widths)
        given = {item.id for item in items}
        faults = [f"{id} was not pending." for id in given if id not in numbers]
        faults += [f"{id} is neither embedded nor left out." for id in numbers.keys() - given - set(left_out)]
        if faults:
            raise DataError(listed("What was embedded", sorted(faults)))
        if not numbers:
            return
        with self._writer.turn, self._writer.transaction(segments=True) as (connection, _):
            if self._state(connection, generation) == "served":
                raise StoreError("The generation is served by now, and complete.")
            text = json.dumps(sorted(numbers.values()))
            alive = {n for (n,) in ask(connection, "select n from items where n in (select value from json_each(?))", (text,))}  # fmt: skip
            kept = sorted(
                (numbers[item.id], at) for at, item in enumerate(items) if numbers[item.id] in alive
            )
            if kept:
                ordered = [items[at] for _, at in kept]
                self._writer.keep(connection, generation, np.array([n for n, _ in kept], np.int64), ordered)
            out = [(generation.number, numbers[id]) for id in left_out if numbers.get(id) in alive]
            connection.executemany("insert or ignore into left_out values (?, ?)", out)
            connection.execute("update generations set upto = ? where g = ?", (max(numbers.values()), generation.number))  # fmt: skip
        self._pending.pop(generation.number, None)

    def switch(self, generation: Generation) -> bool:
        """See `Store.switch`."""
        with self._writer.turn, self._writer.transaction(segments=True) as (connection, _):
            state = self._state(connection, generation)
            if state == "served":
                return True
            upto = value(connection, "select upto from generations where g = ?", (generation.number,))
            if value(connection, "select 1 from items where n > ? limit 1", (upto,)):
                return False
            last = value(connection, "select seq from sqlite_sequence where name = 'items'") or 0
            connection.execute(
                "update generations set state = 'kept', upto = ? where state = 'served'", (last,)
            )
            connection.execute("update generations set state = 'served' where g = ?", (generation.number,))
            return True

    def drop(self, generation: Generation) -> None:
        """See `Store.drop`."""
        with self._writer.turn:
            with self._writer.transaction(segments=True) as (connection, _):
                if self._state(connection, generation) == "served":
                    raise StoreError("The generation that is served cannot be dropped.")
                files = []
                for file, structure in ask(connection, "select file, structure from segments where g = ?", (generation.number,)):  # fmt: skip
                    files += files_of(file, structure)
                for table in ("segments", "fresh", "left_out", "generations"):
                    connection.execute(f"delete from {table} where g = ?", (generation.number,))
                others = {one.bundle for one in all_of(connection)}
            remove_files(self._writer.folder, files)
            self._writer.home.ready.forget(files)
            if generation.bundle not in others:
                shutil.rmtree(self._writer.folder / BUNDLES / generation.bundle[:16], ignore_errors=True)

    @staticmethod
    def _state(connection: apsw.Connection, generation: Generation) -> str:
        state = value(connection, "select state from generations where g = ?", (generation.number,))
        if state is None:
            raise gone()
        return str(state)


def gone() -> StoreError:
    """Return the error for a generation that was dropped."""
    return StoreError("This generation is not there any more.")
