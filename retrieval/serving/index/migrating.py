"""Another bundle for a living index, while it is searched: all items are embedded again beside the old generation, then one switch."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError, StoreError, listed
from retrieval.host.files import rename_whole, sync_below
from retrieval.serving.bundle import Bundle, Encoded
from retrieval.serving.files.places import StrPath
from retrieval.serving.images import Limits, decode
from retrieval.serving.index.adding import originals
from retrieval.serving.index.collection import Collection
from retrieval.serving.index.frozen import FrozenIndex
from retrieval.serving.local.create import create_local
from retrieval.serving.local.store import LocalStore
from retrieval.serving.local.structures import Wanted
from retrieval.serving.progress import Meter, Progress, showing
from retrieval.serving.stores.contract import CODE, FEATURES, VECTOR, Generation, Item, widths_of
from retrieval.serving.threads import ahead

_ITEMS = 512  # at a time: after each, a kill costs nothing


@dataclass(frozen=True)
class Migrated:
    """What a migration did.

    Attributes:
        generation: which is served now.
        embedded: items that were embedded for it by this call.
        skipped: why an item could not be embedded, a sentence each; the generation does without it.
    """

    generation: Generation
    embedded: int
    skipped: tuple[str, ...] = ()


def migrate(
    index: Collection,
    bundle: StrPath | Bundle,
    *,
    skip_bad: bool = False,
    batch: int = 32,
    limits: Limits | None = None,
    progress: Progress = True,
) -> Migrated:
    """Embed all items with another bundle and serve that; see `LivingIndex.migrate`."""
    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    generation = index.store.begin(opened, widths_of(opened))
    if generation.state == "served":
        return Migrated(generation, 0)
    done = 0
    faults: list[str] = []
    with showing(progress), Meter("embedding", len(index), "items") as meter:
        while True:
            items = index.store.pending(generation, _ITEMS)
            if not items:
                if index.store.switch(generation):
                    break
                continue
            embedded, wrong = _embedded(index, opened, items, batch, limits or Limits())
            if wrong and not skip_bad:
                raise DataError(
                    listed("Some items cannot be embedded again", list(wrong.values()))
                    + "\nThe index is served as before. Mend them and repeat the command, which goes on where it stopped; or leave "
                    "them out of the new generation with --skip-bad (in Python skip_bad=True)."
                )
            faults += wrong.values()
            index.store.embed(generation, embedded, list(wrong))
            done += len(embedded)
            meter.update(len(items))
    index.follow()
    return Migrated(index.generation, done, tuple(faults))


def rollback(index: Collection, *, progress: Progress = True) -> Migrated:
    """Serve the newest kept generation again; see `LivingIndex.rollback`."""
    kept = [one for one in index.store.generations() if one.state == "kept"]
    if not kept:
        raise StoreError(f"The index {index.path} keeps no older generation to go back to.")
    chosen = max(kept, key=lambda one: one.number)
    return migrate(index, Bundle.open(index.store.bundle(chosen), variant=chosen.variant), progress=progress)


def _embedded(
    index: Collection, bundle: Bundle, items: Sequence[Item], batch: int, limits: Limits
) -> tuple[list[Item], dict[str, str]]:
    """Return items with a bundle's arrays, and why others have none, by id."""
    wrong: dict[str, str] = {}
    inputs: list[NDArray[Any]] = []
    good: list[Item] = []
    if bundle.manifest.input.kind == "features":
        width = bundle.manifest.input.shape[0]
        for item in items:
            features = item.arrays.get(FEATURES)
            if features is None or features.shape != (width,):
                wrong[item.id] = (
                    f"{item.id}: the index keeps no {width} features of it, which this bundle takes."
                )
            else:
                inputs.append(features)
                good.append(item)
    else:
        for item, pixels in _pixels(index, bundle, items, limits):
            if isinstance(pixels, str):
                wrong[item.id] = pixels
            else:
                inputs.append(pixels)
                good.append(item)
    if not good:
        return [], wrong
    encoded = bundle.encode(np.stack(inputs), batch=batch)
    return [replace(item, arrays=_arrays(encoded, at)) for at, item in enumerate(good)], wrong


def _arrays(encoded: Encoded, at: int) -> dict[str, Any]:
    codes = {} if encoded.code is None else {CODE: encoded.code[at]}
    return {VECTOR: encoded.vector[at], **codes}


def _pixels(
    index: Collection, bundle: Bundle, items: Sequence[Item], limits: Limits
) -> Iterator[tuple[Item, NDArray[np.uint8] | str]]:
    """Give the encoder's input of each item's original, or why there is none."""
    preprocessing = bundle.manifest.input.preprocessing
    assert preprocessing is not None

    def one(pair: tuple[Item, Path | bytes | DataError | None]) -> tuple[Item, NDArray[np.uint8] | str]:
        item, original = pair
        if isinstance(original, DataError):
            return item, f"{item.id}: {original}"
        if original is None:
            where = f"its file {item.path} is gone" if item.path else "the index keeps no original of it"
            return item, f"{item.id}: {where}."
        try:
            return item, preprocessing(decode(original, limits, item.id))
        except DataError as fault:
            return item, str(fault)
        except OSError as fault:
            return item, f"{item.id} cannot be read: {fault.strerror or fault}."

    workers = os.cpu_count() or 1
    yield from ahead(one, originals(index, items, limits.bytes), workers=workers, most=4 * workers)


def lift(path: Path, *, progress: Progress = True) -> int:
    """Make a living index of a folder of format 1, in its place: same items, same vectors; return how many.

    Args:
        path: the folder.
        progress: True shows a bar, False nothing; a function is told (what, done, total).

    Raises:
        StoreError: it is damaged, or the disk refuses; the folder is as it was.
    """
    fresh = path.with_name(f".{path.name}.lifted")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        with FrozenIndex.open(path) as old, showing(progress), Meter("lifting", len(old), "items") as meter:
            said = old.manifest.backend
            wanted = Wanted(said.name, said.options) if said.name != "flat" else Wanted()
            create_local(fresh, old.bundle, widths_of(old.bundle), structure=wanted)
            seen: Counter[str] = Counter()
            with LocalStore(fresh, upkeep=False) as store:
                for start in range(0, len(old), 8192):
                    items = [
                        _lifted(old, number, seen) for number in range(start, min(start + 8192, len(old)))
                    ]
                    store.upsert(items, old.bundle.sha256)
                    meter.update(len(items))
                store.compact()
            count = len(old)
        sync_below(fresh)
        rename_whole(fresh, path, replace=True, taken=StoreError(f"{path} is there."))
    finally:
        with suppress(OSError):
            shutil.rmtree(fresh, ignore_errors=True)
    return count


def _lifted(old: FrozenIndex, number: int, seen: Counter[str]) -> Item:
    item = old.item(number)
    assert item is not None
    seen[item.key] += 1
    id = item.key if seen[item.key] == 1 else f"{item.key} ({seen[item.key]})"
    return Item(
        id,
        item.label,
        item.metadata,
        item.path,
        None,
        "reference",
        None,
        item.bytes,
        item.width,
        item.height,
        old.arrays(number),
    )
