"""A bundle whose encoder costs nothing, for benchmarks of what lies behind it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from retrieval.serving.manifest import DistanceEntry, Input, Manifest, Verified, write_manifest


def make_bundle(folder: Path, width: int, scale: float) -> None:
    """Write a bundle whose encoder multiplies features by a number."""
    folder.mkdir()
    given, out = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", width])
        for n in ("input", "vector")
    )
    nodes = [helper.make_node("Mul", ["input", "scale"], ["vector"])]
    held = [numpy_helper.from_array(np.float32(scale), "scale")]
    graph = helper.make_graph(nodes, "graph", [given], [out], held)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9),
        folder / "encoder.onnx",
    )
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
