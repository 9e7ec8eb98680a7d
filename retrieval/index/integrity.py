"""Check an index against its checksums, and restore an index from a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from retrieval.base.folder_kinds import instead, kind_of
from retrieval.base.progress import Meter
from retrieval.bundle.bundle import Bundle
from retrieval.errors import StoreError, listed
from retrieval.store.address import IndexPlace
from retrieval.store.contract import Item, StorePlace
from retrieval.store.copy_store import copy_items
from retrieval.store.find_store import store_place
from retrieval.store.folder import check_record, write_snapshot
from retrieval.store.items import served_of
from retrieval.store.local import LocalStore
from retrieval.store.record import RECORD_FILE, Record


def check_index(folder: Path) -> tuple[list[str], list[str]]:
    """Compare the files of an index folder with their checksums and with the SQLite record.

    Returns:
        Two lists of sentences: what is damaged, and what the next writer will rebuild.

    Raises:
        StoreError: the folder is not an index, or its SQLite record cannot be opened.
    """
    if kind_of(folder) != "index" and not (folder / RECORD_FILE).exists():
        missing = "" if folder.is_dir() else ": there is no such folder"
        raise StoreError(f"{folder} is not an index{missing}.{instead(folder, 'index')}")
    with Meter("checking", 0, "arrays") as meter:
        return check_record(folder, meter.update)


def restore_snapshot(
    snapshot: Path, target: IndexPlace, *, plugins: Sequence[str] = ()
) -> list[str]:
    """Check a snapshot, then copy it to a new folder or address.

    A folder receives the whole snapshot. An address receives the index's id, the arrays of the
    served generation (the one that is searched), and the items that have such arrays.

    Returns:
        A sentence that counts the items that were not copied; an empty list if all were copied.

    Raises:
        StoreError: the snapshot is damaged, or the target exists or cannot be written.
    """
    faults, _ = check_index(snapshot)
    if faults:
        raise StoreError(listed(f"The snapshot {snapshot} is damaged", faults))
    if not isinstance(target, Path):
        return _create_from(snapshot, store_place(target, plugins))
    with Record.opened(snapshot) as record:
        write_snapshot(record, target, "Name a folder that does not exist yet.")
    return []


def _create_from(snapshot: Path, place: StorePlace) -> list[str]:
    """Create an index at an address from a snapshot's served generation; see `restore_snapshot`.

    If this fails, nothing is left at the address.
    """
    if place.exists():
        raise StoreError(f"{place.address} exists already. Choose another name.")
    skipped: list[Item] = []
    with LocalStore(snapshot, upkeep=False) as source:
        served = served_of(source.generations())
        bundle = Bundle.open(source.bundle(served), variant=served.variant, device="cpu")
        store = place.create(bundle, served.widths, identity=source.identity())
        try:
            with store, Meter("restoring", source.count(), "items") as meter:
                copy_items(source, store, bundle.sha256, bare=skipped.extend, report=meter.update)
        except Exception:
            place.drop()
            raise
    if not skipped:
        return []
    return [
        f"{len(skipped):,} items were not copied: they could not be embedded when the snapshot's"
        " index was migrated."
    ]
