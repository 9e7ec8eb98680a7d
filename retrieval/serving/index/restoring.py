"""A snapshot becomes an index again: in a new folder, or at an address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from retrieval.errors import StoreError, listed
from retrieval.serving.bundle import Bundle
from retrieval.serving.index.checking import check_index
from retrieval.serving.local.home import identity
from retrieval.serving.local.record import Record
from retrieval.serving.local.snapshot import write_snapshot
from retrieval.serving.local.store import LocalStore
from retrieval.serving.progress import Meter
from retrieval.serving.stores.address import IndexPlace
from retrieval.serving.stores.contract import Store
from retrieval.serving.stores.find import store_place
from retrieval.serving.stores.place import StorePlace

_PAGE = 1000


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
        write_snapshot(record, snapshot, target)
    finally:
        record.close()
    return []


def _fill(snapshot: Path, at: StorePlace) -> list[str]:
    """Create an index at an address with what a snapshot serves; where that fails, nothing is left."""
    if at.exists():
        raise StoreError(f"{at.address} exists already. Choose another name.")
    with LocalStore(snapshot, upkeep=False) as source:
        (served,) = (one for one in source.generations() if one.state == "served")
        bundle = Bundle.open(source.bundle(served), variant=served.variant, device="cpu")
        store = at.create(bundle, served.widths, identity=identity(snapshot))
        try:
            with store, Meter("restoring", source.count(), "items") as meter:
                bare = _copy(source, store, bundle.sha256, meter)
        except Exception:
            at.drop()
            raise
    if not bare:
        return []
    return [
        f"{bare:,} items that the generation of the snapshot did without, since they could not be embedded, were left behind."
    ]


def _copy(source: Store, store: Store, bundle: str, meter: Meter) -> int:
    """Copy items from one store to another; return how many have no arrays, and so no place in it."""
    bare = 0
    after: str | None = None
    while page := source.scan(after=after, limit=_PAGE):
        after = page[-1].id
        items = source.get([item.id for item in page], arrays=True).values()
        whole = [replace(item, original=source.original(item.id)) for item in items if item.arrays]
        store.upsert(whole, bundle)
        bare += len(page) - len(whole)
        meter.update(len(page))
    return bare
