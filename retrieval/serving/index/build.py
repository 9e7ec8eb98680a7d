"""Build an index: a living one, or a folder of format 1, in which nothing changes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from retrieval.errors import DataError, StoreError, at_least_one
from retrieval.serving.bundle import Bundle
from retrieval.serving.files.locks import hold
from retrieval.serving.files.places import StrPath
from retrieval.serving.images import Limits
from retrieval.serving.index.assembly import assemble
from retrieval.serving.index.backends import make_backend
from retrieval.serving.index.built import remember
from retrieval.serving.index.creating import create_index
from retrieval.serving.index.encoding import Encoding
from retrieval.serving.index.files import SUMS, put_in_place, refuse_existing, storage_errors
from retrieval.serving.index.journal import Journal
from retrieval.serving.index.living import LivingIndex
from retrieval.serving.index.sources import collect
from retrieval.serving.index.summary import Summary
from retrieval.serving.manifest import sha256_of
from retrieval.serving.progress import Progress, shown
from retrieval.serving.providers import Device
from retrieval.serving.store.address import Address
from retrieval.serving.store.contract import Keep


@shown
def write_index(
    bundle: StrPath | Bundle,
    sources: StrPath | Sequence[StrPath],
    output: StrPath,
    *,
    backend: str = "auto",
    options: Mapping[str, Any] | None = None,
    plugins: Sequence[str] = (),
    variant: str | None = None,
    skip_bad: bool = False,
    replace: bool = False,
    batch: int = 32,
    workers: int | None = None,
    limits: Limits | None = None,
    progress: Progress = True,
    device: Device = "auto",
    signed_by: StrPath | None = None,
) -> Summary:
    """Encode items and write a folder of format 1, which never changes and can be signed, whole or not at all.

    An interrupted run leaves `<output>.partial`; the same call goes on from there. A failed one leaves nothing. The arguments and
    errors are those of `build_index`; without any item it is refused.
    """
    began = time.monotonic()
    batch = at_least_one("batch", batch)
    target = Path(output).absolute()
    refuse_existing(target, replace)
    if backend != "auto":
        make_backend(backend, options or {}, plugins)  # a misspelt name must not cost an hour first
    elif options:
        raise DataError("Parameters of a back end need its name: pass --backend with --set.")
    opened = (
        bundle
        if isinstance(bundle, Bundle)
        else Bundle.open(bundle, variant=variant, device=device, signed_by=signed_by)
    )
    named = [sources] if isinstance(sources, str | os.PathLike) else sources
    found = collect(named, opened.manifest.input.kind)
    work = Encoding(opened, found, batch, workers or os.cpu_count() or 1, limits or Limits(), skip_bad)
    with hold(target, "building this index", StoreError), storage_errors(target):
        refuse_existing(target, replace)  # again: who held it until now may have made it
        journal = work.journal(target.with_name(f"{target.name}.partial"))
        resumed = len(journal.done)
        with _kept_when_interrupted(journal):
            opened.copy(journal.folder / "bundle")  # now: hours later it may be another one
            work.encode(journal)
            manifest = assemble(journal, opened, found, backend, options or {}, plugins)
            made = sha256_of(journal.folder / "index" / SUMS)
            put_in_place(journal.folder / "index", target, replace=replace)
            remember(made)
    return Summary(
        target,
        manifest.count,
        tuple(done.fault for done in journal.done if done.fault is not None),
        found.repeated,
        resumed,
        manifest.backend.name,
        manifest.recall_at_10,
        time.monotonic() - began,
        found.left_out,
    )


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
    signed_by: StrPath | None = None,
) -> LivingIndex:
    """Embed items, create a living index of them, whole or not at all, and open it.

    An interrupted run leaves `<output>.partial`; the same call goes on from there. At an address it leaves the index with what was added
    until then, and `LivingIndex.add` goes on. A failed run leaves nothing.

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
        keep_features: keep the backbone's features too, so that another head takes seconds (`LivingIndex.migrate`). The bundle is
            split, or takes features.
        skip_bad: leave out images that cannot be used, each reported on standard error, instead of refusing all.
        replace: put the new index in the place of one that is there; at an address that is deleted first.
        batch: items that go through the encoder at once.
        workers: threads that decode; as many as there are cores by default.
        limits: the largest images that are decoded.
        progress: True shows a bar, False nothing; a function is told (what, done, total).
        device: of the encoder: "auto", "cpu" or "cuda".
        signed_by: a public key's file; a bundle that its holder did not sign is refused.

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
        signed_by=signed_by,
    )
    index = LivingIndex.open(summary.path, device=device, plugins=plugins)
    index.summary = summary
    return index


@contextmanager
def _kept_when_interrupted(journal: Journal) -> Iterator[None]:
    """Remove a journal when the work is done or has failed; keep what is done when it is interrupted."""
    try:
        yield
    except Exception:
        journal.remove()
        raise
    except BaseException:
        journal.sync()
        journal.close()
        raise
    journal.remove()
