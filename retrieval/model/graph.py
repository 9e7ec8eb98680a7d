"""Export from torch to ONNX: the modules to export, the two exporters, and the clean graph."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import onnx
import torch
from torch import Tensor, nn

from retrieval.errors import BundleError
from retrieval.model.contracts import Combiner
from retrieval.model.input_reads import ONE_BATCH, TracedReads, refuse_reads
from retrieval.model.model import Model, evaluation_mode

Exporter = Literal["dynamo", "torchscript"]

# The opset that torch's exporter writes without conversion; needs ONNX Runtime 1.20 or later.
OPSET = 18

# Largest size of a protobuf file, in bytes.
LIMIT = 2**31 - 1

TOLERANCE = 1e-4
"""Largest allowed difference between torch's and ONNX Runtime's output vectors, of length 1."""


class EncoderModule(nn.Module):
    """A model as the encoder of a bundle: maps raw inputs to the float32 outputs in `names`.

    With `from_features`, it is head and combiner alone, and maps features.

    Attributes:
        names: "vector" (N, P), which FAISS stores; "query" (N, P) if the combiner searches with
            other vectors; "code" (N, C) if a rescorer needs it.
    """

    def __init__(self, model: Model, from_features: bool = False) -> None:
        super().__init__()
        self.model = model
        self.from_features = from_features
        combiner = model.combiner
        self.names = ["vector"]
        if combiner is not None:
            if type(combiner).query_vectors is not Combiner.query_vectors:
                self.names.append("query")
            if not combiner.exact:
                self.names.append("code")

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors in `names`.

        Args:
            inputs: pixels (N, channels, H, W) uint8, or vectors or features (N, F) float32.
        """
        _, codes = self.model(inputs, self.from_features)
        combiner = self.model.combiner
        outputs = [codes if combiner is None else combiner.index_vectors(codes)]
        if combiner is not None and "query" in self.names:
            outputs.append(combiner.query_vectors(codes))
        if "code" in self.names:
            outputs.append(codes)
        return tuple(output.float() for output in outputs)


class FeatureEncoder(EncoderModule):
    """A model's backbone alone: maps raw inputs to "features" (N, F)."""

    def __init__(self, model: Model) -> None:
        super().__init__(Model(model.backbone, nn.Identity()))
        self.names = ["features"]


class Rescorer(nn.Module):
    """A combiner's distance as a module: maps codes (Q, C) and (N, C) to distances (Q, N)."""

    def __init__(self, combiner: Combiner) -> None:
        super().__init__()
        self.combiner = combiner

    def forward(self, query: Tensor, items: Tensor) -> Tensor:
        """Return the combiner's distances (Q, N)."""
        return self.combiner.compute_mat(query, items).float()


@dataclass(frozen=True)
class Signature:
    """Names and shapes of a graph's inputs and outputs; dimensions given as text are dynamic.

    `most` are the largest sizes of dynamic dimensions that have one, such as the tokens of a text.
    """

    inputs: Mapping[str, tuple[str | int, ...]]
    outputs: Mapping[str, tuple[str | int, ...]]
    most: Mapping[str, int] = field(default_factory=dict)


@contextlib.contextmanager
def ready(model: Model) -> Iterator[None]:
    """Put a model on the CPU in evaluation mode, and afterwards restore its device and modes."""
    device = model.device
    channels_last = model.channels_last
    model.channels_last = False
    try:
        if device.type != "cpu":
            model.cpu()
        with evaluation_mode(model), torch.no_grad():
            yield
    finally:
        model.channels_last = channels_last
        if device.type != "cpu":
            model.to(device)


def check_size(model: Model) -> None:
    """Raise a `BundleError` if the model is too large for one ONNX file."""
    tensors = [*model.parameters(), *model.buffers()]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if size >= LIMIT:
        raise BundleError(
            f"The model has {size / 1e9:.1f} GB of numbers; an ONNX file holds at most 2 GB. Use a"
            " smaller backbone."
        )


def to_onnx(
    module: nn.Module,
    example: tuple[Tensor, ...],
    signature: Signature,
    *,
    exporter: Exporter,
) -> onnx.ModelProto:
    """Return the graph of a module in evaluation mode.

    Both exporters trace the module with `example`: a branch of its Python code is fixed to the side
    that `example` takes. Modules whose code reads numbers of the inputs are therefore refused, and
    those whose code depends on the size of a batch if the graph would not work for all sizes.
    `example` needs at least two rows, because a batch of one would become a constant.

    The exporter "dynamo" takes seconds, the deprecated "torchscript" tenths of a second. Graphs of
    "dynamo" are at least as fast (EfficientNet-Lite0 with TensorFlow's padding: 103 nodes and 10.6
    ms against 609 nodes and 14.2 ms).

    Raises:
        BundleError: torch cannot export the module, or its code depends on the inputs.
    """
    axes = {
        name: {axis: size for axis, size in enumerate(shape) if isinstance(size, str)}
        for name, shape in (signature.inputs | signature.outputs).items()  # type: ignore[operator]
    }
    options: dict[str, Any] = {
        "input_names": list(signature.inputs),
        "output_names": list(signature.outputs),
        "opset_version": OPSET,
    }
    try:
        with quiet():
            refuse_reads(module, example)
            if exporter == "dynamo":
                sizes = {size for axis in axes.values() for size in axis.values()}
                most = signature.most
                dims = {size: torch.export.Dim(size, max=most.get(size)) for size in sizes}
                shapes = tuple(
                    {axis: dims[size] for axis, size in axes[name].items()}
                    for name in signature.inputs
                )
                program = torch.onnx.export(
                    module, example, dynamo=True, dynamic_shapes=shapes, verbose=False, **options
                )
                if program is None:
                    raise RuntimeError("torch.onnx.export returned None")
                # Where code branches on the size of a batch, this exporter limits the sizes to one
                # side.
                limits = program.exported_program.range_constraints.values()
                uppers = [limit.upper for limit in limits if limit.upper not in most.values()]
                if any(bool(upper < LIMIT) for upper in uppers):
                    raise BundleError(ONE_BATCH)
                proto = program.model_proto
            else:
                file: Any = io.BytesIO()  # torch's annotation allows only paths
                with _silent_stdout(), TracedReads(len(example), any(axes.values())):
                    torch.onnx.export(
                        module, example, file, dynamo=False, dynamic_axes=axes, **options
                    )
                proto = onnx.load_from_string(file.getvalue())
    except BundleError:
        raise
    except Exception as fault:  # exporters raise any error of the traced code or of an operator
        raise BundleError(f"torch's exporter {exporter} failed: {fault_line(fault)}") from fault
    return clean(proto, signature, exporter)


def clean(proto: onnx.ModelProto, signature: Signature, exporter: str) -> onnx.ModelProto:
    """Return the graph with the signature's shapes, without metadata and intermediate shapes.

    The exporter's metadata contain source paths of this machine. The intermediate shapes that
    "dynamo" writes make ONNX Runtime's quantisation fail.
    """
    graph = proto.graph
    del graph.value_info[:]
    entries: list[Any] = [proto, graph, *proto.functions]
    entries += [*graph.node, *graph.initializer, *graph.input, *graph.output]
    for function in proto.functions:
        entries += function.node
    for entry in entries:
        entry.doc_string = ""
        del entry.metadata_props[:]
    shapes = {**signature.inputs, **signature.outputs}
    for value in [*graph.input, *graph.output]:
        shape = value.type.tensor_type.shape
        del shape.dim[:]
        for size in shapes[value.name]:
            dim = shape.dim.add()
            if isinstance(size, str):
                dim.dim_param = size
            else:
                dim.dim_value = size
    onnx.helper.set_model_props(proto, {"exporter": exporter})
    return proto


def session(graph: bytes) -> Any:
    """Return an ONNX Runtime session on the CPU with the settings that bundles use."""
    from retrieval.base.runtime import load_onnxruntime, session_options

    runtime = load_onnxruntime()
    options = session_options(runtime, torch.get_num_threads())
    try:
        return runtime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as fault:  # ONNX Runtime's errors share no public base class
        raise BundleError(
            f"ONNX Runtime cannot load the exported graph: {fault_line(fault)}"
        ) from fault


def fault_line(fault: BaseException) -> str:
    """Return an error's type and first line, because exporters' messages are pages long."""
    # torch.onnx wraps the error in another one whose message begins with the exporter's stages.
    if fault.__cause__ is not None and type(fault).__module__.startswith("torch.onnx"):
        return fault_line(fault.__cause__)
    line, *_ = str(fault).strip().splitlines() or [""]
    return f"{type(fault).__name__}: {line.strip()}".removesuffix(": ")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context manager that suppresses warnings and log records below ERROR."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(disabled)


@contextlib.contextmanager
def _silent_stdout() -> Iterator[None]:
    """Context manager that silences stdout, where a failing exporter prints its whole graph."""
    if sys.stdout is not None:
        sys.stdout.flush()
    # The printing is not Python's, so `contextlib.redirect_stdout` would not catch it.
    try:
        saved_stdout = os.dup(1)
    except OSError:  # the process has no stdout
        yield
        return
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
        yield
    finally:
        os.dup2(saved_stdout, 1)
        os.close(saved_stdout)
