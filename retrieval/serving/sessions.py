"""A bundle's graphs in ONNX Runtime: looked at first, loaded within limits, tried once."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import BundleError
from retrieval.host.cores import default_threads
from retrieval.serving.files.snapshot import available_memory
from retrieval.serving.graphs import GraphError, check_graph
from retrieval.serving.manifest import Manifest
from retrieval.serving.providers import FALLBACK, ROWS, Device, checked_device, refuse_other, start
from retrieval.serving.runtime import load_onnxruntime

_TRIAL_SECONDS = 60.0
_MEMORY = 6 << 30
"""What the graphs of a process may take on the CPU: weights, and what is between their nodes."""
_FOLDED_BYTES = 1 << 26
"""The largest constant that ONNX Runtime works out on loading, outside of its memory's limit."""


class Graph:
    """One loaded graph. Safe in threads.

    Args:
        path: for errors.
        session: ONNX Runtime's.
        device: where it runs: "cpu", "cuda" or "tensorrt".
    """

    def __init__(self, path: Path, session: Any, device: str = "cpu") -> None:
        self.path = path
        self.session = session
        self.device = device

    def __call__(
        self, outputs: Sequence[str], feeds: Mapping[str, NDArray[Any]], options: Any = None
    ) -> list[Any]:
        """Run the graph.

        Raises:
            BundleError: ONNX Runtime refuses, for want of memory for example.
        """
        if self.device == "tensorrt" and len(feeds["input"]) > ROWS:
            return in_parts(partial(self, outputs, options=options), feeds["input"])
        try:
            return list(self.session.run(list(outputs), dict(feeds), options))
        except Exception as fault:  # ONNX Runtime's errors share no public base class
            raise self._fault(fault) from fault

    def bound(self, outputs: Sequence[str], feeds: Mapping[str, Any], options: Any = None) -> list[Any]:
        """Run the graph and leave what it gives where it is computed: ONNX Runtime's own values, which another graph may take.

        Args:
            outputs: names.
            feeds: arrays, or values that `bound` gave.
            options: of the run.

        Raises:
            BundleError: see `__call__`.
        """
        place = "cpu" if self.device == "cpu" else "cuda"
        try:
            binding = self.session.io_binding()
            for name, value in feeds.items():
                if isinstance(value, np.ndarray):
                    binding.bind_cpu_input(name, value)
                else:
                    binding.bind_ortvalue_input(name, value)
            for name in outputs:
                binding.bind_output(name, place)
            self.session.run_with_iobinding(binding, options)
            return list(binding.get_outputs())
        except Exception as fault:  # see above
            raise self._fault(fault) from fault

    def _fault(self, fault: Exception) -> BundleError:
        return BundleError(f"ONNX Runtime cannot run {self.path}: {_reason(fault)}.")

    def try_once(self, feeds: Mapping[str, NDArray[Any]], shapes: Mapping[str, tuple[int, int]]) -> None:
        """Run it on one item, for a minute at most, and compare what comes with what must.

        Raises:
            BundleError: it fails, takes longer, or gives another type or shape.
        """
        options = load_onnxruntime().RunOptions()
        late = threading.Event()

        def stop() -> None:
            late.set()
            options.terminate = True

        timer = threading.Timer(_TRIAL_SECONDS, stop)
        timer.daemon = True
        timer.start()
        try:
            found = self(list(shapes), feeds, options)
        except BundleError:
            if late.is_set():
                raise BundleError(
                    f"{self.path} takes more than {_TRIAL_SECONDS:.0f} seconds for one item."
                ) from None
            raise
        finally:
            timer.cancel()
        for (name, shape), values in zip(shapes.items(), found, strict=True):
            if not isinstance(values, np.ndarray) or values.shape != shape or values.dtype != np.float32:
                kind = (
                    f"{values.dtype} {values.shape}"
                    if isinstance(values, np.ndarray)
                    else type(values).__name__
                )
                raise BundleError(f"{self.path} gives '{name}' as {kind}; the manifest says float32 {shape}.")


def in_parts(graph: Callable[[Mapping[str, NDArray[Any]]], list[Any]], rows: NDArray[Any]) -> list[Any]:
    """Run a graph on as many rows at once as TensorRT takes, and return what it gives of all."""
    parts = [graph({"input": rows[at : at + ROWS]}) for at in range(0, len(rows), ROWS)]
    return [np.concatenate(each) for each in zip(*parts, strict=True)]


@dataclass(frozen=True)
class Split:
    """An encoder of two graphs, one run after the other.

    Attributes:
        backbone: "input" → "features".
        head: "input", the features → "vector" and what else the manifest says.
    """

    backbone: Graph
    head: Graph

    def __call__(
        self, outputs: Sequence[str], feeds: Mapping[str, NDArray[Any]], options: Any = None
    ) -> list[Any]:
        """Run both, as an encoder of one graph is run; on a GPU the features stay there."""
        if self.backbone.device == "cpu":
            (features,) = self.backbone(["features"], feeds, options)
            return self.head(outputs, {"input": features}, options)
        if self.backbone.device == "tensorrt" and len(feeds["input"]) > ROWS:
            return in_parts(partial(self, outputs, options=options), feeds["input"])
        left = self.backbone.bound(["features"], feeds, options)
        return [each.numpy() for each in self.head.bound(outputs, {"input": left[0]}, options)]


@dataclass(frozen=True)
class Sessions:
    """The graphs of a bundle that run.

    Attributes:
        encoder: "input" → "vector" and what else the manifest says.
        rescorer: "query", "items" → "distance"; None without one.
        device: "cpu", "cuda" or "tensorrt".
        fallback: why it is the CPU though ONNX Runtime was built for a GPU; None otherwise.
    """

    encoder: Graph | Split
    rescorer: Graph | None
    device: str
    fallback: str | None = None

    @property
    def split(self) -> Split | None:
        """The encoder, where it is split."""
        return self.encoder if isinstance(self.encoder, Split) else None

    @classmethod
    def open(
        cls,
        folder: Path,
        held: Mapping[str, bytes],
        manifest: Manifest,
        variant: str | None,
        threads: int | None,
        device: Device,
    ) -> Sessions:
        """Load the graphs from the content of their files.

        Args:
            folder: for errors.
            held: content of the bundle's files, verified.
            manifest: what they should be.
            variant: the encoder to load, if not the main one.
            threads: of one call; None leaves it to ONNX Runtime.
            device: see `Bundle.open`.

        Raises:
            BundleError: a graph cannot be loaded or tried, or is not what the manifest says.
        """
        runtime = load_onnxruntime()
        devices = checked_device(runtime, device)
        options = session_options(runtime, threads)

        def load(name: str, shapes: Mapping[str, Sequence[int]], on: Sequence[str] = devices) -> Graph:
            try:
                check_graph(held[name])
                started = start(runtime, held[name], options, on, shapes)
            except Exception as fault:  # see above
                reason = fault if isinstance(fault, GraphError) else _reason(fault)
                raise BundleError(
                    f"ONNX Runtime {runtime.__version__} cannot load {folder / name}: {reason}."
                ) from fault
            return Graph(folder / name, started.session, started.device)

        outputs = ["vector"]
        if manifest.query_vectors:
            outputs.append("query")
        if manifest.rescorer is not None:
            outputs.append("code")
        widths = {"vector": manifest.vector, "query": manifest.vector, "code": manifest.code or 0}
        given = {name: widths[name] for name in outputs}

        def tried(name: str, dtype: str, shape: tuple[int, ...], wanted: Mapping[str, int]) -> Graph:
            graph = load(name, {"input": shape})
            _check_graph(graph, ["input"], list(wanted), {"input": shape, **wanted})
            item = np.zeros((1, *shape), dtype)
            graph.try_once({"input": item}, {each: (1, width) for each, width in wanted.items()})
            return graph

        taken = manifest.input
        file = manifest.encoder if variant is None else manifest.variants[variant].file
        encoder: Graph | Split
        if file is not None:
            first = encoder = tried(file, taken.dtype, taken.shape, given)
        else:
            assert manifest.split is not None
            said = manifest.split
            first = tried(said.backbone, taken.dtype, taken.shape, {"features": said.features})
            encoder = Split(first, tried(said.head, "float32", (said.features,), given))
        rescorer = None
        if manifest.rescorer is not None:
            width = manifest.code or 0
            # its items are of any number, which an engine of TensorRT's is not
            rescorer = load(manifest.rescorer.file, {}, [each for each in devices if each != "tensorrt"])
            _check_graph(rescorer, ["query", "items"], ["distance"], {"query": width, "items": width})
            codes = np.zeros((2, width), np.float32)
            rescorer.try_once({"query": codes[:1], "items": codes}, {"distance": (1, 2)})
        refuse_other(device, first.device)
        fell = first.device == "cpu" and devices[0] != "cpu"
        return cls(encoder, rescorer, first.device, FALLBACK if fell else None)


def session_options(runtime: Any, threads: int | None) -> Any:
    """Return ONNX Runtime's options of a session that says nothing, spins nowhere, and shares this process's bounded memory."""
    _limit_memory(runtime)
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # what fails is said as a sentence; its warnings are not for users
    entries = {
        "session.intra_op.allow_spinning": "0",
        "session.inter_op.allow_spinning": "0",
        "session.load_model_format": "ONNX",
        "session.use_env_allocators": "1",
        "optimization.constant_folding_max_output_size_in_bytes": str(_FOLDED_BYTES),
    }
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    # by itself it starts a thread for each core of the machine, whether this process may use it or not
    options.intra_op_num_threads = default_threads() if threads is None else threads
    return options


@functools.cache
def _limit_memory(runtime: Any) -> None:
    """Let all sessions of this process share one bounded memory: a graph that asks for more fails, and not the machine."""
    info = runtime.OrtMemoryInfo(
        "Cpu", runtime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, runtime.OrtMemType.DEFAULT
    )
    most = min(_MEMORY, available_memory() // 4 * 3)
    runtime.create_and_register_allocator(info, runtime.OrtArenaCfg({"max_mem": most}))


def _reason(fault: Exception) -> str:
    """Return the end of ONNX Runtime's message, on one line: what precedes it names its source files."""
    return " ".join(str(fault).split())[-400:].rstrip(".") or type(fault).__name__


def _check_graph(graph: Graph, inputs: Sequence[str], outputs: Sequence[str], widths: dict[str, Any]) -> None:
    """Refuse a graph whose inputs, outputs or fixed dimensions are not what the manifest says."""
    path, session = graph.path, graph.session
    given = {node.name: node for node in session.get_inputs()}
    offered = {node.name: node for node in session.get_outputs()}
    for kind, wanted, found in (("input", inputs, given), ("output", outputs, offered)):
        for name in wanted:
            if name not in found:
                raise BundleError(f"{path} has no {kind} '{name}' (it has: {', '.join(found)}).")
            width = widths.get(name)
            if width is None:
                continue
            expected = width if isinstance(width, tuple) else (width,)
            actual = tuple(found[name].shape[1:])
            fits = len(actual) == len(expected) and all(
                not isinstance(have, int) or have == want for have, want in zip(actual, expected, strict=True)
            )
            if not fits:
                raise BundleError(
                    f"{path}: '{name}' has shape (N, {actual}), the manifest says (N, {expected})."
                )
    if extra := [name for name in given if name not in inputs]:
        raise BundleError(f"{path} needs an input '{extra[0]}' that bundles do not have.")
