"""The index folder: open it, check every bit of it, search it."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError, RetrievalError, StoreError
from retrieval.host.plugin_calls import failure
from retrieval.serving.bundle import Bundle
from retrieval.serving.files.places import StrPath, instead
from retrieval.serving.files.snapshot import Held, Snapshot, Unusable, Watch, at_one_moment, close_all
from retrieval.serving.filters import Filter
from retrieval.serving.index.backends import make_backend
from retrieval.serving.index.base import Hit, Index, candidates_of, measured
from retrieval.serving.index.contract import Floats, IndexBackend, Rows, called, checked_search
from retrieval.serving.index.files import SUMS, damaged, hold_listed, read_sums
from retrieval.serving.index.items import Item, Items
from retrieval.serving.index.manifest import INDEX, IndexManifest, PartRecord, contradictory, parse_index
from retrieval.serving.manifest import FILE, parse_manifest
from retrieval.serving.providers import Device
from retrieval.serving.stages import stage

_HEADER = 20_000  # bytes that are enough for the header of an array
_ROWS = 65_536  # vectors at a time that are looked through for NaN


class FrozenIndex(Index):
    """An opened folder of format 1: nothing in it changes, and all of it was compared with its checksums.

    Attributes:
        path: the folder.
        manifest: its `index.json`.
        sha256: of the list of checksums: names exactly this index.
        summary: what building it did, where `retrieval.build_index` gave it; else None.
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
        sha256: str,
        watch: Watch,
    ) -> None:
        self.path = path
        self.manifest = manifest
        self._bundle = bundle
        self._sha256 = sha256
        self._backends = backends
        self._items = items
        self._vectors = vectors
        self._codes = codes
        self._watch = watch

    @classmethod
    def open(
        cls,
        path: StrPath,
        *,
        threads: int | None = None,
        device: Device = "auto",
        plugins: Iterable[str] = (),
        signed_by: StrPath | None = None,
    ) -> FrozenIndex:
        """Check every file of an index folder against its SHA-256, then load it.

        Args:
            path: the folder that `retrieval index` wrote.
            threads: of one call of the encoder; None leaves it to ONNX Runtime.
            device: of the encoder: "auto", "cpu" or "cuda".
            plugins: files or modules of a third-party back end that is not installed.
            signed_by: a public key's file; an index that its holder did not sign is refused.

        Raises:
            StoreError: missing, altered, of another format.
            BundleError: its bundle cannot be used.
            PluginError: its back end's plugin is not there.
        """
        folder = Path(path)
        try:
            return at_one_moment(
                folder,
                lambda opened: cls._load(opened, threads, device, list(plugins), signed_by),
                StoreError,
            )
        except Unusable as fault:
            raise StoreError(f"{folder} is not an index: {fault}.{instead(folder, 'index')}") from None

    @classmethod
    def _load(
        cls,
        folder: Snapshot,
        threads: int | None,
        device: Device,
        plugins: list[str],
        signed_by: StrPath | None,
    ) -> FrozenIndex:
        path = folder.path
        if not folder.has(INDEX) and not folder.has(SUMS):
            raise StoreError(f"{path} is not an index: it has no {INDEX}.{instead(path, 'index')}")
        sums, text = read_sums(folder)
        if signed_by is not None:
            from retrieval.serving.signatures import check_signature

            check_signature(folder, "index", text, signed_by)
        held = hold_listed(folder, sums)
        try:
            if INDEX not in held:
                raise damaged(path, [f"{SUMS} does not list {INDEX}"])
            manifest = parse_index(path / INDEX, held[INDEX].bytes())
            if missing := [name for name in manifest.files() if name not in held]:
                raise damaged(path, [f"{SUMS} does not list {name}" for name in missing])
            watch = Watch(folder)
            bundle = _bundle(path, manifest, held, watch, threads, device)
            manifest.check_bundle(bundle.manifest, bundle.sha256, path)
            vectors = _map(path, "vectors.npy", held, (manifest.count, manifest.vector))
            codes = None
            if manifest.code is not None:
                codes = _map(path, "codes.npy", held, (manifest.count, manifest.code))
            try:
                items = Items(held["items.sqlite"].view())
            except StoreError as fault:
                raise StoreError(
                    f"{path / 'items.sqlite'} cannot be read: {fault}. Build the index again."
                ) from None
            if items.count != manifest.count:
                raise contradictory(path, "its items and index.json differ")
            backends = [_backend(path, manifest, part, held[part.file], plugins) for part in manifest.parts]
        finally:
            close_all(held)
        return cls(
            path, manifest, bundle, backends, items, vectors, codes, hashlib.sha256(text).hexdigest(), watch
        )

    def changed(self) -> str | None:
        """Return a sentence when the files on the disk are no longer what was opened; costs a few looks at the file system.

        Answers stay what they were: everything that was verified is held in memory.
        """
        return self._watch.changed()

    def __len__(self) -> int:
        return self.manifest.count

    def __repr__(self) -> str:
        said = self.manifest
        return f"Index {self.path}: {said.count:,} items, {said.backend.name}, vectors of {said.vector}"

    @property
    def bundle(self) -> Bundle:
        """Encodes queries and, where it has a rescorer, orders candidates."""
        return self._bundle

    @property
    def sha256(self) -> str:
        """Of the list of checksums."""
        return self._sha256

    def _answers(
        self,
        query: Floats,
        code: Floats | None,
        bundle: Bundle,
        k: int,
        candidates: int | None,
        where: Filter | None,
    ) -> list[list[Hit]]:
        if where is not None:
            raise DataError(
                f"The index {self.path} is of format 1, which is searched without filters. "
                f"Lift it to the living format: retrieval index migrate {self.path}"
            )
        k = min(k, len(self))
        wanted = min(candidates_of(bundle, k, candidates), len(self))
        name = self.manifest.backend.name
        found = [
            checked_search(backend, name, query[:, part.start : part.stop], wanted, len(self))
            for backend, part in zip(self._backends, self.manifest.parts, strict=True)
        ]
        answers = []
        for number, rows in enumerate(np.concatenate(found, axis=1)):
            rows = np.unique(rows[rows >= 0])  # sorted, so that a stable order breaks ties by id
            codes = None if code is None or self._codes is None else self._codes[rows]
            own = None if code is None else code[number]
            distances = measured(bundle, query[number], own, self._vectors[rows], codes, k)
            order = np.argsort(distances, kind="stable")[:k]
            answers.append((rows[order], distances[order]))
        return self._hits(answers)

    def _hits(self, answers: list[tuple[Rows, NDArray[np.float64]]]) -> list[list[Hit]]:
        with stage("items"):
            items = self._items.get([int(row) for rows, _ in answers for row in rows])

        def hit(row: int, distance: float) -> Hit:
            item = items[row]
            return Hit(row, item.key, item.label, distance, item.metadata, item.path)

        return [
            [hit(int(row), float(distance)) for row, distance in zip(rows, distances, strict=True)]
            for rows, distances in answers
        ]

    def item(self, number: int | str) -> Item | None:
        """Return an item by its number, or None."""
        self.require_open()
        return self._items.get([int(number)]).get(int(number))

    def vector(self, number: int | str) -> Floats:
        """Return the stored vector (P,) of an item by its id."""
        self.require_open()
        return np.array(self._vectors[int(number)])

    def arrays(self, number: int) -> dict[str, Floats]:
        """Return what is stored of an item by its number: "vector" (P,), and "code" (C,) where there are codes."""
        codes = {} if self._codes is None else {"code": self._codes[number]}
        return {"vector": self._vectors[number], **codes}

    def require_open(self) -> None:
        """Raise a `StoreError` once the index is closed."""
        if len(self._vectors) != len(self):
            raise StoreError(f"The index {self.path} was closed. Open it again with retrieval.open_index.")

    def close(self) -> None:
        """Close the files; the index cannot be searched any more."""
        self._items.close()
        self._vectors = np.empty((0, self.manifest.vector), dtype=np.float32)  # lets go of the mapped file
        self._codes = None


def _bundle(
    path: Path,
    manifest: IndexManifest,
    held: Mapping[str, Held],
    watch: Watch,
    threads: int | None,
    device: Device,
) -> Bundle:
    """Load the bundle in an index, whose files are held."""
    text = held[f"bundle/{FILE}"].bytes()
    said = parse_manifest(path / "bundle" / FILE, text)
    own = {name: held[f"bundle/{name}"] for name in said.files if f"bundle/{name}" in held}
    if missing := [name for name in said.files if name not in own]:
        raise damaged(path, [f"{SUMS} does not list bundle/{name}" for name in missing])
    if other := [
        name
        for name, record in said.files.items()
        if (own[name].sha256, own[name].size) != (record.sha256, record.bytes)
    ]:
        raise damaged(path, [f"bundle/{name} is not what the bundle's manifest says" for name in other])
    return Bundle.load(path / "bundle", said, text, own, watch, manifest.bundle.variant, threads, device)


def _backend(
    path: Path, manifest: IndexManifest, part: PartRecord, held: Held, plugins: Iterable[str]
) -> IndexBackend:
    """Load a back end of an opened index.

    Raises:
        StoreError: it cannot read its file, or the file is of other vectors.
        PluginError: the back end's plugin is not there.
    """
    backend = make_backend(manifest.backend.name, manifest.backend.options, plugins)
    try:
        backend.load(held.path())
        backend.check(manifest.count, part.stop - part.start)
    except Exception as fault:  # a plugin's may be anything
        ours = isinstance(fault, RetrievalError)
        said = str(fault) if ours else failure(called(manifest.backend.name, "load"), fault)
        raise StoreError(
            f"{path / part.file} cannot be used: {said.rstrip('.')}. Build the index again."
        ) from fault
    held.close()  # before the next part is read into memory
    return backend


def _map(path: Path, name: str, held: Mapping[str, Held], shape: tuple[int, int]) -> Floats:
    """Return a held `.npy` file as an array, float32 and finite, without a copy."""
    view = held[name].view()
    try:
        header = io.BytesIO(view[:_HEADER])
        if np.lib.format.read_magic(header) != (1, 0):
            raise ValueError("not the version of NumPy's format that an index has")
        found, by_columns, kind = np.lib.format.read_array_header_1_0(header)
        array = np.frombuffer(view, kind, math.prod(found), header.tell()).reshape(found)
    except (
        Exception
    ) as fault:  # NumPy has Python's own parser read the header, which raises whatever it likes
        raise StoreError(f"{path / name} cannot be read: {fault}.") from fault
    if array.shape != shape or array.dtype != np.float32 or by_columns:
        raise StoreError(
            f"{path / name} holds {array.dtype} {array.shape} instead of float32 {shape}. Build the index again."
        )
    if not all(np.isfinite(array[start : start + _ROWS]).all() for start in range(0, len(array), _ROWS)):
        raise StoreError(f"{path / name} holds NaN or infinity. Build the index again.")
    return array
