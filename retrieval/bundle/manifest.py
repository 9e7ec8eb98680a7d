"""A bundle's folder: its `manifest.json`, and its files, of which only verified content is used."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    field_serializer,
    model_validator,
)

from retrieval.base.files import write_text
from retrieval.base.folder_kinds import instead
from retrieval.base.machine import available_memory
from retrieval.base.photo_files import address_of
from retrieval.base.regular_files import open_plain
from retrieval.base.strict_json import parse_json, problems_of
from retrieval.bundle.probe import Probe, TextProbe
from retrieval.errors import BundleError, RetrievalError
from retrieval.images.preprocessing import Preprocessing

T = TypeVar("T")
FILE = "manifest.json"
BASE_FILE = "base.json"
"""In an adapter bundle, the manifest of the base."""
MANIFEST_FORMAT = 1
MANIFEST_BYTES = 4_000_000
"""Size limit of a manifest."""
_TRIES = 100
"""Maximum number of attempts to read a folder that is being replaced."""
_NUMBERS = 1 << 26
"""Limit on the numbers in an item's input, and in a vector: 67 million."""
_RESIZE = 8192
"""Limit on the shorter side of resized images, in pixels."""


def is_plain_name(name: str) -> bool:
    """Return whether `name` is a printable file name without a folder."""
    return (
        0 < len(name) <= 255
        and name.isprintable()
        and name not in {".", ".."}
        and not set("/\\:") & set(name)
    )


def _plain_name(name: str) -> str:
    """Refuse a file name that could lead outside the folder; manifests may be untrusted."""
    if not is_plain_name(name) or name == FILE:
        raise ValueError(f"'{name}' is not the plain name of a file in the bundle")
    return name


Width = Annotated[int, Field(gt=0, le=_NUMBERS)]
FileName = Annotated[str, AfterValidator(_plain_name)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class ManifestEntry(BaseModel):
    """Base class of all manifest entries; refuses unknown keys and non-finite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Input(ManifestEntry):
    """The encoder's "input": raw pixels (N, C, H, W), or features (N, F)."""

    kind: Literal["image", "features"]
    dtype: Literal["uint8", "float32"]
    shape: tuple[PositiveInt, ...]
    preprocessing: Preprocessing | None = None

    @field_serializer("shape")
    def _shape_as_list(self, shape: tuple[int, ...]) -> list[int]:
        return list(shape)

    @model_validator(mode="after")
    def _fits(self) -> Input:
        if math.prod(self.shape) > _NUMBERS:
            numbers = math.prod(self.shape)
            raise ValueError(f"one item has {numbers:,} numbers; the limit is {_NUMBERS:,}")
        if self.kind == "image":
            if self.preprocessing is None:
                raise ValueError("an encoder of images needs its 'preprocessing'")
            resize = self.preprocessing.resize
            if resize is not None and resize > _RESIZE:
                limit = f"the limit is {_RESIZE:,}"
                raise ValueError(f"images are resized to {resize:,} pixels; {limit}")
            if self.dtype != "uint8" or self.shape != self.preprocessing.shape:
                raise ValueError(
                    f"an encoder of images takes uint8 {list(self.preprocessing.shape)} by its"
                    f" preprocessing, not {self.dtype} {list(self.shape)}"
                )
        elif self.preprocessing is not None or self.dtype != "float32" or len(self.shape) != 1:
            raise ValueError(
                "an encoder of features takes float32 of shape [F] and has no preprocessing"
            )
        return self


class DistanceEntry(ManifestEntry):
    """The distance that orders search results.

    If `exact`, the Euclidean distance of the vectors gives the same order as this distance, and the
    distance that a search reports is measured on the vectors. With `measure` "inner", the reported
    distance is √(2 − 2 p) of the inner product p.
    """

    name: str
    exact: bool
    measure: Literal["euclidean", "inner"] = "euclidean"

    def __str__(self) -> str:
        if self.name == "Euclidean":
            return "Euclidean distance"
        return f"distance {self.name}"


class SubspaceEntry(ManifestEntry):
    """A sub-space: columns `start` to `stop` of the vector, searched for their own candidates.

    `weight` is used if the manifest's `merge` is "score".
    """

    name: str
    start: Annotated[int, Field(ge=0)]
    stop: PositiveInt
    weight: Annotated[float, Field(gt=0)] = 1.0

    @model_validator(mode="after")
    def _ordered(self) -> SubspaceEntry:
        if self.stop <= self.start:
            columns = f"column {self.stop}, before it starts at {self.start}"
            raise ValueError(f"sub-space '{self.name}' stops at {columns}")
        return self


class RescorerEntry(ManifestEntry):
    """The graph that orders candidates: "query" (Q, C) and "items" (N, C) to "distance" (Q, N).

    Attributes:
        file: name of the graph's file in the bundle.
        candidates: default number of candidates to rescore.
        overlap: share of the ten exactly nearest items that are among the candidates, by number of
            candidates.
        items: number of real items on which `overlap` was measured; a larger index has a smaller
            overlap.
    """

    file: FileName
    candidates: PositiveInt = 200
    overlap: dict[str, float] | None = None
    items: PositiveInt | None = None


class SplitEntry(ManifestEntry):
    """An encoder of two graphs, in which the head takes the backbone's features (N, `features`)."""

    backbone: FileName
    head: FileName
    features: Width


class AdapterEntry(ManifestEntry):
    """A small graph that follows the encoder of another bundle, the base.

    Attributes:
        file: name of the graph's file; the graph maps "input" (N, `width`) to "vector".
        base: SHA-256 of the base's manifest, which this bundle keeps as `base.json`.
        width: width of the base's vectors.
    """

    file: FileName
    base: Sha256
    width: Width


class Verified(ManifestEntry):
    """Difference between torch and ONNX Runtime, measured at export."""

    tolerance: float
    largest_difference: float
    items: PositiveInt


class TextEntry(ManifestEntry):
    """A second encoder, whose vectors of texts lie in the same space as those of items.

    Attributes:
        file: name of the graph's file; the graph maps "ids" and "mask" (N, L) int64 to "vector",
            which is as wide as the encoder's.
        tokenizer: name of the tokenizer's file, a `tokenizer.json` of the package `tokenizers`.
        length: largest number of tokens of a text, to which the tokenizer cuts longer texts.
        verified: difference between torch and ONNX Runtime on texts.
        probe: a text and its vector, to detect a broken model later.
    """

    file: FileName = "text.onnx"
    tokenizer: FileName = "tokenizer.json"
    length: Annotated[int, Field(gt=0, le=4096)]
    verified: Verified
    probe: TextProbe | None = None


class Cosine(ManifestEntry):
    """Cosine between a variant's vectors and those of the encoder itself, on real items."""

    mean: float
    min: float


class Recall(ManifestEntry):
    """Recall@1 of the encoder (before) and of the variant (after), on the same real items."""

    before: float
    after: float


class Variant(ManifestEntry):
    """The encoder in another precision, with its measured drift."""

    file: FileName
    cosine: Cosine
    recall_at_1: Recall | None = None


class FileRecord(ManifestEntry):
    """SHA-256 and size of one file of the bundle."""

    sha256: Sha256
    bytes: Annotated[int, Field(ge=0)]


class Manifest(ManifestEntry):
    """The manifest of a bundle; `docs/bundle.md` explains each key."""

    format: Literal[1] = 1
    name: str
    created: str
    versions: dict[str, str]
    opset: PositiveInt
    input: Input
    vector: Width
    code: Width | None = None
    query_vectors: bool = False
    normalized: bool
    distance: DistanceEntry
    subspaces: tuple[SubspaceEntry, ...] = ()
    merge: Literal["min", "score"] = "min"
    rescorer: RescorerEntry | None = None
    encoder: FileName | None = "encoder.onnx"
    split: SplitEntry | None = None
    adapter: AdapterEntry | None = None
    text: TextEntry | None = None
    variants: dict[str, Variant] = {}
    verified: Verified
    probe: Probe | None = None
    evaluation: dict[str, float] | None = None
    files: dict[FileName, FileRecord] = {}
    checksum: Sha256 | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        if (self.encoder is None) == (self.split is None):
            raise ValueError("a bundle has either an 'encoder' of one graph or a 'split' into two")
        if self.split is not None and self.input.kind != "image":
            raise ValueError("an encoder of features has no backbone to be split off")
        if self.rescorer is not None and self.code is None:
            raise ValueError("a bundle with a rescorer needs 'code', the width of its codes")
        if not self.distance.exact and self.rescorer is None and not self.subspaces:
            name = self.distance.name
            raise ValueError(f"distance '{name}' is not exact, so the bundle needs a rescorer")
        if self.distance.measure == "inner" and (self.subspaces or self.rescorer is not None):
            raise ValueError(
                "distance measure 'inner' is of whole vectors, without sub-spaces or rescorer"
            )
        if len({space.name for space in self.subspaces}) < len(self.subspaces):
            raise ValueError("two sub-spaces have the same name")
        if self.adapter is not None and not self.compares_by_euclidean:
            raise ValueError(
                "the vectors of an 'adapter' are compared whole, by their Euclidean distance, and"
                " have neither codes nor an output 'query'"
            )
        if self.text is not None and self.code is not None:
            raise ValueError("a bundle with codes and a rescorer cannot have an encoder of 'text'")
        for space in self.subspaces:
            if space.stop > self.vector:
                column = f"column {space.stop} of {self.vector}"
                raise ValueError(f"sub-space '{space.name}' stops at {column}")
        return self

    def parts(self) -> dict[str, str]:
        """Return the role of each needed file, such as "encoder" or "rescorer", by file name."""
        parts = dict[str, str]()
        if self.text is not None:
            parts |= {self.text.file: "text encoder", self.text.tokenizer: "tokenizer"}
        if self.encoder is not None:
            parts[self.encoder] = "encoder"
        if self.split is not None:
            parts |= {self.split.backbone: "backbone", self.split.head: "head"}
        if self.rescorer is not None:
            parts[self.rescorer.file] = "rescorer"
        if self.adapter is not None:
            parts[self.adapter.file] = "adapter"
        for name, variant in self.variants.items():
            parts[variant.file] = f"variant '{name}'"
        return parts

    @property
    def outputs(self) -> dict[str, int]:
        """Width of each output of the encoder, before the adapter if there is one, by name."""
        if self.adapter is not None:
            return {"vector": self.adapter.width}
        widths = {"vector": self.vector}
        if self.query_vectors:
            widths["query"] = self.vector
        if self.rescorer is not None:
            widths["code"] = self.code or 0
        return widths

    @property
    def compares_by_euclidean(self) -> bool:
        """Whether the Euclidean distance of whole vectors, of queries and items, orders results."""
        return (
            self.distance.exact
            and self.distance.measure == "euclidean"
            and self.code is None
            and not (self.query_vectors or self.subspaces)
            and self.merge == "min"
        )

    @property
    def backbone_sha256(self) -> str | None:
        """Checksum over the backbone's SHA-256 and `input`. `None` if the encoder is one graph."""
        if self.split is None:
            return None
        graph = self.files[self.split.backbone].sha256
        return checksum_of({"graph": graph, "input": self.input.model_dump(mode="json")})


def checksum_of(content: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest's parsed JSON without its key "checksum"."""
    rest = {key: value for key, value in content.items() if key != "checksum"}
    # Sorted and without spaces, so that the layout of the file does not matter.
    text = json.dumps(rest, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Write `manifest.json` with the checksums of all other files; return the written manifest.

    Raises:
        BundleError: a file that the manifest names is missing.
    """
    files = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != FILE and not path.name.startswith("."):
            with path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            files[path.name] = FileRecord(sha256=sha256, bytes=path.stat().st_size)
    for name, purpose in manifest.parts().items():
        if name not in files:
            raise BundleError(f"The bundle's {purpose}, {folder / name}, was not written.")
    manifest = manifest.model_copy(update={"files": files, "checksum": None})
    # Older versions refuse unknown keys, so keys without a value are left out.
    optional = ("split", "adapter", "text", "probe")
    left_out = {key for key in optional if getattr(manifest, key) is None}
    # By way of JSON, because a reader computes it from the parsed file.
    checksum = checksum_of(json.loads(manifest.model_dump_json(exclude=left_out)))
    manifest = manifest.model_copy(update={"checksum": checksum})
    write_text(folder / FILE, manifest.model_dump_json(indent=2, exclude=left_out) + "\n")
    return manifest


def parse_manifest(path: Path, text: bytes) -> Manifest:
    """Return the checked manifest of a bundle; its files are not checked.

    Args:
        path: the manifest's file, for errors.
        text: its content.

    Raises:
        BundleError: the manifest has another format version, was altered, or has problems; the
            message lists them.
    """
    content = parse_json(text, path, "bundle", BundleError, frozenset({MANIFEST_FORMAT}))
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as fault:
        raise BundleError(f"{path} cannot be used:\n{problems_of(fault)}") from None
    if manifest.checksum != checksum_of(content):
        raise BundleError(
            f"{path} was altered: its checksum differs. Export or copy the bundle again; a manifest"
            " cannot be edited."
        )
    missing = [name for name in manifest.parts() if name not in manifest.files]
    if missing:
        raise BundleError(f"{path} cannot be used: it has no SHA-256 for {', '.join(missing)}.")
    adapter = manifest.adapter
    if adapter is not None:
        record = manifest.files.get(BASE_FILE)
        if record is None or record.sha256 != adapter.base:
            raise BundleError(
                f"{path} cannot be used: its adapter needs {BASE_FILE}, the manifest of its base,"
                " and 'base' must be its SHA-256."
            )
    return manifest


class Unusable(Exception):
    """Raised for a file that cannot be read.

    The message completes a sentence that begins with the file's name, such as "is missing".
    """


def _read(folder: Path, name: str, *, size: int | None = None, most: int | None = None) -> bytes:
    """Return the content of a regular file; links are not followed.

    Args:
        folder: the bundle's folder.
        name: the file's name.
        size: the size that the file must have, in bytes.
        most: the largest size that the file may have, in bytes.

    Raises:
        Unusable: the file is missing, not a regular file, of another size, or unreadable.
        BundleError: the file does not fit into memory.
    """
    try:
        with open_plain(folder / name) as file:
            present = os.fstat(file.fileno()).st_size
            if size is not None and present != size:
                raise Unusable(f"has {present:,} bytes instead of {size:,}")
            if most is not None and present > most:
                raise Unusable(f"has {present:,} bytes; the limit is {most:,}")
            room = available_memory()
            if present > room:
                raise BundleError(
                    f"{folder / name} needs {present / 1e9:,.1f} GB of memory, but only"
                    f" {room / 1e9:,.1f} GB are available on this machine."
                )
            # A file that grows meanwhile is not read beyond the size that was checked.
            return file.read(present)
    except FileNotFoundError:
        raise Unusable("is missing") from None
    except OSError as fault:
        reason = fault.strerror or str(fault)
        if reason.startswith("it is"):  # `open_plain` worded this reason
            raise Unusable(reason.removeprefix("it ")) from None
        raise Unusable(f"cannot be read ({reason})") from None


def opened_whole(path: Path, load: Callable[[], T]) -> T:
    """Load a bundle from its folder; if the folder is replaced meanwhile, load the new one.

    Raises:
        BundleError: the folder does not exist or keeps being replaced, or `load` raises the error.
    """
    for _ in range(_TRIES):
        try:
            identity = _identity(path)
        except (OSError, ValueError) as fault:
            reason = f"it cannot be read ({getattr(fault, 'strerror', None) or fault})"
            if isinstance(fault, FileNotFoundError | NotADirectoryError):
                reason = "there is no such folder"
            # pathlib shortens an address to `s3:/bucket`; name it as the user typed it.
            name = address_of(path) or path
            advice = instead(path, "bundle")
            raise BundleError(f"{name} is not a bundle: {reason}.{advice}") from None
        try:
            return load()
        except RetrievalError:
            # In a folder that was replaced meanwhile, files of two bundles may have been read.
            with suppress(OSError):
                if _identity(path) == identity:
                    raise
    raise BundleError(
        f"{path} keeps being replaced while it is read. Try again when nothing writes to it."
    )


def manifest_text(folder: Path) -> bytes:
    """Return the text of a bundle's manifest.

    Raises:
        BundleError: the manifest is missing or cannot be read.
    """
    try:
        return _read(folder, FILE, most=MANIFEST_BYTES)
    except Unusable as fault:
        advice = instead(folder, "bundle")
        raise BundleError(f"{folder} is not a bundle: {FILE} {fault}.{advice}") from None


def read_files(folder: Path, files: Mapping[str, FileRecord]) -> dict[str, bytes]:
    """Read all recorded files of a bundle and check their sizes and SHA-256.

    Raises:
        BundleError: files are missing or were altered (the message lists them), or do not fit into
            memory.
    """
    contents = dict[str, bytes]()
    problems = []
    for name, record in files.items():
        # A copy often lacks several files, so the message lists all faults at once.
        try:
            content = _read(folder, name, size=record.bytes)
            if hashlib.sha256(content).hexdigest() != record.sha256:
                raise Unusable("was altered (its SHA-256 differs)")
            contents[name] = content
        except Unusable as fault:
            problems.append(f"{name} {fault}")
    if problems:
        raise BundleError(
            f"The bundle {folder} is damaged: {'; '.join(problems)}. Export or copy it again."
        )
    return contents


def _identity(path: Path) -> tuple[int, int]:
    """Return values that differ if another folder is at this path later."""
    # Device and inode, because an export replaces the whole folder by renaming.
    status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{path} is not a folder")
    return status.st_dev, status.st_ino
