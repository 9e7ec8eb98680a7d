"""Open a bundle (an exported model) and run it with ONNX Runtime.

The input is images or features; the output is vectors and, for a rescorer, codes.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.base.arrays import Array, Floats32, Pixels
from retrieval.base.cores import cores
from retrieval.base.places import StrPath
from retrieval.base.progress import Meter, Progress, showing
from retrieval.base.runtime import Device
from retrieval.bundle.bundle_folder import FILE, manifest_text, opened_whole, read_files
from retrieval.bundle.manifest import Input, Manifest, parse_manifest
from retrieval.bundle.sessions import (
    Runs,
    Sessions,
    ahead,
    checked_inputs,
    run_batches,
)
from retrieval.errors import BundleError, DataError, at_least_one, did_you_mean
from retrieval.images.decoding import decode
from retrieval.images.preprocessing import ImageLike, as_list, from_pixels, is_image


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
    """

    vector: Floats32
    query: Floats32
    code: Floats32 | None = None
    bundle: str = ""

    def __len__(self) -> int:
        return len(self.vector)

    def __getitem__(self, rows: slice) -> Encoded:
        """Return a slice of the items."""
        vector = self.vector[rows]
        if self.query is self.vector:
            query = vector
        else:
            query = self.query[rows]
        return Encoded(vector, query, None if self.code is None else self.code[rows], self.bundle)


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
        self._text = text
        self._sessions = sessions
        self._widths = manifest.outputs

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
            path: folder that `retrieval export` wrote.
            variant: run this variant of the encoder ("fp16", "int8") instead of the encoder itself.
            threads: threads per call of the encoder. `None` means `OMP_NUM_THREADS`, or one per
                core.
            device: "cpu", "cuda", or "auto", which uses CUDA if onnxruntime-gpu offers it.

        Raises:
            BundleError: the bundle is missing, incomplete, of another format, or was altered, or a
                graph differs from the manifest.
            MissingDependency: ONNX Runtime is not installed, or two packages of it are.
        """
        folder = Path(path)

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
        # ONNX Runtime's sessions cannot be pickled
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
        graph = self._sessions.encoder
        return self._encoded(self._run(graph, self._widths, inputs, manifest.input, batch_size))

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
        inputs = checked_inputs(inputs, input, self.path)
        batch_size = at_least_one("batch_size", batch_size)
        parts = (inputs[start : start + batch_size] for start in range(0, len(inputs), batch_size))
        return run_batches(graph, widths, parts, len(inputs), what)

    def _encoded(self, out: Mapping[str, Floats32]) -> Encoded:
        return Encoded(out["vector"], out.get("query", out["vector"]), out.get("code"), self.sha256)

    @property
    def backbone_sha256(self) -> str | None:
        """SHA-256 of a split encoder's backbone; equal values mean equal features.

        It covers graph, weights and preprocessing. `None` if the encoder is a single graph or a
        variant runs.
        """
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
            return checked_inputs(inputs, input, self.path)
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
        return self._encoded(self._run(head, self._widths, features, input, batch_size))

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
            why = f"runs its variant '{self.variant}'"
            advice = "Leave the variant out."
            if entry is None:
                why = "has an encoder of one graph"
                advice = "Export it with --split (in Python split=True)."
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

        decoded = ahead(pixels, enumerate(images), workers=cores(), most=2 * batch_size)
        with showing(progress), Meter("encoding", len(images), "images") as meter:

            def batches() -> Iterator[Pixels]:
                while rows := list(itertools.islice(decoded, batch_size)):
                    yield np.stack(rows)
                    meter.update(len(rows))

            encoder = self._sessions.encoder
            widths = self._widths
            return self._encoded(run_batches(encoder, widths, batches(), len(images)))

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
        session = self._sessions.rescorer
        if session is None:
            why = "the distances of its vectors order the results"
            raise BundleError(f"The bundle {self.path} has no rescorer: {why}.")
        feeds = {}
        for name, codes in (("query", query_codes), ("items", item_codes)):
            if codes.ndim != 2 or codes.shape[1] != self.manifest.code:
                raise DataError(
                    f"Codes of shape (N, {self.manifest.code}) are needed, not {codes.shape}."
                )
            feeds[name] = np.ascontiguousarray(codes, dtype=np.float32)
        if not len(query_codes) or not len(item_codes):
            return np.empty((len(query_codes), len(item_codes)), dtype=np.float32)
        return np.asarray(session(["distance"], feeds)[0], dtype=np.float32)

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
