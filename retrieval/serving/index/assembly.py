"""The folder of an index, put together from what was encoded: arrays, items, back ends, manifest, checksums."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.serving.bundle import Bundle
from retrieval.serving.index.backends import choose, is_built_in, make_backend, short_name
from retrieval.serving.index.contract import Floats, using
from retrieval.serving.index.files import write_sums
from retrieval.serving.index.items import Item, write_items
from retrieval.serving.index.journal import Journal
from retrieval.serving.index.manifest import BackendRecord, BundleRecord, IndexManifest, PartRecord
from retrieval.serving.index.origins import Sources
from retrieval.serving.index.recall import recall_at_10
from retrieval.serving.progress import Meter


def assemble(
    journal: Journal,
    bundle: Bundle,
    sources: Sources,
    backend: str,
    options: Mapping[str, Any],
    plugins: Sequence[str],
) -> IndexManifest:
    """Write the finished folder `index` inside the journal's, which then holds no bundle any more; return its manifest.

    Raises:
        StoreError: what the journal wrote reads differently.
        PluginError: the back end fails.
    """
    folder = journal.folder / "index"
    shutil.rmtree(folder, ignore_errors=True)  # an earlier run was stopped just here
    folder.mkdir()
    journal.write_array("vectors", folder / "vectors.npy")
    if "codes" in journal.widths:
        journal.write_array("codes", folder / "codes.npy")
    vectors = np.load(folder / "vectors.npy", mmap_mode="r", allow_pickle=False)
    write_items(folder / "items.sqlite", _kept(sources, journal))
    spaces = bundle.manifest.subspaces
    spans = [(space.start, space.stop) for space in spaces] or [(0, vectors.shape[1])]
    widest = max(stop - start for start, stop in spans)
    name = choose(len(vectors), widest) if backend == "auto" else short_name(backend)
    parts, recall = _build_parts(folder, vectors, spans, name, options, plugins)
    (journal.folder / "bundle").rename(folder / "bundle")
    manifest = IndexManifest(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        bundle=BundleRecord(name=bundle.manifest.name, sha256=bundle.sha256, variant=bundle.variant),
        backend=BackendRecord(name=name, options=dict(options)),
        parts=parts,
        count=len(vectors),
        vector=vectors.shape[1],
        code=journal.widths.get("codes"),
        recall_at_10=recall,
    )
    (folder / "index.json").write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    stored = [vectors]
    if "codes" in journal.widths:
        stored.append(np.load(folder / "codes.npy", mmap_mode="r", allow_pickle=False))
    journal.verify(stored)
    write_sums(folder)
    return manifest


def _kept(sources: Sources, journal: Journal) -> list[Item]:
    """Return what the index keeps of each item that was encoded."""
    return [
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


def _build_parts(
    folder: Path,
    vectors: Floats,
    spans: Sequence[tuple[int, int]],
    name: str,
    options: Mapping[str, Any],
    plugins: Sequence[str],
) -> tuple[tuple[PartRecord, ...], float | None]:
    """Build and save a back end for each span of the vectors' columns.

    Returns:
        Their records, and the lowest recall at 10 of those that are approximate.
    """
    ending = "faiss" if is_built_in(name) else "index"
    parts, recalls = [], []
    for number, (start, stop) in enumerate(spans):
        file = f"vectors.{number}.{ending}" if len(spans) > 1 else f"vectors.{ending}"
        made = make_backend(name, options, plugins)
        columns = np.ascontiguousarray(vectors[:, start:stop])
        with Meter("indexing", len(columns), "items") as meter, using(name, "build"):
            made.build(columns, meter.update)
        with using(name, "save"):
            made.save(folder / file)
        parts.append(PartRecord(file=file, start=start, stop=stop))
        if not made.exact:
            recalls.append(recall_at_10(made, name, columns))
    return tuple(parts), min(recalls) if recalls else None
