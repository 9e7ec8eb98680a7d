"""Items of one store copied to another, whichever they are; and a folder made of any store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from retrieval.errors import StoreError
from retrieval.host.files import rename_whole, sync_below
from retrieval.host.scratch import scratch_folder
from retrieval.serving.bundle import Bundle
from retrieval.serving.local.create import create_local
from retrieval.serving.local.generation_table import served
from retrieval.serving.local.store import LocalStore
from retrieval.serving.stores.contract import Item, Store
from retrieval.serving.stores.items import checked

_PAGE = 1000


def write_copy(store: Store, target: Path) -> None:
    """Write the items of a store's served generation, and its bundle, to a new folder that opens as an index, whole or not at all.

    For `Store.snapshot` of a store that lies elsewhere. The folder holds one moment if nobody writes meanwhile: the store sees to that.

    Args:
        store: whose items.
        target: must not exist; its parent must.

    Raises:
        StoreError: there is something already, or the disk refuses.
    """
    taken = StoreError(f"{target} exists already. Choose another name for the snapshot.")
    generation = next(one for one in store.generations() if one.state == "served")
    bundle = Bundle.open(store.bundle(generation), variant=generation.variant, device="cpu")
    if target.exists() or target.is_symlink():
        raise taken
    try:
        with scratch_folder(target.parent, f".{target.name}.", ".part") as (beside, _):
            fresh = beside / target.name
            create_local(fresh, bundle, generation.widths, identity=store.identity())
            with LocalStore(fresh, upkeep=False) as copy:
                copy_items(store, copy, bundle.sha256, bare=lambda items: _insert(copy, items))
            sync_below(fresh)
            rename_whole(fresh, target, replace=False, taken=taken)
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
    """Copy all items of one store to another, with the arrays and originals that are kept.

    Args:
        source: where they are.
        target: where they go.
        bundle: SHA-256 of the one that both serve.
        bare: is given items that the served generation does without: they have no arrays, and `upsert` takes none such.
        report: is told how many items more are done.
    """
    after: str | None = None
    while page := source.scan(after=after, limit=_PAGE):
        after = page[-1].id
        items = [
            replace(item, original=source.original(item.id))
            for item in source.get([item.id for item in page], arrays=True).values()
        ]
        target.upsert([item for item in items if item.arrays], bundle)
        if without := [item for item in items if not item.arrays]:
            bare(without)
        report(len(page))


def _insert(copy: LocalStore, items: Sequence[Item]) -> None:
    """Write items that the served generation does without."""
    texts = checked(items, {})
    with copy.writer.transaction() as (connection, _):
        numbers = copy.writer.insert(connection, items, texts)
        number = served(connection).number
        connection.executemany("insert into left_out values (?, ?)", ((number, n) for n in numbers))
