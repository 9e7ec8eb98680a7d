"""Create an index: embed items, add them, and move the finished index to its final path."""

from __future__ import annotations

import dataclasses
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieval.base.files import hold, rename_whole
from retrieval.base.folder_kinds import StrPath, kind_of
from retrieval.base.progress import Meter, Progress, showing
from retrieval.base.runtime import Device
from retrieval.bundle.bundle import Bundle
from retrieval.bundle.encoder import Encoder
from retrieval.errors import DataError, StoreError, at_least_one
from retrieval.images.decoding import Limits
from retrieval.index.adding import Added, Options, Summary, add_sources
from retrieval.index.sources import paths_of
from retrieval.store.address import Address, place_of
from retrieval.store.backends import make_backend, short_name
from retrieval.store.contract import Keep, StorePlace, StoreUnavailable, widths_of
from retrieval.store.find_store import store_place
from retrieval.store.folder import create_local
from retrieval.store.items import served_of
from retrieval.store.local import LocalStore
from retrieval.store.record import RECORD_FILE as RECORD
from retrieval.store.search_structure import StructureChoice

if TYPE_CHECKING:
    from retrieval.index.index import Index

_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)+")

load_named: Callable[..., Encoder] | None = None
"""`retrieval.load`, which `retrieval` sets, because this module imports nothing of training."""


def create_and_open(
    cls: type[Index],
    path: StrPath | Address,
    sources: StrPath | Sequence[StrPath] = (),
    *,
    model: StrPath | Bundle | Encoder,
    backend: str = "auto",
    options: Mapping[str, Any] | None = None,
    plugins: Sequence[str] = (),
    variant: str | None = None,
    keep: Keep = "reference",
    keep_features: bool = False,
    skip_bad: bool = False,
    replace: bool = False,
    batch_size: int = 32,
    limits: Limits | None = None,
    progress: Progress = True,
    device: Device = "auto",
) -> Index:
    """Embed items, create an index of them and open it.

    An interrupted call leaves the folder `<path>.partial`; the same call with the same bundle
    resumes there. At an address, an interrupted call leaves a partly filled index; complete it with
    `Index.add`. A failed call leaves nothing.

    Args:
        path: folder to write, whose parent must exist, or the address of a plugin's store.
        sources: see `Index.add`. Without sources the index is empty.
        model: model that embeds the items: an opened bundle, a bundle's folder, the name of a
            pretrained backbone, or an encoder from `retrieval.load`. An encoder of a run or of a
            backbone is exported first. The index keeps a copy of the bundle.
        backend: back end that speeds up the search of a large index: "auto" (by size), "flat",
            "hnsw", "ivf", or a plugin's `PLUGIN.name`.
        options: parameters of the back end.
        plugins: files or modules to load as plugins besides the installed ones.
        variant: variant of the encoder that encodes items and queries.
        keep: what the index keeps of each original; see `Index.add`.
        keep_features: also store the backbone's features, so that `Index.migrate` to another head
            needs no original. The bundle must be split into backbone and head, or take features.
        skip_bad: leave out images that cannot be used, instead of failing.
        replace: replace an existing index; at an address it is deleted first.
        batch_size: number of items per batch.
        limits: largest images to decode.
        progress: see `Index.add`.
        device: where the encoder runs: "auto", "cpu" or "cuda".

    Returns:
        The opened index. Its `summary` reports what was done.

    Raises:
        DataError: images cannot be used, or an id is used twice. The message lists the first ten.
        StoreError: the path exists or cannot be written, or another process is building the index.
        BundleError: the bundle cannot be used, or has no features to keep.
        PluginError: the back end does not exist or rejects its parameters.
    """
    began = time.monotonic()
    place = place_of(path)
    batch_size = at_least_one("batch_size", batch_size)
    adding = Options(keep, skip_bad, batch_size, limits or Limits())
    if load_named is not None and isinstance(model, str) and _NAME.fullmatch(model):
        if Path(model).exists():
            model = Path(model)
        else:
            model = load_named(model, plugins=plugins)
    named = paths_of(sources)
    with showing(progress):
        if isinstance(place, Address):
            address = _free_address(place, plugins, replace, backend != "auto" or bool(options))
            with _opened(model, variant, device, keep_features) as (bundle, widths):
                if replace:
                    address.drop()
                try:
                    store = address.create(bundle, widths)
                    built = _fill_index(cls(place, store, device=device), named, adding)
                except StoreUnavailable:
                    raise  # the store cannot be reached, so deleting the index would fail too
                except Exception:
                    address.drop()
                    raise
        else:
            place = place.absolute()
            refuse_existing_index(place, replace)
            structure = _structure(backend, options, plugins)
            with (
                _opened(model, variant, device, keep_features) as (bundle, widths),
                hold(place, "building this index", StoreError),
            ):
                # Another process may have created it while this one waited for the lock.
                refuse_existing_index(place, replace)
                partial = place.with_name(f"{place.name}.partial")
                try:
                    local = _open_partial(partial, bundle, widths, structure, keep, plugins)
                    index = cls(partial, local, device=device)
                    built = _fill_index(index, named, adding, sync=True)
                    # Only a finished index ever stands at `place`.
                    rename_whole(partial, place, replace=replace, exists_error=_exists_error(place))
                # Not `BaseException`: the same command resumes what Ctrl-C leaves in the folder.
                except Exception:
                    shutil.rmtree(partial, ignore_errors=True)
                    raise
    index = cls.open(place, device=device, plugins=plugins)
    index.summary = dataclasses.replace(built, path=place, seconds=time.monotonic() - began)
    return index


@contextmanager
def _opened(
    model: StrPath | Bundle | Encoder, variant: str | None, device: Device, keep_features: bool
) -> Iterator[tuple[Bundle, dict[str, int]]]:
    """Context manager that opens or exports a model's bundle.

    It yields the bundle and the widths of the arrays that the index will store, by name.
    """
    with model.exported() if isinstance(model, Encoder) else nullcontext(model) as bundle:
        if not isinstance(bundle, Bundle):
            bundle = Bundle.open(bundle, variant=variant, device=device)
        yield bundle, widths_of(bundle, features=bundle.features_width if keep_features else None)


def _fill_index(
    index: Index, named: Sequence[StrPath], options: Options, sync: bool = False
) -> Summary:
    """Add the items of `named` to a new index, build its structure, and close it."""
    with index:
        store = index.store
        before = len(index)
        if named:
            added = add_sources(index, named, options, sync=sync, whole=True)
        else:
            added = Added()
        name = getattr(index.path, "scheme", "")
        recall = None
        if isinstance(store, LocalStore):
            with Meter("indexing", len(index), "items") as meter:
                store.compact(lambda done, total: meter.reach(done, total, "indexing"))
            name, recall = store.recall()
        return Summary(
            index.path,
            count=len(index),
            skipped=added.skipped,
            repeated=added.repeated,
            resumed=before,
            backend=name,
            recall_at_10=recall,
            left_out=added.left_out,
        )


def refuse_existing_index(output: Path, replace: bool) -> None:
    """Raise a `StoreError` if `output` exists, unless it is an index and `replace` is True."""
    if not output.parent.is_dir():
        raise StoreError(f"{output} cannot be written: there is no folder {output.parent}.")
    if not (output.exists() or output.is_symlink()):
        return
    if not output.is_dir():
        raise StoreError(f"{output} is a file, and an index is a folder. Choose another name.")
    if not replace:
        raise _exists_error(output)
    if output.is_symlink() or kind_of(output) != "index" or not (output / RECORD).is_file():
        raise StoreError(f"{output} is not an index, so it is not replaced. Choose another name.")


def _free_address(
    address: Address, plugins: Sequence[str], replace: bool, structured: bool
) -> StorePlace:
    """Return the place at an address after checking that a new index can be created there.

    `structured` says whether the user named a back end or its parameters.
    """
    if structured:
        raise DataError(
            f"Only an index in a folder takes a back end and its parameters. The store of {address}"
            " reads its parameters from the address; 'retrieval plugins show' lists them."
        )
    store = store_place(address, plugins)
    if not replace and store.exists():
        raise StoreError(
            f"{address} exists already. Add to it with 'retrieval index add', choose another name,"
            " or pass --replace (in Python replace=True), which deletes it first."
        )
    return store


def _exists_error(output: Path) -> StoreError:
    return StoreError(
        f"{output} exists already. Choose another name, or pass --replace (in Python replace=True)"
        " to put the new index there."
    )


def _structure(
    backend: str, options: Mapping[str, Any] | None, plugins: Sequence[str]
) -> StructureChoice:
    """Check the requested back end, so that a typo fails before any work, and return it."""
    if backend != "auto":
        make_backend(backend, options or {}, plugins)
    elif options:
        raise DataError(
            "Parameters of a back end need its name: add --backend NAME (in Python backend='NAME')."
        )
    return StructureChoice(short_name(backend), dict(options or {}))


def _open_partial(
    partial: Path,
    bundle: Bundle,
    widths: Mapping[str, int],
    structure: StructureChoice,
    keep: Keep,
    plugins: Sequence[str],
) -> LocalStore:
    """Return the store of an interrupted call with the same settings, or else a new store."""
    with suppress(StoreError, OSError):
        store = LocalStore(partial, plugins=plugins, upkeep=False)
        served = served_of(store.generations())
        settings = (served.bundle, served.variant, dict(served.widths), store.chosen_structure())
        if settings == (bundle.sha256, bundle.variant, dict(widths), structure):
            return store
        store.close()
    if partial.is_dir():
        shutil.rmtree(partial)
    else:
        partial.unlink(missing_ok=True)
    # Without upkeep, nothing is merged meanwhile: `_fill_index` builds the structure once.
    create_local(partial, bundle, widths, structure=structure, keep=keep)
    return LocalStore(partial, plugins=plugins, upkeep=False)
