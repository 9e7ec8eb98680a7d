"""Check a bundle's graphs, load them in ONNX Runtime within limits, try each once, and run them."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from retrieval.base.arrays import Array, Floats32
from retrieval.base.cores import default_threads
from retrieval.base.memory import available_memory
from retrieval.base.runtime import (
    FALLBACK,
    Device,
    checked_device,
    load_onnxruntime,
    start_session,
)
from retrieval.bundle.graphs import GraphError, check_graph
from retrieval.bundle.manifest import Input, Manifest
from retrieval.errors import BundleError, DataError

T = TypeVar("T")
R = TypeVar("R")
Feeds = Mapping[str, Array]
"""Inputs of a graph by name."""
Shapes = Mapping[str, tuple[int, int]]
"""Shapes of a graph's outputs by name."""
Runs = Callable[[Sequence[str], Feeds], list[Any]]
"""Function that runs a graph, given the names of outputs and the inputs by name."""

_TRIAL_SECONDS = 60.0
_MEMORY = 6 << 30
"""CPU memory limit in bytes for all graphs of a process: weights and intermediate results."""
_FOLDED_BYTES = 1 << 26
"""Largest constant that ONNX Runtime may compute while loading; `_MEMORY` does not limit these."""


@dataclass(frozen=True)
class Graph:
    """One loaded graph; thread-safe."""

    path: Path
    session: Any
    device: str = "cpu"

    def __call__(self, outputs: Sequence[str], feeds: Feeds, options: Any = None) -> list[Any]:
        """Run the graph.

        Raises:
            BundleError: ONNX Runtime fails, for example for lack of memory.
        """
        try:
            return list(self.session.run(list(outputs), dict(feeds), options))
        except Exception as fault:  # ONNX Runtime's errors share no public base class
            raise BundleError(f"ONNX Runtime cannot run {self.path}: {_reason(fault)}.") from fault

    def check(self, feeds: Feeds, shapes: Shapes) -> None:
        """Check the names of inputs and outputs, run the graph once, and check its outputs.

        Raises:
            BundleError: the graph lacks an input or output, has an unknown input, fails, takes more
                than a minute, or returns another type or shape.
        """
        inputs = [node.name for node in self.session.get_inputs()]
        offered = [node.name for node in self.session.get_outputs()]
        for kind, names, present in (("input", feeds, inputs), ("output", shapes, offered)):
            if lacking := [name for name in names if name not in present]:
                has = ", ".join(present)
                raise BundleError(f"{self.path} has no {kind} '{lacking[0]}' (it has: {has}).")
        if extra := [name for name in inputs if name not in feeds]:
            raise BundleError(f"{self.path} needs an input '{extra[0]}' that bundles do not have.")
        options = load_onnxruntime().RunOptions()
        late = threading.Event()

        def stop() -> None:
            late.set()
            options.terminate = True

        # A bundle may come from anyone, and a hostile graph could run for hours.
        timer = threading.Timer(_TRIAL_SECONDS, stop)
        timer.daemon = True
        timer.start()
        try:
            outputs = self(list(shapes), feeds, options)
        except BundleError:
            if late.is_set():
                limit = f"{_TRIAL_SECONDS:.0f} seconds"
                raise BundleError(f"{self.path} takes more than {limit} for one item.") from None
            raise
        finally:
            timer.cancel()
        for (name, shape), values in zip(shapes.items(), outputs, strict=True):
            kind = type(values).__name__
            if isinstance(values, np.ndarray):
                if (values.shape, values.dtype) == (shape, np.float32):
                    continue
                kind = f"{values.dtype} {values.shape}"
            expected = f"the manifest says float32 {shape}"
            raise BundleError(f"{self.path} returns '{name}' as {kind}; {expected}.")


@dataclass(frozen=True)
class SplitEncoder:
    """An encoder of two graphs, run one after the other.

    Attributes:
        backbone: graph from "input" to "features".
        head: graph from "input" (the features) to "vector" and further outputs in the manifest.
    """

    backbone: Graph
    head: Graph

    def __call__(self, outputs: Sequence[str], feeds: Feeds, options: Any = None) -> list[Any]:
        """Run both graphs like a single encoder."""
        (features,) = self.backbone(["features"], feeds, options)
        return self.head(outputs, {"input": features}, options)


@dataclass(frozen=True)
class Sessions:
    """The loaded graphs of a bundle.

    Attributes:
        encoder: graph from "input" to "vector" and further outputs in the manifest.
        rescorer: graph from "query" and "items" to "distance", or `None`.
        device: device that runs the graphs, "cpu" or "cuda".
        fallback: why the CPU runs them although ONNX Runtime was built for a GPU, else `None`.
    """

    encoder: Graph | SplitEncoder
    rescorer: Graph | None
    device: str
    fallback: str | None = None

    @property
    def split(self) -> SplitEncoder | None:
        """The encoder if it is split, else `None`."""
        if isinstance(self.encoder, SplitEncoder):
            return self.encoder
        return None

    @classmethod
    def open(
        cls,
        folder: Path,
        files: Mapping[str, bytes],
        manifest: Manifest,
        variant: str | None,
        threads: int | None,
        device: Device,
    ) -> Sessions:
        """Load the graphs from the content of their files.

        Raises:
            BundleError: a graph cannot be loaded or run, or differs from the manifest.
        """
        runtime = load_onnxruntime()
        devices = checked_device(runtime, device)
        options = session_options(runtime, threads)

        def tried(name: str, feeds: Feeds, shapes: Shapes) -> Graph:
            try:
                check_graph(files[name])
                session, running_on = start_session(runtime, files[name], options, devices)
            except Exception as fault:  # ONNX Runtime's errors share no public base class
                reason = str(fault) if isinstance(fault, GraphError) else _reason(fault)
                raise BundleError(
                    f"ONNX Runtime {runtime.__version__} cannot load {folder / name}: {reason}."
                ) from fault
            graph = Graph(folder / name, session, running_on)
            graph.check(feeds, shapes)
            return graph

        shapes = {name: (1, width) for name, width in manifest.outputs.items()}
        split = manifest.split
        input = manifest.input
        feeds = {"input": np.zeros((1, *input.shape), input.dtype)}
        if variant is None:
            file = manifest.encoder
        else:
            file = manifest.variants[variant].file
        encoder: Graph | SplitEncoder
        if file is not None:
            first = encoder = tried(file, feeds, shapes)
        else:
            assert split is not None
            first = tried(split.backbone, feeds, {"features": (1, split.features)})
            features = np.zeros((1, split.features), np.float32)
            encoder = SplitEncoder(first, tried(split.head, {"input": features}, shapes))
        rescorer = None
        if manifest.rescorer is not None:
            codes = np.zeros((2, manifest.code or 0), np.float32)
            pair = {"query": codes[:1], "items": codes}
            rescorer = tried(manifest.rescorer.file, pair, {"distance": (1, 2)})
        if device not in ("auto", first.device):
            raise BundleError(
                "ONNX Runtime could not start on the CUDA device. Use the CPU, or run `retrieval"
                " doctor` to see what is missing."
            )
        fell_back = first.device == "cpu" and devices[0] != "cpu"
        return cls(encoder, rescorer, first.device, FALLBACK if fell_back else None)


def session_options(runtime: Any, threads: int | None) -> Any:
    """Return ONNX Runtime's options: silent, without spinning, and with limited memory."""
    _limit_memory(runtime)
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # fatal only; errors are raised as exceptions too
    entries = {
        "session.intra_op.allow_spinning": "0",
        "session.inter_op.allow_spinning": "0",
        "session.load_model_format": "ONNX",
        "session.use_env_allocators": "1",  # the allocator that `_limit_memory` registers
        "optimization.constant_folding_max_output_size_in_bytes": str(_FOLDED_BYTES),
    }
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    # By default, ONNX Runtime starts a thread for each core, even those this process may not use.
    options.intra_op_num_threads = default_threads() if threads is None else threads
    return options


@functools.cache
def _limit_memory(runtime: Any) -> None:
    """Limit the memory of all sessions of this process together.

    A graph that needs more memory then fails, instead of ending the process.
    """
    info = runtime.OrtMemoryInfo(
        "Cpu", runtime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, runtime.OrtMemType.DEFAULT
    )
    most = min(_MEMORY, available_memory() // 4 * 3)
    runtime.create_and_register_allocator(info, runtime.OrtArenaCfg({"max_mem": most}))


def _reason(fault: Exception) -> str:
    """Return the end of ONNX Runtime's message; the beginning names its source files."""
    return " ".join(str(fault).split())[-400:].rstrip(".") or type(fault).__name__


def checked_inputs(inputs: Array, input: Input, path: Path) -> Array:
    """Check inputs, uint8 (N, C, H, W) or real numbers (N, F), and convert them for a graph.

    Raises:
        DataError: the inputs have another shape or type, or contain NaN or infinity.
    """
    if not isinstance(inputs, np.ndarray):
        raise DataError("`encode` takes one array of inputs. For images, call `encode_images`.")
    if inputs.ndim != len(input.shape) + 1 or inputs.shape[1:] != input.shape:
        shape = f"(N, {', '.join(map(str, input.shape))})"
        raise DataError(f"The bundle {path} takes inputs of shape {shape}, not {inputs.shape}.")
    if input.dtype == "uint8":
        if inputs.dtype != np.uint8:
            raise DataError(f"The bundle {path} takes raw pixels as uint8, not {inputs.dtype}.")
        return inputs
    if inputs.dtype.kind not in "fiu":
        raise DataError(f"The bundle {path} takes real numbers, not {inputs.dtype}.")
    with np.errstate(over="ignore"):
        values = inputs.astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
        raise DataError(f"Vector {row} holds NaN, infinity or a number beyond float32.")
    return values


def ahead(work: Callable[[T], R], items: Iterable[T], *, workers: int, most: int) -> Iterator[R]:
    """Yield `work(item)` for each item, in order, computed in threads.

    At most `most` results are finished or running at a time. The error of an item is raised when
    its result would be yielded.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix="decode")
    try:
        waiting: deque[Future[R]] = deque()
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) >= most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def run_batches(
    graph: Runs,
    widths: Mapping[str, int],
    batches: Iterable[Array],
    count: int,
    what: str = "encoder",
) -> dict[str, Floats32]:
    """Return the outputs (count, width) of a graph for batches of inputs with `count` rows in all.

    Raises:
        DataError: an output contains NaN or infinity.
        BundleError: ONNX Runtime fails, or an output's shape differs from the manifest.
    """
    out = {name: np.empty((count, width), dtype=np.float32) for name, width in widths.items()}
    start = 0
    for part in batches:
        feeds = {"input": np.ascontiguousarray(part)}
        for name, values in zip(out, graph(list(out), feeds), strict=True):
            if values.shape != (len(part), widths[name]):
                raise BundleError(
                    f"The {what} returns '{name}' of shape {values.shape} for {len(part)} items;"
                    f" the manifest says ({len(part)}, {widths[name]})."
                )
            out[name][start : start + len(part)] = values
        start += len(part)
    for name, values in out.items():
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
            raise DataError(
                f"The {what} returns NaN or infinity in '{name}' for item {row} of the batch."
            )
    return out
