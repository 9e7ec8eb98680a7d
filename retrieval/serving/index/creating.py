"""Create an index: embed, add, and put it in place whole."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from retrieval.errors import DataError, StoreError, at_least_one
from retrieval.host.files import rename_whole
from retrieval.serving.bundle import Bundle
from retrieval.serving.files.locks import hold
from retrieval.serving.files.places import StrPath, kind_of
from retrieval.serving.images import Limits
from retrieval.serving.index.adding import Added, Summary, add_sources
from retrieval.serving.index.backends import make_backend, short_name
from retrieval.serving.index.index import Index as OpenedIndex
from retrieval.serving.index.migrating import features_of
from retrieval.serving.progress import Meter, Progress, showing
from retrieval.serving.runtime import Device
from retrieval.serving.store.address import Address, IndexPlace, place_of
from retrieval.serving.store.contract import Keep, Store, StorePlace, StoreUnavailable, widths_of
from retrieval.serving.store.folder import create_local
from retrieval.serving.store.local import LocalStore
from retrieval.serving.store.place import store_place
from retrieval.serving.store.record import FILE as RECORD
from retrieval.serving.store.structure import StructureChoice


@runtime_checkable
class Exports(Protocol):
    """What has a bundle, or is exported to one for a while: a `retrieval.Encoder`."""

    def exported(self) -> AbstractContextManager[Path]:
        """Return a context in which the bundle's folder is there."""


class Index(OpenedIndex):
    """An index of images or vectors: create or open one, change it, and search it all the while.

    Its methods may be called from several threads at once.
    """

    @classmethod
    def create(
        cls,
        path: StrPath | Address,
        sources: StrPath | Sequence[StrPath] = (),
        *,
        model: StrPath | Bundle | Exports,
        backend: str = "auto",
        options: Mapping[str, Any] | None = None,
        plugins: Sequence[str] = (),
        variant: str | None = None,
        keep: Keep = "reference",
        keep_features: bool = False,
        skip_bad: bool = False,
        replace: bool = False,
        batch: int = 32,
        workers: int | None = None,
        limits: Limits | None = None,
        progress: Progress = True,
        device: Device = "auto",
    ) -> Self:
        """Embed items, create an index of them, whole or not at all, and open it.

        An interrupted call leaves `<path>.partial`; with the same bundle the same call goes on from
        there. At an address it leaves the index with what was added until then, and `add` goes on.
        A failed call leaves nothing.

        Args:
            path: the folder to write, whose parent must exist; or the address of a store that a
                plugin brings, as text.
            sources: one or more files, folders, CSV manifests, Parquet tables, tar shards, or
                `.npz` features; see `retrieval.serving.index.sources.collect`. Without any the
                index is empty.
            model: what embeds the items: a bundle's folder, or what `retrieval.load` gives. A run
                or a backbone is exported first; the index keeps its own copy of the bundle.
            backend: structure of large indexes: "auto" (by size), "flat", "hnsw", "ivf", or a
                plugin's `PLUGIN.name`.
            options: the back end's parameters.
            plugins: files or modules to load as plugins besides the installed ones.
            variant: encode with this variant of the encoder; queries will be, too.
            keep: what the index keeps of originals: "reference", "copy", "thumbnail" or "nothing".
            keep_features: keep the backbone's features too, so that another head takes seconds
                (`migrate`). The bundle is split, or takes features.
            skip_bad: leave out images that cannot be used, each reported on standard error, instead
                of refusing all.
            replace: put the new index in the place of one that is there; at an address that is
                deleted first.
            batch: items that go through the encoder at once.
            workers: threads that decode; as many as there are cores by default.
            limits: the largest images that are decoded.
            progress: True shows a bar, False nothing; a function is told (what, done, total).
            device: of the encoder: "auto", "cpu" or "cuda".

        Returns:
            The index, to which items can be added. Its `summary` says what was done.

        Raises:
            DataError: images that cannot be used, or an id twice: all are found, the first ten
                named.
            StoreError: the path exists, another process is building it, or it cannot be written.
            BundleError: the bundle cannot be used, or gives no features that could be kept.
            PluginError: the back end does not exist, or refuses its parameters.
        """
        began = time.monotonic()
        place = place_of(path)
        adding: dict[str, Any] = {
            "keep": keep,
            "skip_bad": skip_bad,
            "batch": at_least_one("batch", batch),
            "workers": workers,
            "limits": limits,
        }
        named = [sources] if isinstance(sources, str | os.PathLike) else list(sources)

        exports = ExitStack()

        def opened() -> tuple[Bundle, dict[str, int]]:
            if isinstance(model, Bundle):
                loaded = model
            else:
                folder = (
                    exports.enter_context(model.exported()) if isinstance(model, Exports) else model
                )
                loaded = Bundle.open(folder, variant=variant, device=device)
            return loaded, widths_of(
                loaded, features=features_of(loaded) if keep_features else None
            )

        with exports, showing(progress):
            if isinstance(place, Address):
                address = _free_address(place, plugins, replace, backend != "auto" or bool(options))
                loaded, widths = opened()
                if replace:
                    address.drop()
                try:
                    store = address.create(loaded, widths)
                    built = _filled(place, store, device, named, adding)
                except StoreUnavailable:
                    raise  # nothing can be deleted now either
                except Exception:
                    address.drop()
                    raise
            else:
                place = place.absolute()
                refuse_existing(place, replace)
                structure = _structure(backend, options, plugins)
                loaded, widths = opened()
                with hold(place, "building this index", StoreError):
                    refuse_existing(place, replace)  # again: who held it until now may have made it
                    partial = place.with_name(f"{place.name}.partial")
                    try:
                        local = _begun(partial, loaded, widths, structure, keep, plugins)
                        built = _filled(partial, local, device, named, {**adding, "sync": True})
                        rename_whole(partial, place, replace=replace, exists_error=_exists(place))
                    except Exception:
                        shutil.rmtree(partial, ignore_errors=True)
                        raise
        index = cls.open(place, device=device, plugins=plugins)
        index.summary = dataclasses.replace(built, path=place, seconds=time.monotonic() - began)
        return index


def _filled(
    path: IndexPlace,
    store: Store,
    device: Device,
    named: Sequence[StrPath],
    adding: Mapping[str, Any],
) -> Summary:
    """Add what sources name to a new store, and build its structure; return what was done."""
    try:
        index = OpenedIndex(path, store, device=device)
    except BaseException:
        store.close()
        raise
    with index:
        before, name, recall = len(index), getattr(path, "scheme", ""), None
        added = add_sources(index, named, whole=True, **adding) if named else Added()
        if isinstance(store, LocalStore):
            with Meter("indexing", len(index), "items") as meter:
                store.compact(lambda done, total: meter.reach(done, total, "indexing"))
            name, recall = store.recall()
        return Summary(
            path,
            len(index),
            added.skipped,
            added.repeated,
            before,
            name,
            recall,
            left_out=added.left_out,
        )


def create_index(
    output: StrPath | Address,
    bundle: StrPath | Bundle,
    sources: StrPath | Sequence[StrPath] = (),
    **options: Any,
) -> Summary:
    """Create an index as `Index.create` does, with its options and errors, and leave it closed."""
    with Index.create(output, sources, model=bundle, **options) as index:
        assert index.summary is not None
        return index.summary


def refuse_existing(output: Path, replace: bool) -> None:
    """Refuse to overwrite, unless the user asked for it and it is an index.

    Raises:
        StoreError: something is there already, or the folder to write to does not exist.
    """
    if not output.parent.is_dir():
        raise StoreError(f"{output} cannot be written: there is no folder {output.parent}.")
    if not (output.exists() or output.is_symlink()):
        return
    if not output.is_dir():
        raise StoreError(f"{output} is a file, and an index is a folder. Choose another name.")
    if not replace:
        raise _exists(output)
    if output.is_symlink() or kind_of(output) != "index" or not (output / RECORD).is_file():
        raise StoreError(
            f"{output} is not an index, so --replace does not touch it. Choose another name."
        )


def _free_address(
    address: Address, plugins: Sequence[str], replace: bool, structured: bool
) -> StorePlace:
    """Return the place at an address, once it is free and no structure is asked for."""
    if structured:
        raise DataError(
            f"A back end and its parameters are of folders. What the store of {address} can be told"
            " stands in its address; 'retrieval plugins show' names it."
        )
    place = store_place(address, plugins)
    if not replace and place.exists():
        raise StoreError(
            f"{address} exists already. Add to it with 'retrieval index add', choose another name,"
            " or pass --replace (in Python replace=True), which deletes it first."
        )
    return place


def _exists(output: Path) -> StoreError:
    return StoreError(
        f"{output} exists already. Choose another name, or pass --replace (in Python replace=True)"
        " to put the new index there."
    )


def _structure(
    backend: str, options: Mapping[str, Any] | None, plugins: Sequence[str]
) -> StructureChoice:
    """Return which structure is meant; a misspelt name must not cost an hour first."""
    if backend != "auto":
        make_backend(backend, options or {}, plugins)
        return StructureChoice(short_name(backend), dict(options or {}))
    if options:
        raise DataError("Parameters of a back end need its name: pass --backend with --set.")
    return StructureChoice("auto", {})


def _begun(
    partial: Path,
    bundle: Bundle,
    widths: Mapping[str, int],
    structure: StructureChoice,
    keep: Keep,
    plugins: Sequence[str],
) -> LocalStore:
    """Return the store of an interrupted run of the same work, or an empty one."""
    with suppress(StoreError, OSError):
        store = LocalStore(partial, plugins=plugins, upkeep=False)
        served = next(
            generation for generation in store.generations() if generation.state == "served"
        )
        begun = (served.bundle, served.variant, dict(served.widths), store.chosen_structure())
        if begun == (bundle.sha256, bundle.variant, dict(widths), structure):
            return store
        store.close()
    if partial.is_dir():
        shutil.rmtree(partial)
    else:
        partial.unlink(missing_ok=True)
    create_local(partial, bundle, widths, structure=structure, keep=keep)
    return LocalStore(partial, plugins=plugins, upkeep=False)
