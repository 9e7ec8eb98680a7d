"""Build an index folder: decode, encode, index, and put it in place whole."""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.bundle import Bundle, Device
from retrieval.errors import DataError, StoreError
from retrieval.images import Limits, decode
from retrieval.index.backends import built_in, choose, make_backend, using
from retrieval.index.built import remember
from retrieval.index.files import SUMS, put_in_place, refuse_existing, storage_errors, write_sums
from retrieval.index.items import Item, write_items
from retrieval.index.journal import Done, Journal
from retrieval.index.manifest import BackendRecord, BundleRecord, IndexManifest, PartRecord
from retrieval.index.recall import recall_at_10
from retrieval.index.sources import Source, Sources, collect
from retrieval.locks import hold
from retrieval.manifest import sha256_of
from retrieval.progress import Meter

_SHOWN = 10  # faults that a message spells out


@dataclass(frozen=True)
class Summary:
    """What `build_index` did.

    Attributes:
        path: the index.
        count: items in it.
        skipped: images that could not be used.
        repeated: files that were named more than once and taken once.
        left_out: a sentence on the files of folders that are no images, for each reason.
        resumed: items that an interrupted run had done already.
        backend: the back end's name, chosen or given.
        recall_at_10: of an approximate back end, else None.
        seconds: how long it took.
    """

    path: Path
    count: int
    skipped: int
    repeated: int
    resumed: int
    backend: str
    recall_at_10: float | None
    seconds: float
    left_out: tuple[str, ...] = ()


def build_index(
    bundle: str | os.PathLike[str] | Bundle,
    sources: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
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
    progress: bool = True,
    device: Device = "auto",
    signed_by: Path | None = None,
) -> Summary:
    """Encode items and write an index folder, whole or not at all.

    An interrupted run leaves `<output>.partial`; the same call goes on from there. A failed one leaves nothing.

    Args:
        bundle: a bundle, or its folder.
        sources: files, folders, CSV manifests, or `.npz` features; see `retrieval.index.sources.collect`.
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
        progress: show on standard error how far it is.
        device: of the encoder: "auto", "cpu" or "cuda".
        signed_by: a public key's file; a bundle that its holder did not sign is refused.

    Raises:
        DataError: no items, or images that cannot be used: all are found, the first ten named.
        StoreError: the output exists, another process is building it, or it cannot be written.
        BundleError: the bundle cannot be used.
        PluginError: the back end does not exist, or refuses its parameters.
    """
    began = time.monotonic()
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
    found = collect(sources, opened.manifest.input.kind)
    work = _Work(opened, found, batch, workers or os.cpu_count() or 1, limits or Limits(), skip_bad, progress)
    with hold(target, "building this index", StoreError), storage_errors(target):
        refuse_existing(target, replace)  # again: who held it until now may have made it
        journal = Journal(
            target.with_name(f"{target.name}.partial"),
            {
                "bundle": opened.sha256,
                "variant": opened.variant,
                "limits": [work.limits.pixels, work.limits.bytes],
            },
            work.widths(),
            [item.stamp() for item in found.items],
        )
        try:
            resumed = len(journal.done)
            opened.copy(journal.folder / "bundle")  # now: hours later it may be another one
            work.encode(journal)
            manifest = _assemble(journal, opened, found, backend, options or {}, plugins, progress)
            made = sha256_of(journal.folder / "index" / SUMS)
            put_in_place(journal.folder / "index", target, replace=replace)
            remember(made)
        except Exception:
            journal.remove()
            raise
        except BaseException:  # interrupted: what is done is kept
            journal.sync()
            journal.close()
            raise
        journal.remove()
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


@dataclass(frozen=True)
class _Decoded:
    """An encoder input (or None with a fault) and what is kept of the original."""

    done: Done
    pixels: NDArray[Any] | None


@dataclass(frozen=True)
class _Work:
    """Decoding in threads, encoding in batches."""

    bundle: Bundle
    sources: Sources
    batch: int
    workers: int
    limits: Limits
    skip_bad: bool
    progress: bool

    def widths(self) -> dict[str, int]:
        manifest = self.bundle.manifest
        codes = {"codes": manifest.code} if self.bundle.has_code and manifest.code else {}
        return {"vectors": manifest.vector, **codes}

    def encode(self, journal: Journal) -> None:
        """Work through the items that the journal does not have yet.

        Raises:
            DataError: images that cannot be used, without `skip_bad`; all of them were looked for.
        """
        items = self.sources.items
        faults: list[str] = []
        with Meter("encoding", len(items), "items", done=len(journal.done), show=self.progress) as meter:
            for entry in journal.done:
                self._report(entry, faults, meter)
            waiting: list[_Decoded] = []
            for decoded in self._decode(items[len(journal.done) :]):
                self._report(decoded.done, faults, meter)
                meter.update()
                if faults and not self.skip_bad:
                    continue  # nothing will be written: only look for all that is wrong
                waiting.append(decoded)
                if len(waiting) == self.batch:
                    self._flush(waiting, journal)
                    waiting = []
            if not (faults and not self.skip_bad):
                self._flush(waiting, journal)
        if faults and not self.skip_bad:
            more = f"\n  … and {len(faults) - _SHOWN:,} more" if len(faults) > _SHOWN else ""
            shown = "\n".join(f"  - {fault}" for fault in faults[:_SHOWN])
            raise DataError(
                f"{len(faults):,} of {len(items):,} items cannot be used:\n{shown}{more}\n"
                "Mend or remove them, or leave them out with --skip-bad. Nothing was written."
            )
        if len(faults) == len(items):
            raise DataError(f"None of the {len(items):,} items can be used. The first: {faults[0]}")
        journal.sync()

    def _report(self, entry: Done, faults: list[str], meter: Meter) -> None:
        if entry.fault is not None:
            faults.append(entry.fault)
            if self.skip_bad:
                meter.say(f"skipped: {entry.fault}")

    def _decode(self, items: Sequence[Source]) -> Iterator[_Decoded]:
        """Give decoded items in order, a few batches ahead of their use."""
        if self.sources.features is not None:
            yield from map(self._row, items)
            return
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="decode")
        try:
            ahead: deque[Future[_Decoded]] = deque()
            for item in items:
                ahead.append(pool.submit(self._image, item))
                if len(ahead) >= 2 * self.batch:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _image(self, item: Source) -> _Decoded:
        preprocessing = self.bundle.manifest.input.preprocessing
        assert preprocessing is not None
        stamp = item.stamp()
        name = os.fsencode(item.path).decode("utf-8", "backslashreplace")
        try:
            image = decode(item.path, self.limits, name)
            size = item.path.stat().st_size
            try:
                pixels = preprocessing(image)
            except DataError as fault:
                raise DataError(f"{name}: {fault}") from fault
        except DataError as fault:
            return _Decoded(Done(stamp, str(fault)), None)
        except OSError as fault:
            return _Decoded(Done(stamp, f"{name} cannot be read: {fault.strerror or fault}."), None)
        return _Decoded(Done(stamp, None, size, image.width, image.height), pixels)

    def _row(self, item: Source) -> _Decoded:
        assert self.sources.features is not None
        values = self.sources.features[item.row]
        if not np.isfinite(values).all():
            fault = f"{item.path}: vector {item.key} holds NaN, infinity or a number beyond float32."
            return _Decoded(Done(item.stamp(), fault), None)
        return _Decoded(Done(item.stamp()), values)

    def _flush(self, decoded: list[_Decoded], journal: Journal) -> None:
        if not decoded:
            return
        good = [one.pixels for one in decoded if one.pixels is not None]
        shape = (0, *self.bundle.manifest.input.shape)
        pixels = np.stack(good) if good else np.empty(shape, self.bundle.manifest.input.dtype)
        encoded = self.bundle.encode(pixels, batch=self.batch)
        arrays = {"vectors": encoded.vector}
        if encoded.code is not None:
            arrays["codes"] = encoded.code
        journal.append([one.done for one in decoded], arrays)


def _assemble(
    journal: Journal,
    bundle: Bundle,
    sources: Sources,
    backend: str,
    options: Mapping[str, Any],
    plugins: Sequence[str],
    progress: bool,
) -> IndexManifest:
    """Write the finished folder `index` inside the journal's."""
    folder = journal.folder / "index"
    shutil.rmtree(folder, ignore_errors=True)  # an earlier run was stopped just here
    folder.mkdir()
    journal.write_array("vectors", folder / "vectors.npy")
    if "codes" in journal.widths:
        journal.write_array("codes", folder / "codes.npy")
    vectors = np.load(folder / "vectors.npy", mmap_mode="r", allow_pickle=False)
    kept = [
        Item(
            item.key,
            item.label,
            item.metadata,
            None if item.row is not None else item.path,
            done.bytes,
            done.width,
            done.height,
        )
        for item, done in zip(sources.items, journal.done, strict=True)
        if done.fault is None
    ]
    write_items(folder / "items.sqlite", kept)
    spaces = bundle.manifest.subspaces
    spans = [(space.start, space.stop) for space in spaces] or [(0, vectors.shape[1])]
    name = backend if backend != "auto" else choose(len(vectors), max(stop - start for start, stop in spans))
    ending = "faiss" if name in built_in() else "index"
    parts, recalls = [], []
    for number, (start, stop) in enumerate(spans):
        file = f"vectors.{number}.{ending}" if len(spans) > 1 else f"vectors.{ending}"
        made = make_backend(name, options, plugins)
        columns = np.ascontiguousarray(vectors[:, start:stop])
        with Meter("indexing", len(columns), "items", show=progress) as meter, using(name, "build"):
            made.build(columns, meter.update)
        with using(name, "save"):
            made.save(folder / file)
        parts.append(PartRecord(file=file, start=start, stop=stop))
        if not made.exact:
            recalls.append(recall_at_10(made, name, columns))
    (journal.folder / "bundle").rename(folder / "bundle")
    manifest = IndexManifest(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        bundle=BundleRecord(name=bundle.manifest.name, sha256=bundle.sha256, variant=bundle.variant),
        backend=BackendRecord(name=name, options=dict(options)),
        parts=tuple(parts),
        count=len(vectors),
        vector=vectors.shape[1],
        code=journal.widths.get("codes"),
        recall_at_10=min(recalls) if recalls else None,
    )
    (folder / "index.json").write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    stored = [vectors]
    if "codes" in journal.widths:
        stored.append(np.load(folder / "codes.npy", mmap_mode="r", allow_pickle=False))
    journal.verify(stored)
    write_sums(folder)
    return manifest
