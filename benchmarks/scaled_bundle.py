"""A bundle whose encoder costs nothing, and an index of given vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from retrieval.bundle.bundle import Bundle
from retrieval.bundle.manifest import DistanceEntry, Input, Manifest, Verified, write_manifest
from retrieval.store.contract import Item
from retrieval.store.folder import create_local
from retrieval.store.local import LocalStore
from retrieval.store.search_structure import StructureChoice

from retrieval_engines.testing.small_bundles import save_graph


def make_bundle(folder: Path, width: int, scale: float) -> None:
    """Write a bundle whose encoder multiplies features by a number."""
    folder.mkdir()
    source, out = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", width])
        for n in ("input", "vector")
    )
    nodes = [helper.make_node("Mul", ["input", "scale"], ["vector"])]
    constants = {"scale": np.float32(scale)}
    save_graph(folder / "encoder.onnx", nodes, [source], [out], constants)
    manifest = Manifest(
        name="scaled",
        created="2025-01-01T00:00:00+00:00",
        versions={"onnx": onnx.__version__},
        opset=17,
        input=Input(kind="features", dtype="float32", shape=(width,)),
        vector=width,
        normalized=False,
        distance=DistanceEntry(name="Euclidean", exact=True),
        verified=Verified(tolerance=1e-4, largest_difference=0.0, items=1),
    )
    write_manifest(folder, manifest)


def make_index(folder: Path, bundle: Path, vectors: Any, structure: str = "flat") -> None:
    """Create an index of vectors (N, D), with row numbers as ids and ten labels."""
    opened, widths = Bundle.open(bundle, threads=1), {"vector": vectors.shape[1]}
    create_local(folder, opened, widths, structure=StructureChoice(structure), replace=True)
    with LocalStore(folder, upkeep=False) as store:
        for start in range(0, len(vectors), 5000):
            rows = enumerate(vectors[start : start + 5000], start)
            items = [Item(f"{n:07}", str(n % 10), arrays={"vector": row}) for n, row in rows]
            store.upsert(items, opened.sha256)
        store.compact()
