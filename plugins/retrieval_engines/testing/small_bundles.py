"""Small real bundles for tests, which are written on first use."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from retrieval.bundle.bundle import Bundle
from retrieval.bundle.manifest import (
    DistanceEntry,
    Input,
    Manifest,
    RescorerEntry,
    SubspaceEntry,
    Verified,
    write_manifest,
)

FEATURES = 8
WIDTH = 12


def make_bundle(
    folder: Path,
    *,
    width: int = WIDTH,
    features: int = FEATURES,
    rescorer: bool = False,
    subspaces: bool = False,
    seed: int = 0,
) -> Path:
    """Write a bundle that projects features with a random integer matrix.

    Args:
        folder: the new folder.
        width: width of the vectors.
        features: width of the encoder's input.
        rescorer: whether the bundle has codes, as wide as the vectors, and a rescorer that sorts
            candidates by Manhattan distance.
        subspaces: whether the vectors have two sub-spaces.
        seed: seed of the matrix; different seeds give different bundles.

    Returns:
        The folder.
    """
    from onnx import TensorProto, helper

    folder.mkdir(parents=True)
    projection = np.random.default_rng(seed).integers(-9, 10, (features, width)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["input", "projection"], ["vector"])]
    names = ["vector"]
    code = None
    rescorer_entry = None
    distance = DistanceEntry(name="euclidean", exact=not subspaces, measure="euclidean")
    if rescorer:
        nodes.append(helper.make_node("Identity", ["vector"], ["code"]))
        names.append("code")
        code = width
        rescorer_entry = RescorerEntry(file="rescorer.onnx", candidates=50)
        distance = DistanceEntry(name="manhattan", exact=False, measure="euclidean")
        write_rescorer(folder / "rescorer.onnx", width)
    entries: tuple[SubspaceEntry, ...] = ()
    if subspaces:
        entries = (
            SubspaceEntry(name="left", start=0, stop=width // 3),
            SubspaceEntry(name="right", start=width // 3, stop=width),
        )
    graph_input = helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", features])
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", width]) for name in names
    ]
    save_graph(folder / "encoder.onnx", nodes, [graph_input], outputs, {"projection": projection})
    manifest = Manifest(
        name=f"test {seed}",
        created="2025-01-01T00:00:00+00:00",
        versions={},
        opset=17,
        input=Input(kind="features", dtype="float32", shape=(features,), preprocessing=None),
        vector=width,
        code=code,
        query_vectors=False,
        normalized=False,
        distance=distance,
        subspaces=entries,
        rescorer=rescorer_entry,
        variants={},
        verified=Verified(tolerance=1e-4, largest_difference=0.0, items=1),
    )
    write_manifest(folder, manifest)
    return folder


def linear_head(width: int = WIDTH, outputs: int = WIDTH, seed: int = 0) -> bytes:
    """Return the graph of an adapter that multiplies vectors with a random integer matrix."""
    from onnx import TensorProto, helper

    matrix = np.random.default_rng(seed).integers(-9, 10, (width, outputs)).astype(np.float32)
    graph_input = helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", width])
    output = helper.make_tensor_value_info("vector", TensorProto.FLOAT, ["N", outputs])
    nodes = [helper.make_node("MatMul", ["input", "matrix"], ["vector"])]
    return graph_bytes(nodes, [graph_input], [output], {"matrix": matrix})


@cache
def shared_bundle(**options: Any) -> Bundle:
    """Return an open bundle that all tests of this process share; see `make_bundle`."""
    folder = _home() / f"bundle-{len(list(_home().iterdir()))}"
    return Bundle.open(make_bundle(folder, **options), threads=1, device="cpu")


@cache
def _home() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="bundles-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def write_rescorer(path: Path, width: int) -> None:
    """Write a rescorer that computes the Manhattan distance between codes (width,)."""
    from onnx import TensorProto, helper

    query = helper.make_tensor_value_info("query", TensorProto.FLOAT, ["Q", width])
    items = helper.make_tensor_value_info("items", TensorProto.FLOAT, ["N", width])
    distance = helper.make_tensor_value_info("distance", TensorProto.FLOAT, ["Q", "N"])
    nodes = [
        helper.make_node("Unsqueeze", ["query", "one"], ["q"]),
        helper.make_node("Unsqueeze", ["items", "zero"], ["i"]),
        helper.make_node("Sub", ["q", "i"], ["difference"]),
        helper.make_node("Abs", ["difference"], ["absolute"]),
        helper.make_node("ReduceSum", ["absolute", "two"], ["distance"], keepdims=0),
    ]
    axes = {name: np.array([axis]) for name, axis in (("zero", 0), ("one", 1), ("two", 2))}
    save_graph(path, nodes, [query, items], [distance], axes)


def save_graph(
    path: Path,
    nodes: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    constants: Mapping[str, Any],
) -> None:
    """Check an ONNX graph of opset 17 and write it to a file."""
    path.write_bytes(graph_bytes(nodes, inputs, outputs, constants))


def graph_bytes(
    nodes: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    constants: Mapping[str, Any],
) -> bytes:
    """Check an ONNX graph of opset 17 and return its file's content."""
    import onnx
    from onnx import helper, numpy_helper

    initialisers = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initialisers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content
