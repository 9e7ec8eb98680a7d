"""Open a bundle (an exported model) and run it with ONNX Runtime.

The input is images or features; the output is vectors and, for a rescorer, codes. `Bundle` is what
others use. `Sessions` loads its graphs within limits and tries each once.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.base.arrays import Array, Floats32, Pixels
from retrieval.base.folder_kinds import StrPath
from retrieval.base.lazy import how_to_have
from retrieval.base.machine import ahead, cores
from retrieval.base.progress import Meter, Progress, showing
from retrieval.base.runtime import (
    FALLBACK,
    Device,
    checked_device,
    load_onnxruntime,
    session_options,
    start_session,
)
from retrieval.bundle.addresses import bundle_folder
from retrieval.bundle.graphs import GraphError, check_graph
from retrieval.bundle.manifest import (
    FILE,
    Input,
    Manifest,
    manifest_text,
    opened_whole,
    parse_manifest,
    read_files,
)
from retrieval.bundle.text import Tokenizer, checked_texts
from retrieval.errors import (
    BundleError,
    DataError,
    MissingDependency,
    at_least_one,
    did_you_mean,
)
from retrieval.images.decoding import decode
from retrieval.images.preprocessing import ImageLike, as_list, from_pixels, is_image

Feeds = Mapping[str, Array]
"""Inputs of a graph by name."""
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a graph's outputs by name."""
Runs = Callable[[Sequence[str], Feeds], list[Any]]
"""Function that runs a graph, given the names of outputs and the inputs by name."""

_TRIAL_SECONDS = 60.0
_TOKENS_PER_BATCH = 1 << 13
"""Most tokens that the text encoder takes at once, which bounds its memory: 8,192."""


@dataclass(frozen=True)
class Encoded:
    """Output of the encoder for N items.

    Attributes:
        vector: vectors (N, P) that the index stores.
        query: vectors (N, P) to search with; the same array as `vector` unless the bundle has a
            separate output for queries.
        code: codes (N, C) for the rescorer, the graph that measures the exact distances of a
            search's candidates. `None` without a rescorer.
        bundle: SHA-256 of the bundle; "" if unknown.
        base: vectors (N, width) of the base, to which the bundle's adapter was applied. `None`
            without an adapter, or if unknown.
    """

    vector: Floats32
    query: Floats32
    code: Floats32 | None = None
    bundle: str = ""
    base: Floats32 | None = None

    def __len__(self) -> int:
        return len(self.vector)

    def __getitem__(self, rows: slice) -> Encoded:
        """Return a slice of the items."""
        vector = self.vector[rows]
        # The same object again, which says that queries need no array of their own.
        if self.query is self.vector:
            query = vector
        else:
            query = self.query[rows]
        if self.code is None:
            code = None
        else:
            code = self.code[rows]
        if self.base is None:
            base = None
        else:
            base = self.base[rows]
        return Encoded(vector, query, code, self.bundle, base)


class Bundle:
    """An opened bundle; its methods may be called from several threads at once.

    Attributes:
        path: folder of the bundle.
        manifest: content of its `manifest.json`.
        variant: variant of the encoder that runs ("fp16", "int8"), or `None` for the encoder
            itself.
        device: device that runs the encoder, "cpu" or "cuda".
        fallback: why the encoder runs on the CPU although ONNX Runtime was built for a GPU, else
            `None`.
        sha256: SHA-256 of the manifest, which contains the SHA-256 of all files; identifies the
            bundle.
        outputs: width of each output of the encoder, before the adapter if there is one, by name.
        compares_vectors_alone: whether the distance of a query and an item depends on these two
            vectors alone.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        text: bytes,
        variant: str | None,
        sessions: Sessions,
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.variant = variant
        self.device = sessions.device
        self.fallback = sessions.fallback
        self.sha256 = hashlib.sha256(text).hexdigest()
        self.outputs = manifest.outputs
        self.compares_vectors_alone = (
            manifest.rescorer is None
            and manifest.distance.measure != "inner"
            and manifest.merge != "score"
        )
        self._text = text
        self._sessions = sessions

    @classmethod
    def open(
        cls,
        path: StrPath,
        *,
        variant: str | None = None,
        threads: int | None = None,
        device: Device = "auto",
    ) -> Bundle:
        """Check a bundle's format, files and checksums, and load its graphs.

        Args:
            path: folder that `retrieval export` wrote, or an address such as `hf://OWNER/NAME`.
            variant: run this variant of the encoder ("fp16", "int8") instead of the encoder itself.
            threads: threads per call of the encoder. `None` means `OMP_NUM_THREADS`, or one per
                core.
            device: "cpu", "cuda", or "auto", which uses CUDA if onnxruntime-gpu offers it.

        Raises:
            BundleError: the bundle is missing, incomplete, of another format, or was altered, or a
                graph differs from the manifest.
            MissingDependency: ONNX Runtime is not installed, or two packages of it are.
        """
        folder = bundle_folder(path)

        def load() -> Bundle:
            text = manifest_text(folder)
            manifest = parse_manifest(folder / FILE, text)
            graphs = read_files(folder, manifest.files)
            if variant is not None and variant not in manifest.variants:
                variants = ", ".join(sorted(manifest.variants)) or "none"
                raise BundleError(
                    f"The bundle {folder} has no variant '{variant}' (it has: {variants})."
                    + did_you_mean(variant, manifest.variants)
                )
            sessions = Sessions.open(folder, graphs, manifest, variant, threads, device)
            return cls(folder, manifest, text, variant, sessions)

        return opened_whole(folder, load)

    def __reduce__(self) -> Any:
        # ONNX Runtime's sessions cannot be pickled.
        return _reopened, (self.path.absolute(), self.sha256, self.variant, self.device)

    def __repr__(self) -> str:
        manifest = self.manifest
        if manifest.input.kind == "image":
            inputs = "images"
        else:
            inputs = "vectors"
        shape = " × ".join(map(str, manifest.input.shape))
        if self.variant:
            runs = f"{self.variant} on {self.device}"
        else:
            runs = self.device
        return (
            f"Bundle {self.path}: {manifest.name}, {inputs} of {shape} to vectors of"
            f" {manifest.vector}, {manifest.distance}, {runs}"
        )

    def copy(self, target: Path) -> None:
        """Write this bundle, as it was opened, to a new folder.

        Raises:
            BundleError: the bundle's files have changed since it was opened.
            OSError: a file cannot be written.
        """

        def write() -> None:
            # The SHA-256 of this manifest is recorded in the index that gets the copy.
            if manifest_text(self.path) != self._text:
                raise BundleError(
                    f"The bundle {self.path} was changed while it was in use. Run the command"
                    " again."
                )
            contents = read_files(self.path, self.manifest.files)
            # `opened_whole` calls this again if the bundle's folder is replaced meanwhile.
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            (target / FILE).write_bytes(self._text)
            for name, content in contents.items():
                (target / name).write_bytes(content)

        opened_whole(self.path, write)

    def encode(self, inputs: Array, *, batch_size: int = 32) -> Encoded:
        """Run the encoder on uint8 images (N, C, H, W) from `preprocess`, or real features (N, F).

        Raises:
            DataError: the inputs have a wrong shape or type, or inputs or outputs contain NaN or
                infinity.
        """
        manifest = self.manifest
        encoder = self._sessions.encoder
        out = self._run(encoder, self.outputs, inputs, manifest.input, batch_size)
        return self._encoded(out)

    def _run(
        self,
        graph: Runs,
        widths: Mapping[str, int],
        inputs: Array,
        input: Input,
        batch_size: int,
        what: str = "encoder",
    ) -> dict[str, Floats32]:
        """Run a graph in batches on inputs that `input` describes.

        `widths` are the widths of the graph's outputs, and `what` is its name in messages.
        """
        inputs = _checked_inputs(inputs, input, self.path)
        batch_size = at_least_one("batch_size", batch_size)
        starts = range(0, len(inputs), batch_size)
        batches = (
            {"input": np.ascontiguousarray(inputs[start : start + batch_size])} for start in starts
        )
        return _run_batches(graph, widths, batches, len(inputs), what)

    def _encoded(self, out: Mapping[str, Floats32]) -> Encoded:
        if self.manifest.adapter is not None:
            return self.adapt(out["vector"])
        return Encoded(out["vector"], out.get("query", out["vector"]), out.get("code"), self.sha256)

    def adapt(self, base: Array, *, batch_size: int = 1024) -> Encoded:
        """Apply the adapter to vectors (N, width) of the base: the last step of `encode`.

        Raises:
            BundleError: this bundle has no adapter.
            DataError: see `encode`.
        """
        entry = self.manifest.adapter
        graph = self._sessions.adapter
        if entry is None or graph is None:
            raise BundleError(
                f"The bundle {self.path} has no adapter: its encoder returns the vectors."
            )
        input = Input(kind="features", dtype="float32", shape=(entry.width,))
        widths = {"vector": self.manifest.vector}
        vectors = self._run(graph, widths, base, input, batch_size, "adapter")["vector"]
        return Encoded(vectors, vectors, None, self.sha256, base.astype(np.float32, copy=False))

    @property
    def takes_text(self) -> bool:
        """Whether `encode_text` works: the bundle has a text encoder, and `tokenizers` is here."""
        return self._sessions.text is not None

    @property
    def backbone_sha256(self) -> str | None:
        """SHA-256 of a split encoder's backbone; equal values mean equal features.

        It covers graph, weights and preprocessing. `None` if the encoder is a single graph or a
        variant runs.
        """
        # A variant is one graph and returns no features, even if the manifest names a backbone.
        if self._sessions.split is None:
            return None
        return self.manifest.backbone_sha256

    def features(self, inputs: Array, *, batch_size: int = 32) -> Floats32:
        """Return the backbone's features (N, F), the input of the head, for inputs as in `encode`.

        A bundle that takes features returns its inputs.

        Raises:
            BundleError: the encoder is a single graph.
            DataError: see `encode`.
        """
        input = self.manifest.input
        if input.kind == "features":
            return _checked_inputs(inputs, input, self.path)
        backbone, width, _ = self._split()
        out = self._run(backbone, {"features": width}, inputs, input, batch_size, "backbone")
        return out["features"]

    def encode_features(self, features: Array, *, batch_size: int = 32) -> Encoded:
        """Run the head on features (N, F): `encode(x)` equals `encode_features(features(x))`.

        The features may come from another bundle with the same `backbone_sha256`. In a bundle that
        takes features, the whole encoder is the head.

        Raises:
            BundleError: the encoder is a single graph.
            DataError: see `encode`.
        """
        if self.manifest.input.kind == "features":
            return self.encode(features, batch_size=batch_size)
        _, width, head = self._split()
        input = Input(kind="features", dtype="float32", shape=(width,))
        out = self._run(head, self.outputs, features, input, batch_size)
        return self._encoded(out)

    @property
    def features_width(self) -> int:
        """Number of features per item, F; see `features`.

        Raises:
            BundleError: the encoder is a single graph.
        """
        input = self.manifest.input
        if input.kind == "features":
            return input.shape[0]
        return self._split()[1]

    def _split(self) -> tuple[Runs, int, Runs]:
        """Return the backbone, the width of its features, and the head."""
        split = self._sessions.split
        entry = self.manifest.split
        if split is None or entry is None:
            if entry is None:
                why = "has an encoder of one graph"
                advice = "Export it with --split (in Python split=True)."
            else:
                why = f"runs its variant '{self.variant}'"
                advice = "Leave the variant out."
            raise BundleError(f"The bundle {self.path} {why}, which returns no features. {advice}")
        return split.backbone, entry.features, split.head

    def encode_image(self, image: ImageLike) -> Encoded:
        """Decode, preprocess and encode one image; see `preprocess`."""
        return self.encode(self.preprocess(image)[None])

    def encode_images(
        self,
        images: Sequence[ImageLike] | ImageLike,
        *,
        batch_size: int = 32,
        progress: Progress = True,
    ) -> Floats32:
        """Return the vectors (N, P) of N images, as an index stores them.

        Threads decode images while the encoder runs. Only a few batches are in memory at a time, so
        N may be large.

        Args:
            images: one image or several, as `preprocess` takes them.
            batch_size: number of items per batch.
            progress: True shows a bar, False nothing; a function is called with (what, done,
                total).

        Raises:
            DataError: an image cannot be used (the message names it), or this bundle takes
                features.
        """
        return self.encode_each(as_list(images), batch_size=batch_size, progress=progress).vector

    def encode_each(
        self,
        images: Sequence[ImageLike],
        *,
        batch_size: int = 32,
        progress: Progress = True,
        name: str = "images",
    ) -> Encoded:
        """Return all outputs of the encoder for N images.

        See `encode_images`. Error messages name an image by its place in the list `name`.
        """
        batch_size = at_least_one("batch_size", batch_size)

        def pixels(numbered: tuple[int, ImageLike]) -> Pixels:
            number, image = numbered
            if not is_image(image):
                raise DataError(
                    f"{name}[{number}]: an image is a path, bytes, a Pillow image or uint8 pixels, "
                    f"not an object of type {type(image).__name__}."
                )
            try:
                return self.preprocess(image)
            except DataError as fault:
                raise DataError(f"{name}[{number}]: {fault}") from fault

        # Two batches: the next one is decoded while the encoder runs this one.
        decoded = ahead(pixels, enumerate(images), workers=cores(), most=2 * batch_size)
        with showing(progress), Meter("encoding", len(images), "images") as meter:

            def batches() -> Iterator[Feeds]:
                while rows := list(itertools.islice(decoded, batch_size)):
                    yield {"input": np.stack(rows)}
                    meter.update(len(rows))

            encoder = self._sessions.encoder
            out = _run_batches(encoder, self.outputs, batches(), len(images))
        return self._encoded(out)

    def encode_text(self, texts: Sequence[str], *, batch_size: int = 32) -> Encoded:
        """Return the vectors of N texts, in the same space as those of items.

        Texts of more tokens than the manifest's `text.length` are cut.

        Args:
            texts: one text or several.
            batch_size: number of texts per batch.

        Raises:
            DataError: a text cannot be used (the message names it), or this bundle has no text
                encoder.
            MissingDependency: the package `tokenizers` is not installed.
        """
        entry = self.manifest.text
        if entry is None:
            raise DataError(
                f"The bundle {self.path} has no text encoder, so it takes no texts. Export a model"
                " that was trained with texts."
            )
        if self._sessions.text is None:
            raise MissingDependency(f"Texts need tokenizers, {how_to_have('tokenizers')}")
        graph, tokenizer = self._sessions.text
        texts = checked_texts(texts)
        most = max(1, _TOKENS_PER_BATCH // entry.length)
        rows = min(most, at_least_one("batch_size", batch_size))
        starts = range(0, len(texts), rows)
        batches = (tokenizer(texts[start : start + rows]) for start in starts)
        widths = {"vector": self.outputs["vector"]}
        return self._encoded(_run_batches(graph, widths, batches, len(texts), "text encoder"))

    def preprocess(self, image: ImageLike) -> Pixels:
        """Return an image's pixels (C, H, W), ready for `encode`.

        Args:
            image: an encoded image's bytes, its file's path, a Pillow image, or its pixels: uint8
                (H, W) or (H, W, 3).

        Raises:
            DataError: the image cannot be decoded, an array has a wrong shape or type, or this
                bundle takes features.
        """
        preprocessing = self.manifest.input.preprocessing
        if preprocessing is None:
            raise DataError(
                f"The bundle {self.path} takes vectors of {self.manifest.input.shape[0]} features,"
                " not images. Pass features, or on the command line an .npz file with 'features'."
            )
        if isinstance(image, bytes | str | os.PathLike):
            image = decode(image)
        elif isinstance(image, np.ndarray):
            image = from_pixels(image)
        return preprocessing(image)

    def rescore(self, query_codes: Array, item_codes: Array) -> Floats32:
        """Return the rescorer's distances (Q, N) between codes (Q, C) and (N, C).

        Smaller is closer.

        Raises:
            BundleError: this bundle has no rescorer.
            DataError: the codes have another shape.
        """
        rescorer = self._sessions.rescorer
        if rescorer is None:
            why = "the distances of its vectors order the results"
            raise BundleError(f"The bundle {self.path} has no rescorer: {why}.")
        feeds = {}
        for name, codes in (("query", query_codes), ("items", item_codes)):
            if codes.ndim != 2 or codes.shape[1] != self.manifest.code:
                raise DataError(
                    f"Codes of shape (N, {self.manifest.code}) are needed, not {codes.shape}."
                )
            feeds[name] = np.ascontiguousarray(codes, dtype=np.float32)
        # Graphs are tried on one query and two items at opening, so none is promised to take zero.
        if not len(query_codes) or not len(item_codes):
            return np.empty((len(query_codes), len(item_codes)), dtype=np.float32)
        (distances,) = rescorer(["distance"], feeds)
        return np.asarray(distances, dtype=np.float32)

    @property
    def has_code(self) -> bool:
        """Whether the bundle has a rescorer, which needs the encoder's output "code"."""
        return self.manifest.rescorer is not None


def _reopened(path: Path, sha256: str, variant: str | None, device: Device) -> Bundle:
    """Open a pickled bundle again."""
    bundle = Bundle.open(path, variant=variant, device=device)
    if bundle.sha256 != sha256:
        raise BundleError(f"{path} now holds another bundle than the one that was pickled.")
    return bundle


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
            for name in names:
                if name not in present:
                    has = ", ".join(present)
                    raise BundleError(f"{self.path} has no {kind} '{name}' (it has: {has}).")
        for name in inputs:
            if name not in feeds:
                raise BundleError(f"{self.path} needs an input '{name}' that bundles do not have.")
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
            # A graph may also return a list or a map, which ONNX Runtime makes a Python object.
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
        adapter: graph from "input" (vectors of the base) to "vector", or `None`.
        text: graph from "ids" and "mask" to "vector", and its tokenizer; `None` without a text
            encoder, or if the package `tokenizers` is not installed.
        device: device that runs the graphs, "cpu" or "cuda".
        fallback: why the CPU runs them although ONNX Runtime was built for a GPU, else `None`.
    """

    encoder: Graph | SplitEncoder
    rescorer: Graph | None
    adapter: Graph | None
    text: tuple[Graph, Tokenizer] | None
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
                if isinstance(fault, GraphError):
                    reason = str(fault)
                else:
                    reason = _reason(fault)
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
            first = tried(file, feeds, shapes)
            encoder = first
        else:
            assert split is not None  # the manifest has an encoder or a split
            first = tried(split.backbone, feeds, {"features": (1, split.features)})
            features = np.zeros((1, split.features), np.float32)
            encoder = SplitEncoder(first, tried(split.head, {"input": features}, shapes))
        rescorer = None
        if manifest.rescorer is not None:
            codes = np.zeros((2, manifest.code or 0), np.float32)
            pair = {"query": codes[:1], "items": codes}
            rescorer = tried(manifest.rescorer.file, pair, {"distance": (1, 2)})
        adapter = None
        if manifest.adapter is not None:
            vectors = np.zeros((1, manifest.adapter.width), np.float32)
            outputs = {"vector": (1, manifest.vector)}
            adapter = tried(manifest.adapter.file, {"input": vectors}, outputs)
        text = None
        if manifest.text is not None and find_spec("tokenizers"):
            name = manifest.text.tokenizer
            tokenizer = Tokenizer(folder / name, files[name], manifest.text.length)
            ids = np.ones((1, manifest.text.length), np.int64)
            outputs = {"vector": shapes["vector"]}
            text = tried(manifest.text.file, {"ids": ids, "mask": ids}, outputs), tokenizer
        if device not in ("auto", first.device):
            raise BundleError(
                "ONNX Runtime could not start on the CUDA device. Use the CPU, or run `retrieval"
                " doctor` to see what is missing."
            )
        fallback = None
        if first.device == "cpu" and devices[0] != "cpu":
            fallback = FALLBACK
        return cls(encoder, rescorer, adapter, text, first.device, fallback)


def _reason(fault: Exception) -> str:
    """Return the end of ONNX Runtime's message; the beginning names its source files."""
    return " ".join(str(fault).split())[-400:].rstrip(".") or type(fault).__name__


def _checked_inputs(inputs: Array, input: Input, path: Path) -> Array:
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


def _run_batches(
    graph: Runs,
    widths: Mapping[str, int],
    batches: Iterable[Feeds],
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
    for feeds in batches:
        rows = len(next(iter(feeds.values())))
        for name, values in zip(out, graph(list(out), feeds), strict=True):
            if values.shape != (rows, widths[name]):
                raise BundleError(
                    f"The {what} returns '{name}' of shape {values.shape} for {rows} items;"
                    f" the manifest says ({rows}, {widths[name]})."
                )
            out[name][start : start + rows] = values
        start += rows
    for name, values in out.items():
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
            raise DataError(
                f"The {what} returns NaN or infinity in '{name}' for item {row} of the batch."
            )
    return out
