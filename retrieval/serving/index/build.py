"""Build an index folder: encode, index, and put it in place whole."""

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
from retrieval.serving.index.base import Index
from retrieval.serving.index.built import remember
from retrieval.serving.index.encoding import Encoding
from retrieval.serving.index.files import SUMS, put_in_place, refuse_existing, storage_errors
from retrieval.serving.index.journal import Journal
from retrieval.serving.index.open import open_index
from retrieval.serving.index.sources import collect
from retrieval.serving.index.summary import Summary
from retrieval.serving.manifest import sha256_of
from retrieval.serving.progress import Progress, shown
from retrieval.serving.sessions import Device


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
    """Encode items and write an index folder, whole or not at all.

    An interrupted run leaves `<output>.partial`; the same call goes on from there. A failed one leaves nothing.

    Args:
        bundle: a bundle, or its folder.
        sources: one or more files, folders, CSV manifests, or `.npz` features; see `retrieval.serving.index.sources.collect`.
        output: the folder to write; its parent must exist.
        backend: "auto" (by size), "flat", "hnsw", "ivf", or a plugin's `PLUGIN.name`.
        options: the back end's parameters.
        plugins: files or modules to load as plugins besides the installed ones.
        variant: encode with this variant of the encoder; queries will be, too.
        skip_bad: leave out images that cannot be used, each reported on standard error, instead of refusing all.
        replace: put the new index in the place of one that is there.
        batch: items that go through the encoder at once.
        workers: threads that decode; as many as there are cores by default.
        limits: the largest images that are decoded.
        progress: True shows a bar, False nothing; a function is told (what, done, total).
        device: of the encoder: "auto", "cpu" or "cuda".
        signed_by: a public key's file; a bundle that its holder did not sign is refused.

    Raises:
        DataError: no items, or images that cannot be used: all are found, the first ten named.
        StoreError: the output exists, another process is building it, or it cannot be written.
        BundleError: the bundle cannot be used.
        PluginError: the back end does not exist, or refuses its parameters.
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
        len(found.items) - manifest.count,
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
) -> Index:
    """Encode items, write an index folder, whole or not at all, and open it.

    An interrupted run leaves `<output>.partial`; the same call goes on from there. A failed one leaves nothing.

    Args:
        bundle: a bundle, or its folder.
        sources: one or more files, folders, CSV manifests, or `.npz` features; see `retrieval.serving.index.sources.collect`.
        output: the folder to write; its parent must exist.
        backend: "auto" (by size), "flat", "hnsw", "ivf", or a plugin's `PLUGIN.name`.
        options: the back end's parameters.
        plugins: files or modules to load as plugins besides the installed ones.
        variant: encode with this variant of the encoder; queries will be, too.
        skip_bad: leave out images that cannot be used, each reported on standard error, instead of refusing all.
        replace: put the new index in the place of one that is there.
        batch: items that go through the encoder at once.
        workers: threads that decode; as many as there are cores by default.
        limits: the largest images that are decoded.
        progress: True shows a bar, False nothing; a function is told (what, done, total).
        device: of the encoder: "auto", "cpu" or "cuda".
        signed_by: a public key's file; a bundle that its holder did not sign is refused.

    Returns:
        The index. Its `summary` says what was done.

    Raises:
        DataError: no items, or images that cannot be used: all are found, the first ten named.
        StoreError: the output exists, another process is building it, or it cannot be written.
        BundleError: the bundle cannot be used.
        PluginError: the back end does not exist, or refuses its parameters.
    """
    summary = write_index(
        bundle,
        sources,
        output,
        backend=backend,
        options=options,
        plugins=plugins,
        variant=variant,
        skip_bad=skip_bad,
        replace=replace,
        batch=batch,
        workers=workers,
        limits=limits,
        progress=progress,
        device=device,
        signed_by=signed_by,
    )
    index = open_index(summary.path, device=device, plugins=plugins)
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
