"""Copy a store's items: to a new index in a folder, or to another store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from retrieval.base.files import rename_whole, scratch_folder, sync_below
from retrieval.bundle.bundle import Bundle
from retrieval.errors import StoreError
from retrieval.store.contract import Item, Store
from retrieval.store.folder import create_local
from retrieval.store.items import CALIBRATION, checked_columns, served_of
from retrieval.store.local import LocalStore
from retrieval.store.record import served_generation
from retrieval.store.words import insert_items

PAGE = 1000  # items that are read or copied at a time


def write_copy(store: Store, target: Path) -> None:
    """Copy the served generation of a store to a new index in a folder, atomically.

    A remote store can implement `Store.snapshot` with this function. The copy is consistent only if
    nobody writes meanwhile.

    Args:
        store: the store to copy.
        target: the new folder, whose parent must exist.

    Raises:
        StoreError: `target` exists already, or the disk fails.
    """
    occupied = StoreError(f"{target} exists already. Choose another name for the snapshot.")
    generation = served_of(store.generations())
    bundle = Bundle.open(store.bundle(generation), variant=generation.variant, device="cpu")
    if target.exists() or target.is_symlink():
        raise occupied
    try:
        with scratch_folder(target.parent, f".{target.name}.", ".part") as beside:
            fresh = beside / target.name
            create_local(fresh, bundle, generation.widths, identity=store.identity())
            with LocalStore(fresh, upkeep=False) as copy:
                copy_items(
                    store, copy, bundle.sha256, bare=lambda items: _add_without_arrays(copy, items)
                )
            sync_below(fresh)
            rename_whole(fresh, target, replace=False, exists_error=occupied)
    except OSError as fault:
        raise StoreError(f"{target} cannot be written: {fault.strerror or fault}.") from None


def copy_items(
    source: Store,
    target: Store,
    bundle: str,
    *,
    bare: Callable[[Sequence[Item]], object],
    report: Callable[[int], object] = lambda count: None,
) -> None:
    """Copy all items of one store to another, with arrays, originals and calibration.

    The target keeps words if the source does and the target can.

    Args:
        source: the store to read from.
        target: the store to write to.
        bundle: SHA-256 of the manifest of the bundle that both stores serve.
        bare: called with the items that have no arrays, which `target.upsert` would refuse.
        report: called with the number of items of each page that was copied.
    """
    if source.keeps_words() and "words" in target.capabilities:
        target.keep_words()
    after: str | None = None
    while page := source.scan(after=after, limit=PAGE):
        after = page[-1].id
        ids = [item.id for item in page]
        originals = source.originals(ids)
        items = [
            replace(item, original=originals.get(item.id))
            for item in source.get(ids, arrays=True).values()
        ]
        target.upsert([item for item in items if item.arrays], bundle)
        if without := [item for item in items if not item.arrays]:
            bare(without)
        report(len(page))
    content = source.note(served_of(source.generations()), CALIBRATION)
    if content is not None:
        target.set_note(served_of(target.generations()), CALIBRATION, content)


def _add_without_arrays(copy: LocalStore, items: Sequence[Item]) -> None:
    """Write items for which the served generation has no arrays."""
    columns = checked_columns(items, {})
    with copy.record.writing() as (connection, _):
        number = served_generation(connection).number
        rows = [(number, n) for n in insert_items(connection, columns)]
        connection.executemany("insert into left_out values (?, ?)", rows)
