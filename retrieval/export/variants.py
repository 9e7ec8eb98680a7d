"""Variants of the encoder in float16 or int8, and their drift on real items."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx

from retrieval.base.arrays import Array, Floats32, Floats64, Ints
from retrieval.bundle.distances import merged_distances
from retrieval.bundle.manifest import Cosine, Recall, Variant
from retrieval.errors import BundleError
from retrieval.model.contracts import Combiner
from retrieval.model.graph import fault_line, quiet

VariantName = Literal["fp16", "int8"]

_HEAVY = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
"""Operators that int8 speeds up; nodes before the first of them and after the last stay float32."""

_CALIBRATION_BATCH = 8

DRIFT = Cosine(mean=0.99, min=0.9)
"""Lowest cosines allowed between a variant's vectors and the encoder's: on average and at worst."""

SCORED = 10
"""Default number of results of a search, on which the order depends with merge "score"."""


def make_variant(
    name: VariantName, encoder: bytes, calibration: Array | None, scratch: Path
) -> tuple[bytes, list[bytes]]:
    """Return a variant of a graph, and graphs that emulate its precision on other devices."""
    proto = onnx.load_from_string(encoder)
    if name == "fp16":
        return make_fp16(proto).SerializeToString(), [rounded_to_float16(proto).SerializeToString()]
    assert calibration is not None
    return make_int8(proto, calibration, scratch).SerializeToString(), []


def make_fp16(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy with float16 weights and arithmetic, and the same inputs and (float32) outputs.

    The copy has half the size and is faster on devices with float16 units, but not on a CPU, which
    converts to float32 and back. Nodes that normalise to unit length or preprocess pixels stay
    float32.

    Raises:
        BundleError: the graph cannot be converted.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    light = light_ends(copy)
    try:
        with quiet():
            from onnxruntime.transformers.float16 import (
                DEFAULT_OP_BLOCK_LIST,
                convert_float_to_float16,
            )

            converted: onnx.ModelProto = convert_float_to_float16(
                copy,
                keep_io_types=True,
                op_block_list=[*DEFAULT_OP_BLOCK_LIST],
                node_block_list=sorted(light),
            )
            return tidy_graph(converted)
    except Exception as fault:  # the converter raises ValueError, RuntimeError, protobuf's errors
        raise BundleError(f"The fp16 variant cannot be made: {fault_line(fault)}") from fault


def tidy_graph(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a converted graph in topological order, without superfluous casts.

    For a value with several readers, the converter adds several casts of one name; it appends all
    casts at the end. It also passes values between two float32 nodes through float16, where a
    length above 65,504 becomes infinity.
    """
    from onnxruntime.transformers.onnx_model import OnnxModel

    graph = proto.graph
    del graph.value_info[:]
    single = onnx.TensorProto.FLOAT
    # casts of one name are equal, so one of them stays
    nodes = list({tuple(node.output): node for node in graph.node}.values())
    narrowed: dict[str, str] = {}
    wide = {v.name for v in graph.input if v.type.tensor_type.elem_type == single}
    for node in nodes:
        if _casts_to(node, onnx.TensorProto.FLOAT16):
            narrowed[node.output[0]] = node.input[0]
        if _casts_to(node, single):
            wide.update(node.output)
    wide |= {name for name in narrowed.values() if name.endswith("_cast_to_fp16")}
    for node in nodes:
        if not _casts_to(node, single):
            continue
        source = narrowed.get(node.input[0])
        if source is not None and source in wide:
            node.CopyFrom(onnx.helper.make_node("Identity", [source], list(node.output), node.name))
    outputs = {value.name for value in graph.output}
    used = outputs | {name for node in nodes for name in node.input}
    graph.ClearField("node")
    graph.node.extend(node for node in nodes if used.intersection(node.output))
    OnnxModel.graph_topological_sort(graph)
    return proto


def _casts_to(node: onnx.NodeProto, kind: int) -> bool:
    return node.op_type == "Cast" and any(a.name == "to" and a.i == kind for a in node.attribute)


def rounded_to_float16(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a float32 graph that rounds to float16 wherever `make_fp16` uses float16.

    On a CPU, ONNX Runtime keeps float32 between layers without float16 kernels, so the variant
    itself does not show the rounding and overflow of a device with float16 units. This graph does.
    """
    copy = onnx.shape_inference.infer_shapes(proto)
    light = light_ends(copy)
    single = onnx.TensorProto.FLOAT
    floats = {v.name for v in copy.graph.value_info if v.type.tensor_type.elem_type == single}
    unrounded = {name for node in copy.graph.node if node.name in light for name in node.input}
    for tensor in copy.graph.initializer:
        if tensor.data_type == single and tensor.name not in unrounded:
            # a weight beyond float16 becomes infinity, as on the device
            with np.errstate(over="ignore"):
                values = onnx.numpy_helper.to_array(tensor).astype(np.float16).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    nodes = []
    for node in copy.graph.node:
        nodes.append(node)
        if node.name in light or node.op_type == "Constant":
            continue
        for number, name in enumerate(node.output):
            if name in floats:
                # readers keep the name, and get the value rounded to float16 and back
                wide = f"{name}_float32"
                narrow = f"{name}_float16"
                node.output[number] = wide
                half = onnx.TensorProto.FLOAT16
                nodes.append(onnx.helper.make_node("Cast", [wide], [narrow], to=half))
                nodes.append(onnx.helper.make_node("Cast", [narrow], [name], to=single))
    copy.graph.ClearField("node")
    copy.graph.node.extend(nodes)
    return copy


def make_int8(proto: onnx.ModelProto, calibration: Array, scratch: Path) -> onnx.ModelProto:
    """Return the graph statically quantised to int8.

    Weights are signed and quantised per channel. Activations are unsigned and quantised by their
    ranges on the calibration items. With signed activations ONNX Runtime leaves a third of
    EfficientNet-Lite0's layers unfused and is hardly faster (13.1 ms of CPU time; float32 takes
    13.8 ms, unsigned 8.2 ms).

    Args:
        proto: the encoder.
        calibration: (N, …), raw training items. With held-out items, the drift that is measured on
            held-out items would come out too small.
        scratch: a folder for temporary files.
    """
    if not any(node.op_type in _HEAVY for node in proto.graph.node):
        raise BundleError(
            "The int8 variant cannot be made: the encoder has no convolution or linear layer."
        )
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".int8-") as folder, quiet():
        names = ("source.onnx", "prepared.onnx", "int8.onnx")
        source, prepared, target = (Path(folder, name) for name in names)
        try:
            from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
            from onnxruntime.quantization.shape_inference import quant_pre_process

            batches = (
                {"input": np.ascontiguousarray(calibration[start : start + _CALIBRATION_BATCH])}
                for start in range(0, len(calibration), _CALIBRATION_BATCH)
            )

            class Reader(CalibrationDataReader):
                """Yields the calibration items in batches."""

                def get_next(self) -> dict[str, Array] | None:
                    return next(batches, None)

            source.write_bytes(proto.SerializeToString())
            quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
            quantize_static(
                str(prepared),
                str(target),
                Reader(),
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                # Processors without VNNI add two 8-bit products in 16 bits, which can saturate.
                # With 7-bit weights the sum fits, so that all processors agree.
                reduce_range=True,
                nodes_to_exclude=sorted(kept_float32(onnx.load(prepared))),
            )
            return onnx.load(target)
        except OSError:  # a full disk; whoever writes the bundle says so
            raise
        except Exception as fault:  # ONNX Runtime's tools raise many types of errors
            raise BundleError(f"The int8 variant cannot be made: {fault_line(fault)}") from fault


def kept_float32(proto: onnx.ModelProto) -> set[str]:
    """Return the names of nodes that int8 keeps in float32: the light ends, and a linear head.

    A head costs little time, and no later layer averages out its rounding. On a small convolutional
    net (digits, unseen classes), a float32 head raised the mean cosine from 0.9991 to 0.9997.
    """
    heavy = [node for node in proto.graph.node if node.op_type in _HEAVY]
    names = light_ends(proto)
    if len(heavy) > 1 and heavy[-1].op_type in {"Gemm", "MatMul"}:
        names.add(heavy[-1].name)
    return names


def light_ends(proto: onnx.ModelProto) -> set[str]:
    """Return the names of the nodes before the first heavy layer and after the last.

    Nodes without a name get one.
    """
    nodes = list(proto.graph.node)  # ONNX lists nodes in topological order
    for number, node in enumerate(nodes):
        node.name = node.name or f"{node.op_type}_{number}"

    def light(nodes: Sequence[onnx.NodeProto], source: str, target: str) -> set[str]:
        heavy: set[str] = set()  # values on the far side of a heavy layer
        names = set()
        for node in nodes:
            if node.op_type in _HEAVY or heavy.intersection(getattr(node, source)):
                heavy.update(getattr(node, target))
            else:
                names.add(node.name)
        return names

    return light(nodes, "input", "output") | light(nodes[::-1], "output", "input")


def measure(
    file: str,
    before: Mapping[str, Floats32],
    afters: Sequence[Mapping[str, Floats32]],
    labels: Array | None,
    rescore: Callable[[Floats32, Floats32], Floats32] | None,
    combiner: Combiner | None,
) -> Variant:
    """Return a variant's drift: cosine to the encoder's vectors, and Recall@1 of both.

    Args:
        file: the variant's file.
        before: the encoder's outputs.
        afters: the outputs of the variant and of the graphs that emulate it. Those with the lowest
            cosine are measured.
        labels: (N,), or `None` to leave out Recall@1.
        rescore: the rescorer, from codes (Q, C) and (N, C) to distances (Q, N), if the bundle has
            one.
        combiner: the model's combiner.

    Raises:
        BundleError: the variant returns NaN or infinity.
    """
    for after in afters:
        for name, values in after.items():
            if not np.isfinite(values).all():
                raise BundleError(
                    f"{file} gives NaN or infinity in '{name}': the model's numbers do not fit this"
                    " precision. Leave this variant out."
                )
    cosines = [row_cosine(before["vector"], after["vector"]) for after in afters]
    lowest = int(np.argmin([cosine.min() for cosine in cosines]))
    cosine = cosines[lowest]
    worst = afters[lowest]
    recall = None
    if labels is not None:
        _, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
        # an item alone in its class has nothing to find
        queries = counts[classes] > 1
        if queries.any():
            shares = []
            for outputs in (before, worst):
                right = classes[nearest_items(outputs, rescore, combiner)] == classes
                shares.append(float(right[queries].mean()))
            recall = Recall(before=shares[0], after=shares[1])
    drift = Cosine(mean=float(cosine.mean()), min=float(cosine.min()))
    return Variant(file=file, cosine=drift, recall_at_1=recall)


def check_drift(name: str, variant: Variant) -> None:
    """Refuse a variant whose vectors are too far from the encoder's."""
    cosine = variant.cosine
    if cosine.mean < DRIFT.mean or cosine.min < DRIFT.min:
        raise BundleError(
            f"The {name} variant drifts too far: the cosine of its vectors to the encoder's is"
            f" {cosine.mean:.3f} on average and {cosine.min:.3f} at worst on held-out items;"
            f" at least {DRIFT.mean:g} and {DRIFT.min:g} are required. Leave this variant out, or"
            " write it anyway with --allow-drift (in Python allow_drift=True)."
        )


def row_cosine(a: Floats32, b: Floats32) -> Floats64:
    """Return the cosines (N,) between rows of `a` and of `b`; 1 if both rows are zero."""
    x = a.astype(np.float64)
    y = b.astype(np.float64)
    lengths = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    both_zero = ~x.any(axis=1) & ~y.any(axis=1)
    cosine: Floats64 = (x * y).sum(axis=1) / np.where(lengths == 0, 1.0, lengths)
    return np.where(both_zero, 1.0, cosine.clip(-1.0, 1.0))


def nearest_items(
    outputs: Mapping[str, Floats32],
    rescore: Callable[[Floats32, Floats32], Floats32] | None,
    combiner: Combiner | None,
) -> Ints:
    """Return the other item (N,) that a bundle ranks first for each item.

    With merge "score", the order is that of a list of `SCORED` results.
    """
    vectors = outputs["vector"]
    size = len(vectors)
    settings = combiner or Combiner
    subspaces: Any = settings.subspaces
    nearest = np.empty(size, np.int64)
    for row, query in enumerate(outputs.get("query", vectors)):
        # the item itself is not in the gallery: leaving it out later would change "score"
        gallery = np.delete(np.arange(size), row)
        if rescore is None:
            distances = merged_distances(query, vectors[gallery], SCORED, subspaces, settings.merge)
        else:
            distances = rescore(outputs["code"][row : row + 1], outputs["code"][gallery])[0]
        nearest[row] = gallery[distances.argmin()]
    return nearest
