"""An index's `index.json`: what it says, and whether it fits the bundle in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, ValidationError, model_validator

from retrieval.errors import StoreError
from retrieval.serving.files.strict_json import parse_json, problems_of
from retrieval.serving.manifest import Entry, FileName, Manifest, Sha256, Width

FORMAT = 1
INDEX = "index.json"


class BundleRecord(Entry):
    """Which bundle made the vectors. Only it may encode queries."""

    name: str
    sha256: Sha256
    variant: str | None = None


class BackendRecord(Entry):
    """Which back end proposes candidates, with which parameters."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)


class PartRecord(Entry):
    """One file of the back end, over columns `start` to `stop` of the vectors."""

    file: FileName
    start: Annotated[int, Field(ge=0)]
    stop: PositiveInt


class IndexManifest(Entry):
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
    parts: Annotated[tuple[PartRecord, ...], Field(min_length=1)]
    count: PositiveInt
    vector: Width
    code: Width | None = None
    recall_at_10: float | None = None

    def files(self) -> list[str]:
        """Return every file that the index needs, relative to its folder."""
        codes = ["codes.npy"] if self.code is not None else []
        return [
            INDEX,
            "items.sqlite",
            "vectors.npy",
            *codes,
            "bundle/manifest.json",
            *(p.file for p in self.parts),
        ]

    @model_validator(mode="after")
    def _fits(self) -> IndexManifest:
        for part in self.parts:
            if not part.start < part.stop <= self.vector:
                raise ValueError(
                    f"part '{part.file}' is columns {part.start} to {part.stop} of {self.vector}"
                )
        names = self.files()
        if len(set(names)) < len(names):
            raise ValueError("two parts are one file, or a part is one of the index's own")
        return self

    def check_bundle(self, bundle: Manifest, sha256: str, path: Path) -> None:
        """Refuse an index that was not made with the bundle in it.

        Raises:
            StoreError: another bundle, or vectors, codes or parts that are not what it gives.
        """
        spans = [(space.start, space.stop) for space in bundle.subspaces] or [(0, bundle.vector)]
        if (
            sha256 != self.bundle.sha256
            or bundle.vector != self.vector
            or (bundle.rescorer is not None and bundle.code != self.code)
            or [(part.start, part.stop) for part in self.parts] != spans
        ):
            raise contradictory(path, "its bundle and index.json differ")


def contradictory(path: Path, how: str) -> StoreError:
    """Return the error for an index whose files are whole, but do not belong together."""
    return StoreError(
        f"The index {path} contradicts itself: {how}. Build it again with 'retrieval index create --replace'."
    )


def parse_index(path: Path, text: bytes) -> IndexManifest:
    """Return what an `index.json` says, checked.

    Raises:
        StoreError: not JSON, of another format, or with problems, each of which is named.
    """
    parse_json(text, path, "index", StoreError, frozenset({FORMAT}))
    try:
        return IndexManifest.model_validate_json(text)
    except ValidationError as fault:
        raise StoreError(f"{path} cannot be used:\n{problems_of(fault)}") from None
