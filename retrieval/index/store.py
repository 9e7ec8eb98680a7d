"""The index folder: open it, check every bit of it, search it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, ValidationError

from retrieval.bundle import Bundle, Device, Encoded
from retrieval.errors import DataError, StoreError
from retrieval.index.backends import Floats, IndexBackend, Rows, checked_search, make_backend
from retrieval.index.files import SUMS, check_sums, damaged
from retrieval.index.items import Item, Items
from retrieval.manifest import FileName, Part, Sha256, parse_json, problems_of, sha256_of
from retrieval.merging import best_score, nearest_of

FORMAT = 1
_BLOCK = 256  # queries at a time: bounds the memory of measuring candidates
_MARGIN = 8  # candidates beyond k: FAISS's matrix products swap neighbours that differ in the seventh digit


class BundleRecord(Part):
    """Which bundle made the vectors. Only it may encode queries."""

    name: str
    sha256: Sha256
    variant: str | None = None


class BackendRecord(Part):
    """Which back end proposes candidates, with which parameters."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)


class PartRecord(Part):
    """One file of the back end, over columns `start` to `stop` of the vectors."""

    file: FileName
    start: Annotated[int, Field(ge=0)]
    stop: PositiveInt


class IndexManifest(Part):
    """`index.json`.

    Attributes:
        format: version of the index folder's format; 1.
        created: when, ISO 8601.
        bundle: what encodes queries; its copy lies in `bundle/`.
        backend: what proposes candidates.
        parts: the back end's files, one for each sub-space.
        count: number of items.
        vector: width of the vectors in `vectors.npy`.
        code: width of the codes in `codes.npy`; None when there are none.
        recall_at_10: of an approximate back end, measured on the items themselves when the index was built.
    """

    format: Literal[1] = 1
    created: str
    bundle: BundleRecord
    backend: BackendRecord
    parts: tuple[PartRecord, ...]
    count: PositiveInt
    vector: PositiveInt
    code: PositiveInt | None = None
    recall_at_10: float | None = None

    def files(self) -> list[str]:
        """Return every file that the index needs, relative to its folder."""
        codes = ["codes.npy"] if self.code is not None else []
        return [
            "index.json",
            "items.sqlite",
            "vectors.npy",
            *codes,
            "bundle/manifest.json",
            *(p.file for p in self.parts),
        ]


@dataclass(frozen=True)
class Hit:
    """One answer: smaller distance is closer. `path` is the indexed file, None for features."""

    id: int
    key: str
    label: str | None
    distance: float
    metadata: Mapping[str, Any]
    path: Path | None = None


class Index:
    """An opened index. Searching changes nothing and is safe in threads.

    Attributes:
        path: the folder.
        manifest: its `index.json`.
        bundle: encodes queries and, where it has a rescorer, orders candidates.
        sha256: of the list of checksums: names exactly this index.
    """

    def __init__(
        self,
        path: Path,
        manifest: IndexManifest,
        bundle: Bundle,
        backends: list[IndexBackend],
        items: Items,
        vectors: Floats,
        codes: Floats | None,
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.bundle = bundle
        self._backends = backends
        self._items = items
        self._vectors = vectors
        self._codes = codes
        self.sha256 = sha256_of(path / SUMS)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        threads: int | None = None,
        device: Device = "auto",
        plugins: Iterable[str] = (),
    ) -> Index:
        """Check every file of an index folder against its SHA-256, then load it.

        Args:
            path: the folder that `retrieval index` wrote.
            threads: of one call of the encoder; None leaves it to ONNX Runtime.
            device: of the encoder: "auto", "cpu" or "cuda".
            plugins: files or modules of a third-party back end that is not installed.

        Raises:
            StoreError: missing, altered, of another format.
            BundleError: its bundle cannot be used.
            PluginError: its back end's plugin is not there.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise StoreError(
                f"{folder} is not an index: there is no such folder. Make one with 'retrieval index'."
            )
        if not (folder / "index.json").is_file() and not (folder / SUMS).is_file():
            raise StoreError(
                f"{folder} is not an index: it has no index.json. Make one with 'retrieval index'."
            )
        listed = check_sums(folder)
        where = folder / "index.json"
        if where.name not in listed:
            raise damaged(folder, [f"{SUMS} does not list {where.name}"])
        text = where.read_bytes()
        parse_json(text, where, "index", StoreError, frozenset({FORMAT}))
        try:
            manifest = IndexManifest.model_validate_json(text)
        except ValidationError as fault:
            raise StoreError(f"{where} cannot be used:\n{problems_of(fault)}") from None
        if missing := [name for name in manifest.files() if name not in listed]:
            raise damaged(folder, [f"{SUMS} does not list {name}" for name in missing])
        bundle = Bundle.open(
            folder / "bundle", variant=manifest.bundle.variant, threads=threads, device=device
        )
        backends = []
        for part in manifest.parts:
            backend = make_backend(manifest.backend.name, manifest.backend.options, plugins)
            backend.load(folder / part.file)
            backends.append(backend)
        items = Items(folder / "items.sqlite")
        vectors = _map(folder / "vectors.npy", (manifest.count, manifest.vector))
        codes = None if manifest.code is None else _map(folder / "codes.npy", (manifest.count, manifest.code))
        if (
            items.count != manifest.count
            or bundle.sha256 != manifest.bundle.sha256
            or (bundle.has_code and codes is None)
        ):
            raise StoreError(
                f"The index {folder} contradicts itself: its items, bundle and index.json differ."
            )
        return cls(folder, manifest, bundle, backends, items, vectors, codes)

    def __len__(self) -> int:
        return self.manifest.count

    def search(
        self, queries: Encoded | NDArray[Any], k: int = 10, *, candidates: int | None = None
    ) -> list[list[Hit]]:
        """Return the nearest items of each query, nearest first; equal distances by id.

        Without a rescorer the distance is Euclidean, measured on the stored vectors (with sub-spaces, what the bundle's
        merge makes of them: `retrieval.merging`). With one, it is the rescorer's.

        Args:
            queries: what the bundle's encoder gave, or vectors (Q, P) or (P,) where there is no rescorer.
            k: how many; all items when there are fewer.
            candidates: how many the rescorer is given, in each sub-space; the bundle's own number by default.

        Raises:
            DataError: vectors of another width, NaN, k below 1, or vectors alone where a rescorer needs codes.
        """
        if k < 1:
            raise DataError(f"k must be at least 1, not {k}.")
        if candidates is not None and candidates < 1:
            raise DataError(f"The number of candidates must be at least 1, not {candidates}.")
        query, code = self._checked(queries)
        k = min(k, len(self))
        hits: list[list[Hit]] = []
        for start in range(0, len(query), _BLOCK):
            part = query[start : start + _BLOCK]
            part_code = None if code is None else code[start : start + _BLOCK]
            hits += self._hits(self._nearest(part, part_code, k, candidates))
        return hits

    def _checked(self, queries: Encoded | NDArray[Any]) -> tuple[Floats, Floats | None]:
        rescores = self.bundle.manifest.rescorer is not None
        if isinstance(queries, Encoded):
            query, code = queries.query, queries.code
        else:
            query, code = np.atleast_2d(np.asarray(queries)), None
            if query.dtype.kind not in "fiu":
                raise DataError(f"A query vector holds real numbers, not {query.dtype}.")
        if query.ndim != 2 or query.shape[1] != self.manifest.vector:
            raise DataError(
                f"A query vector of this index has {self.manifest.vector} numbers, not {query.shape[-1]}."
            )
        with np.errstate(over="ignore"):
            query = np.ascontiguousarray(query, dtype=np.float32)
        if not np.isfinite(query).all():
            raise DataError("A query vector holds NaN, infinity or a number beyond float32.")
        if rescores and code is None:
            raise DataError(
                "This index orders its answers with a rescorer, which needs the query's code: give an image "
                "(or features), not an encoded vector."
            )
        return query, code if rescores else None

    def _nearest(
        self, query: Floats, code: Floats | None, k: int, candidates: int | None
    ) -> list[tuple[Rows, NDArray[np.float64]]]:
        """Return rows and distances of each query's k nearest."""
        rescorer = self.bundle.manifest.rescorer
        wanted = max(k + _MARGIN, candidates or (rescorer.candidates if rescorer else 0))
        wanted = min(wanted, len(self))
        name = self.manifest.backend.name
        found = [
            checked_search(backend, name, query[:, part.start : part.stop], wanted, len(self))
            for backend, part in zip(self._backends, self.manifest.parts, strict=True)
        ]
        answers = []
        for number, rows in enumerate(np.concatenate(found, axis=1)):
            rows = np.unique(rows[rows >= 0])  # sorted, so that a stable order breaks ties by id
            if code is not None and self._codes is not None:
                distances = self.bundle.rescore(code[number : number + 1], self._codes[rows])[0].astype(
                    np.float64
                )
                if not np.isfinite(distances).all():
                    raise DataError("The rescorer gives NaN or infinity for this query.")
            else:
                distances = self._measure(query[number], rows, k)
            order = np.argsort(distances, kind="stable")[:k]
            answers.append((rows[order], distances[order]))
        return answers

    def _measure(self, query: Floats, rows: Rows, k: int) -> NDArray[np.float64]:
        """Return Euclidean distances (n,), merged over the sub-spaces as the bundle says, in float64."""
        squared = (self._vectors[rows].astype(np.float64) - query) ** 2
        parts = [squared[:, part.start : part.stop].sum(axis=1) for part in self.manifest.parts]
        distances = np.sqrt(parts)
        if self.bundle.manifest.merge == "score":
            return best_score(distances, k, [space.weight for space in self.bundle.manifest.subspaces])
        return nearest_of(distances)

    def _hits(self, answers: list[tuple[Rows, NDArray[np.float64]]]) -> list[list[Hit]]:
        items = self._items.get([int(row) for rows, _ in answers for row in rows])

        def hit(row: int, distance: float) -> Hit:
            item = items[row]
            return Hit(row, item.key, item.label, distance, item.metadata, item.path)

        return [
            [hit(int(row), float(distance)) for row, distance in zip(rows, distances, strict=True)]
            for rows, distances in answers
        ]

    def item(self, number: int) -> Item | None:
        """Return an item by its id, or None."""
        return self._items.get([number]).get(number)

    def vector(self, number: int) -> Floats:
        """Return the stored vector (P,) of an item by its id."""
        return np.array(self._vectors[number])

    def close(self) -> None:
        """Close the files; the index cannot be searched any more."""
        self._items.close()
        self._vectors = np.empty((0, self.manifest.vector), dtype=np.float32)  # lets go of the mapped file
        self._codes = None

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _map(path: Path, shape: tuple[int, int]) -> Floats:
    """Map a float32 array from its file."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as fault:
        raise StoreError(f"{path} cannot be read: {fault}.") from fault
    if array.shape != shape or array.dtype != np.float32:
        raise StoreError(
            f"{path} holds {array.dtype} {array.shape} instead of float32 {shape}. Build the index again."
        )
    return array  # type: ignore[no-any-return]
