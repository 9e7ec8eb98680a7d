"""A snapshot becomes an index again: in a new folder, or at an address."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from retrieval.errors import StoreError, listed
from retrieval.serving.bundle import Bundle
from retrieval.serving.index.checking import check_index
from retrieval.serving.progress import Meter
from retrieval.serving.store.address import IndexPlace
from retrieval.serving.store.contract import Item
from retrieval.serving.store.local import LocalStore, copy_items
from retrieval.serving.store.place import StorePlace, store_place
from retrieval.serving.store.record import Record
from retrieval.serving.store.snapshot import write_snapshot


def restore(snapshot: Path, target: IndexPlace, *, plugins: Sequence[str] = ()) -> list[str]:
    """Copy a snapshot to a new place, after looking through it.

    A folder gets all of it. An address gets the items of the generation that is served, and the index's id.

    Args:
        snapshot: its folder.
        target: a folder that is not there, or an address where no index is.
        plugins: files or modules to load as plugins besides the installed ones.

    Returns:
        What was left behind, a sentence each.

    Raises:
        StoreError: the snapshot is damaged, there is something at the place already, or it cannot be written.
    """
    damaged, _ = check_index(snapshot)
    if damaged:
        raise StoreError(listed(f"The snapshot {snapshot} is damaged", damaged))
    if not isinstance(target, Path):
        return _fill(snapshot, store_place(target, plugins))
    record = Record(snapshot)
    try:
        write_snapshot(record, target, "Name a folder that is not there yet to restore to.")
    finally:
        record.close()
    return []


def _fill(snapshot: Path, at: StorePlace) -> list[str]:
    """Create an index at an address with what a snapshot serves; where that fails, nothing is left."""
    if at.exists():
        raise StoreError(f"{at.address} exists already. Choose another name.")
    behind: list[Item] = []
    with LocalStore(snapshot, upkeep=False) as source:
        served = next(one for one in source.generations() if one.state == "served")
        bundle = Bundle.open(source.bundle(served), variant=served.variant, device="cpu")
        store = at.create(bundle, served.widths, identity=source.identity())
        try:
            with store, Meter("restoring", source.count(), "items") as meter:
                copy_items(source, store, bundle.sha256, bare=behind.extend, report=meter.update)
        except Exception:
            at.drop()
            raise
    if not behind:
        return []
    return [
        f"{len(behind):,} items were left behind, which could not be embedded when the snapshot's index was migrated."
    ]
