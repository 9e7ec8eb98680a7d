"""Look through a whole index: every page, every block, every structure, every bundle; elsewhere every item."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from retrieval.errors import RetrievalError, StoreError
from retrieval.serving.bundle import Bundle
from retrieval.serving.progress import Meter
from retrieval.serving.store.check import check_record
from retrieval.serving.store.contract import Generation, Item, Store


def check_index(folder: Path) -> tuple[list[str], list[str]]:
    """Compare everything in an index folder with its checksums, and the record with the arrays.

    Returns:
        What is damaged, a sentence each; and what the next writer builds again by itself.

    Raises:
        StoreError: the record cannot be opened.
    """
    if not folder.is_dir():
        raise StoreError(f"{folder} is not an index: there is no such folder.")
    with Meter("checking", 0, "arrays") as meter:
        return check_record(folder, meter.update)


def check_store(store: Store) -> list[str]:
    """Read everything that a store holds, wherever it lies; return what is damaged, a sentence each.

    Each bundle is compared with its generation, and every item is read with its arrays. What was written meanwhile is no damage.
    """
    damaged: list[str] = []
    for generation in store.generations():
        try:
            if (
                Bundle.open(store.bundle(generation), variant=generation.variant, device="cpu").sha256
                != generation.bundle
            ):
                damaged.append(
                    f"The bundle of generation {generation.number} is another than the one that embedded its items."
                )
        except RetrievalError as fault:
            damaged.append(str(fault))
    (served,) = (one for one in store.generations() if one.state == "served")
    before, read = store.count(), 0
    after: str | None = None
    with Meter("checking", before, "items") as meter:
        while page := store.scan(after=after):
            after = page[-1].id
            items = store.get([item.id for item in page], arrays=True)
            damaged += [
                f"The item '{item.id}' has arrays that are none of its generation."
                for item in items.values()
                if item.arrays and not _fits(item, served)
            ]
            read += len(page)
            meter.update(len(page))
    if read != before and store.count() == before:
        damaged.append(f"{before:,} items are counted, and {read:,} are found.")
    return damaged


def _fits(item: Item, generation: Generation) -> bool:
    return all(
        name in item.arrays
        and item.arrays[name].shape == (width,)
        and bool(np.isfinite(item.arrays[name]).all())
        for name, width in generation.widths.items()
    )
