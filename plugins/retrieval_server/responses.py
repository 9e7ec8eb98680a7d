"""Responses of the server as frozen dataclasses.

A client ignores members that only a newer server sends. The server's OpenAPI document is generated
from the same classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, SupportsIndex, overload

from retrieval.base.display_tables import html_hits, text_table


@dataclass(frozen=True)
class Hit:
    """One search result; a smaller distance is closer, and null if no vectors were compared."""

    id: str
    key: str
    label: str | None
    distance: float | None
    metadata: dict[str, Any]
    image_url: str | None
    thumbnail_url: str | None = None
    score: float | None = None


@dataclass(frozen=True)
class FacetCount:
    """A value of a field, and the number of hits that have it."""

    value: Any
    count: int


@dataclass(frozen=True, repr=False)
class Results(Sequence[Hit]):
    """A sequence of the hits of one search, nearest first, which prints as a table.

    `search_id` names the search in feedback; only a server that takes feedback sends it. `explored`
    says that the hits are interleaved with those of a metric on trial.
    """

    results: tuple[Hit, ...]
    facets: dict[str, tuple[FacetCount, ...]] | None = field(default=None, kw_only=True)
    search_id: str | None = field(default=None, kw_only=True)
    explored: bool | None = field(default=None, kw_only=True)

    def __repr__(self) -> str:
        return text_table(self)

    def _repr_html_(self) -> str:
        return html_hits(self)

    def __len__(self) -> int:
        return len(self.results)

    @overload
    def __getitem__(self, key: SupportsIndex) -> Hit: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Hit, ...]: ...
    def __getitem__(self, key: Any) -> Any:
        return self.results[key]


@dataclass(frozen=True, repr=False)
class SearchAnswer(Results):
    """Hits of a search, nearest first, and the time that the server took in milliseconds.

    `bundle` is the SHA-256 of the bundle whose vectors were compared.
    """

    took_ms: float
    explain: dict[str, Any] | None = None
    bundle: str | None = None


@dataclass(frozen=True)
class BatchAnswer:
    """Hits of several searches, in the order of the queries; `bundle` is as in a search."""

    answers: tuple[Results, ...]
    took_ms: float
    explain: dict[str, Any] | None = None
    bundle: str | None = None


@dataclass(frozen=True, repr=False)
class IdentifyAnswer(Results):
    """The class that photos show, or `None` for unknown, and the items nearest to them.

    About the share `rate` of strangers comes as near; a label needs a rate of at most `far`.
    `second` is another class that is also nearer than strangers are. `stale` says that over 10 % of
    the items were added or deleted since the calibration.
    """

    label: str | None
    rate: float
    far: float
    second: str | None
    stale: bool
    took_ms: float
    bundle: str | None = None


@dataclass(frozen=True)
class EncodeAnswer:
    """Vectors of images or texts, in their order, and the SHA-256 of the bundle that encoded them.

    `query_vectors` are to be searched with, if the bundle encodes queries differently from items.
    """

    vectors: tuple[tuple[float, ...], ...]
    bundle: str
    query_vectors: tuple[tuple[float, ...], ...] | None = None


@dataclass(frozen=True)
class Embedding:
    """Vector of one image: numbers, or in base64 the bytes of its little-endian float32 numbers."""

    object: Literal["embedding"]
    index: int
    embedding: tuple[float, ...] | str


@dataclass(frozen=True)
class EmbeddingsAnswer:
    """Vectors of images in the shape that clients of OpenAI expect.

    `model` is the SHA-256 of the bundle that encoded the images; `usage` counts tokens, of which
    images have none.
    """

    object: Literal["list"]
    data: tuple[Embedding, ...]
    model: str
    usage: dict[str, int]


@dataclass(frozen=True)
class ItemAnswer:
    """An item with the size of its original image and, if requested, its vector.

    `bytes`, `sha256`, `width` and `height` are those of the original. `bundle` is the SHA-256 of
    the bundle that computed the vector.
    """

    id: str
    key: str
    label: str | None
    metadata: dict[str, Any]
    bytes: int | None
    width: int | None
    height: int | None
    keep: Literal["reference", "copy", "thumbnail", "nothing"]
    image_url: str | None
    thumbnail_url: str | None
    sha256: str | None = None
    vector: tuple[float, ...] | None = None
    bundle: str | None = None


@dataclass(frozen=True)
class Page:
    """One page of a list of items, and the cursor of the next page."""

    items: tuple[ItemAnswer, ...]
    cursor: str | None


@dataclass(frozen=True)
class PutAnswer:
    """Confirms that an item is on the server's disk, and whether it replaced another."""

    id: str
    replaced: bool


@dataclass(frozen=True)
class AddAnswer:
    """Confirms that items are on the server's disk, with the numbers of new and replaced items."""

    added: int
    replaced: int


@dataclass(frozen=True)
class Deleted:
    """Number of deleted items."""

    deleted: int


@dataclass(frozen=True)
class Changed:
    """Number of changed items."""

    changed: int


@dataclass(frozen=True)
class FeedbackAnswer:
    """Number of marks that are new or changed; they are on the server's disk."""

    counted: int


@dataclass(frozen=True)
class Snapshot:
    """Name of a snapshot in the folder that the server's operator has set."""

    snapshot: str


@dataclass(frozen=True)
class Indexes:
    """Names of a server's indexes."""

    indexes: tuple[str, ...]


@dataclass(frozen=True)
class Problem:
    """Error description in the form of RFC 9457; `instance` is the request's id."""

    type: str
    title: str
    status: int
    detail: str
    instance: str


@dataclass(frozen=True)
class Input:
    """Input of the encoder: its kind, "image" or "features", and its shape."""

    kind: Literal["image", "features"]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Limits:
    """Limits of a server: bytes and pixels per image, images and bytes per request."""

    bytes: int
    pixels: int
    batch: int
    batch_bytes: int


@dataclass(frozen=True)
class CalibrationFacts:
    """What `retrieval calibrate` measured: on how many classes, the smallest rate, and when."""

    classes: int
    items: int
    least_rate: float
    created: str
    stale: bool
    label: str | None = None
    distinct: str | None = None


@dataclass(frozen=True)
class Drift:
    """Nearest distances of the latest searches by image, against what the calibration expects.

    `median` and `expected` are median distances of the searches and of known items. `warning` is a
    sentence if many more searches are far from their nearest item than known items are.
    """

    searches: int
    median: float | None
    expected: float
    warning: str | None


@dataclass(frozen=True)
class IndexAnswer:
    """Description of an index, and the role that the request's key has in it.

    `identity` is the id that the index received when it was created; its copies have the same.
    """

    index: str
    name: str
    items: int
    bundle: str
    input: Input
    vector: int
    distance: str
    rescores: bool
    format: int
    limits: Limits
    generation: int | None = None
    generations: tuple[dict[str, Any], ...] | None = None
    bytes: int | None = None
    fields: tuple[str, ...] | None = None
    role: Literal["read", "feedback", "write", "admin"] | None = None
    identity: str | None = None
    calibration: CalibrationFacts | None = None
    drift: Drift | None = None
    feedback: bool | None = None
    text: bool | None = None
    words: bool | None = None
