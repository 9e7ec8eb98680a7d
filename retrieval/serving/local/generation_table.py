"""The record's table of generations, and the bundles that lie beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import apsw

from retrieval.errors import StoreError
from retrieval.host.files import whole_folder
from retrieval.serving.bundle import Bundle
from retrieval.serving.local.record import ask, reason, value
from retrieval.serving.stores.contract import Generation, spans_of

BUNDLES = "bundles"


def all_of(connection: apsw.Connection) -> tuple[Generation, ...]:
    """Return all generations of a record, oldest first."""
    rows = ask(connection, "select g, bundle, variant, widths, spans, state from generations order by g")
    return tuple(
        Generation(
            g,
            bundle,
            variant,
            json.loads(widths),
            tuple((start, stop) for start, stop in json.loads(spans)),
            state,
        )
        for g, bundle, variant, widths, spans, state in rows
    )


def add_generation(connection: apsw.Connection, bundle: Bundle, widths: Mapping[str, int], state: str) -> int:
    """Write a generation into the record; return its number."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    values = (
        bundle.sha256,
        bundle.variant,
        json.dumps(dict(widths)),
        json.dumps(spans_of(bundle)),
        state,
        now,
    )
    sql = "insert into generations (bundle, variant, widths, spans, state, upto, created) values (?,?,?,?,?,0,?) returning g"
    return int(value(connection, sql, values))


def keep_bundle(bundle: Bundle, folder: Path, *, known: bool = False) -> None:
    """Copy a bundle into an index.

    Args:
        bundle: which one.
        folder: of the index.
        known: a generation of the record has it, so that it is there. A folder that none has may be the rest of a bundle that was being
            deleted, and gives way.

    Raises:
        StoreError: the disk refuses.
    """
    target = folder / BUNDLES / bundle.sha256[:16]
    if known:
        return
    try:
        with whole_folder(target, replace=True, taken=StoreError(f"{target} is there.")) as fresh:
            bundle.copy(fresh)
    except OSError as fault:
        raise StoreError(f"The bundle cannot be kept in the index {folder}: {reason(fault)}") from fault


def served(connection: apsw.Connection) -> Generation:
    """Return the generation that is served.

    Raises:
        StoreError: there is not exactly one.
    """
    found = [one for one in all_of(connection) if one.state == "served"]
    if len(found) != 1:
        raise StoreError("The index is damaged: its record serves no generation. Restore a snapshot.")
    return found[0]
