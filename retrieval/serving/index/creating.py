"""Create an index: embed, add, and put it in place whole."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from retrieval.errors import DataError, StoreError, at_least_one
from retrieval.host.files import rename_whole, write_bytes
from retrieval.serving.bundle import Bundle
from retrieval.serving.files.locks import hold
from retrieval.serving.files.places import StrPath, kind_of
from retrieval.serving.images import Limits
from retrieval.serving.index.adding import Added, add_sources
from retrieval.serving.index.backends import make_backend, short_name
from retrieval.serving.index.heads import features_of
from retrieval.serving.index.index import Index, Summary
from retrieval.serving.progress import Meter, Progress, showing
from retrieval.serving.providers import Device
from retrieval.serving.store.address import Address, place_of
from retrieval.serving.store.contract import Keep, Store, StorePlace, StoreUnavailable, widths_of
from retrieval.serving.store.local import LocalStore
from retrieval.serving.store.place import store_place
from retrieval.serving.store.record import FILE as RECORD
from retrieval.serving.store.structure import Wanted
from retrieval.serving.store.writing import create_local

_IDENTITY_BYTES = 1000


def build_index(
    bundle: StrPath | Bundle,
    sources: StrPath | Sequence[StrPath],
    output: StrPath | Address,
    *,
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
) -> Index:
    """Embed items, create an index of them, whole or not at all, and open it.

    An interrupted run leaves `<output>.partial`; the same call goes on from there. At an address it leaves the index with what was added
    until then, and `Index.add` goes on. A failed run leaves nothing.

    Args:
        bundle: a bundle, or its folder.
        sources: one or more files, folders, CSV manifests, Parquet tables, tar shards, or `.npz` features; see `retrieval.serving.index.sources.collect`. An empty
            list makes an empty index.
        output: the folder to write, whose parent must exist; or the address of a store that a plugin brings, as text.
        backend: structure of large segments: "auto" (by size), "flat", "hnsw", "ivf", or a plugin's `PLUGIN.name`.
        options: the back end's parameters.
        plugins: files or modules to load as plugins besides the installed ones.
        variant: encode with this variant of the encoder; queries will be, too.
        keep: what the index keeps of originals: "reference", "copy", "thumbnail" or "nothing".
        keep_features: keep the backbone's features too, so that another head takes seconds (`Index.migrate`). The bundle is
            split, or takes features.
        skip_bad: leave out images that cannot be used, each reported on standard error, instead of refusing all.
        replace: put the new index in the place of one that is there; at an address that is deleted first.
        batch: items that go through the encoder at once.
        workers: threads that decode; as many as there are cores by default.
        limits: the largest images that are decoded.
        progress: True shows a bar, False nothing; a function is told (what, done, total).
        device: of the encoder: "auto", "cpu" or "cuda".

    Returns:
        The index, to which items can be added. Its `summary` says what was done.

    Raises:
        DataError: images that cannot be used, or an id twice: all are found, the first ten named.
        StoreError: the output exists, another process is building it, or it cannot be written.
        BundleError: the bundle cannot be used, or gives no features that could be kept.
        PluginError: the back end does not exist, or refuses its parameters.
    """
    summary = create_index(
        output,
        bundle,
        sources,
        backend=backend,
        options=options,
        plugins=plugins,
        variant=variant,
        keep=keep,
        keep_features=keep_features,
        skip_bad=skip_bad,
        replace=replace,
        batch=batch,
        workers=workers,
        limits=limits,
        progress=progress,
        device=device,
    )
    index = Index.open(summary.path, device=device, plugins=plugins)
    index.summary = summary
    return index


def create_index(
    output: StrPath | Address,
    bundle: StrPath | Bundle,
    sources: StrPath | Sequence[StrPath] = (),
    *,
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
) -> Summary:
    """Create an index, with what sources name in it, whole or not at all.

    An interrupted run leaves `<output>.partial`, and the same call goes on from there; at an address it leaves the index with what was
    added, and the same call of the same user on the same machine goes on. A failed one leaves nothing. The arguments and errors are those of `retrieval.build_index`.
    """
    began = time.monotonic()
    place = place_of(output)
    if isinstance(place, Address):
        at, begun = store_place(place, plugins), Begun(place)
        if not replace and begun.identity is None and at.exists():
            raise _taken(place)
        _refuse_backend(place, backend, options)
    else:
        target = place.absolute()
        refuse_existing(target, replace)
        wanted = _wanted(backend, options, plugins)
    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle, variant=variant, device=device)
    widths = widths_of(opened, features=features_of(opened) if keep_features else None)
    adding = {
        "skip_bad": skip_bad,
        "batch": at_least_one("batch", batch),
        "workers": workers,
        "limits": limits,
    }
    if isinstance(place, Address):
        with showing(progress), begun.alone():
            store = _resumed(at, begun, opened, widths, replace)
            summary = _at(at, begun, store, opened, widths, sources, keep, adding, device)
        return dataclasses.replace(summary, seconds=time.monotonic() - began)
    with showing(progress), hold(target, "building this index", StoreError):
        refuse_existing(target, replace)  # again: who held it until now may have made it
        partial = target.with_name(f"{target.name}.partial")
        try:
            store = _begun(partial, opened, widths, wanted, keep, plugins)
            with Index(partial, store, device=device) as index:
                summary = _filled(index, store, sources, keep, adding)
            rename_whole(partial, target, replace=replace, taken=_exists(target))
        except Exception:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return dataclasses.replace(summary, path=target, seconds=time.monotonic() - began)


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
        raise StoreError(f"{output} is not an index, so --replace does not touch it. Choose another name.")


def _exists(output: Path) -> StoreError:
    return StoreError(
        f"{output} exists already. Choose another name, or pass --replace (in Python replace=True) to put "
        "the new index there."
    )


def _refuse_backend(address: Address, backend: str, options: Mapping[str, Any] | None) -> None:
    if backend != "auto" or options:
        raise DataError(
            f"A back end and its parameters are of folders. What the store of {address} can be told stands in its address; 'retrieval "
            "plugins show' names it."
        )


def _wanted(backend: str, options: Mapping[str, Any] | None, plugins: Sequence[str]) -> Wanted:
    """Return which structure is meant; a misspelt name must not cost an hour first."""
    if backend != "auto":
        make_backend(backend, options or {}, plugins)
        return Wanted(short_name(backend), dict(options or {}))
    if options:
        raise DataError("Parameters of a back end need its name: pass --backend with --set.")
    return Wanted("auto", {})


def _taken(place: Address) -> StoreError:
    return StoreError(
        f"{place} exists already. Add to it with 'retrieval index add', choose another name, or pass --replace (in Python "
        "replace=True), which deletes it first."
    )


def _resumed(
    at: StorePlace, begun: Begun, bundle: Bundle, widths: Mapping[str, int], replace: bool
) -> Store | None:
    """Return the index at an address that an interrupted run of the same work has begun; None where there is none, or one that is replaced.

    Raises:
        StoreError: there is another one, which is not to be replaced.
    """
    if begun.identity is not None and at.exists():
        store = at.open()
        try:
            served = next(one for one in store.generations() if one.state == "served")
            found = (store.identity(), served.bundle, served.variant, dict(served.widths))
        except BaseException:
            store.close()
            raise
        if found == (begun.identity, bundle.sha256, bundle.variant, dict(widths)):
            return store
        store.close()
    if not replace and at.exists():
        raise _taken(at.address)
    return None


def _at(
    at: StorePlace,
    begun: Begun,
    store: Store | None,
    bundle: Bundle,
    widths: Mapping[str, int],
    sources: StrPath | Sequence[StrPath],
    keep: Keep,
    adding: Mapping[str, Any],
    device: Device,
) -> Summary:
    """Create an index at an address, or go on with one, and add what sources name; where that fails, nothing is left."""
    named = [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    if store is None:
        at.drop()
        begun.note(identity := str(uuid.uuid4()))
        store = at.create(bundle, widths, identity=identity)
    try:
        try:
            index = Index(at.address, store, device=device)
        except BaseException:
            store.close()
            raise
        with index:
            before = len(index)
            added = add_sources(index, named, keep=keep, whole=True, **adding) if named else Added()
            count = len(index)
    except StoreUnavailable:
        raise  # nothing can be deleted now either: the same call goes on
    except Exception:
        at.drop()
        begun.forget()
        raise
    begun.forget()
    return Summary(
        at.address, count, added.skipped, added.repeated, before, at.address.scheme, None, 0.0, added.left_out
    )


def _filled(
    index: Index,
    store: LocalStore,
    sources: StrPath | Sequence[StrPath],
    keep: Keep,
    adding: Mapping[str, Any],
) -> Summary:
    """Add what sources name, and make one segment of it."""
    named = [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    before = len(index)
    added = add_sources(index, named, keep=keep, whole=True, sync=True, **adding) if named else Added()
    with Meter("indexing", len(index), "items") as meter:
        store.compact(lambda done, total: meter.reach(done, total, "indexing"))
    name, recall = store.recall()
    return Summary(
        index.path, len(index), added.skipped, added.repeated, before, name, recall, 0.0, added.left_out
    )


def _begun(
    partial: Path,
    bundle: Bundle,
    widths: Mapping[str, int],
    wanted: Wanted,
    keep: Keep,
    plugins: Sequence[str],
) -> LocalStore:
    """Return the store of an interrupted run of the same work, or an empty one."""
    with suppress(StoreError, OSError):
        store = LocalStore(partial, plugins=plugins, upkeep=False)
        served = next(one for one in store.generations() if one.state == "served")
        begun = (served.bundle, served.variant, dict(served.widths), store.wanted())
        if begun == (bundle.sha256, bundle.variant, dict(widths), wanted):
            return store
        store.close()
    if partial.is_dir():
        shutil.rmtree(partial)
    else:
        partial.unlink(missing_ok=True)
    create_local(partial, bundle, widths, structure=wanted, keep=keep)
    return LocalStore(partial, plugins=plugins, upkeep=False)


class Begun:
    """The note, in the user's data folder, that an index at an address was begun here and is not finished: the same command goes on.

    Where nothing can be noted, an interrupted creation is finished by adding.

    Args:
        address: of the index.
    """

    def __init__(self, address: Address) -> None:
        import platformdirs

        name = hashlib.sha256(str(address).encode()).hexdigest()[:32]
        folder = os.environ.get("RETRIEVAL_DATA") or platformdirs.user_data_dir("retrieval")
        self._path = Path(folder) / "begun" / name

    @property
    def identity(self) -> str | None:
        """What tells the index from every other; None where none was begun, or it is finished."""
        with suppress(OSError, UnicodeDecodeError), self._path.open("rb") as file:
            return file.read(_IDENTITY_BYTES).decode() or None
        return None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep out every other process of this machine that creates an index at this address.

        Raises:
            StoreError: there is one.
        """
        with ExitStack() as held:
            with suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                held.enter_context(hold(self._path, "creating this index", StoreError))
            yield

    def note(self, identity: str) -> None:
        """Note that an index is about to be made."""
        with suppress(OSError):
            write_bytes(self._path, identity.encode(), private=True)

    def forget(self) -> None:
        """Note that it is finished, or gone."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
