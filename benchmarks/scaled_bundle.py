"""A bundle whose encoder costs nothing, for benchmarks of what lies behind it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper
from retrieval.serving.manifest import DistanceEntry, Input, Manifest, Verified, write_manifest
from retrieval.serving.store.testing.bundles import save_graph


def make_bundle(folder: Path, width: int, scale: float) -> None:
    """Write a bundle whose encoder multiplies features by a number."""
    folder.mkdir()
    given, out = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", width])
        for n in ("input", "vector")
    )
    nodes = [helper.make_node("Mul", ["input", "scale"], ["vector"])]
    constants = {"scale": np.float32(scale)}
    save_graph(folder / "encoder.onnx", nodes, [given], [out], constants)
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
