"""What the routes of /v1 answer, as models that describe it; a test holds each answer to them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Shape = Annotated[list[int], Field(description="as the encoder takes them")]


class Answer(BaseModel):
    """A JSON object; later versions of /v1 may add members."""

    model_config = ConfigDict(extra="allow")


class Problem(Answer):
    """Why a request failed, as RFC 9457 has it."""

    type: str
    title: str
    status: int
    detail: Annotated[str, Field(description="a sentence: what is wrong, and what to do")]
    instance: Annotated[str, Field(description="the request's id, as in the header X-Request-Id")]


class HitAnswer(Answer):
    """An item that was found; smaller distance is closer."""

    id: str
    key: str
    label: str | None
    distance: float
    metadata: dict[str, Any]
    image_url: str | None
    thumbnail_url: Annotated[str | None, Field(description="a JPEG of at most 256 pixels")]


class Searched(Answer):
    """What was searched."""

    items: int
    bundle: str
    filtered: bool
    candidates: int | None
    generation: int | None = None
    segments: list[dict[str, Any]] | None = None
    fresh: int | None = None


class Explanation(Answer):
    """How a search was done."""

    stages_ms: Annotated[dict[str, float], Field(description="milliseconds of each stage")]
    searched: Searched


class SearchAnswer(Answer):
    """What a search found, nearest first."""

    results: list[HitAnswer]
    took_ms: float
    explain: Explanation | None = None


class Results(Answer):
    """What one of several searches found, nearest first."""

    results: list[HitAnswer]


class BatchAnswer(Answer):
    """What several searches found, in their order."""

    answers: list[Results]
    took_ms: float
    explain: Explanation | None = None


class ItemAnswer(Answer):
    """An item."""

    id: str
    key: str
    label: str | None
    metadata: dict[str, Any]
    bytes: Annotated[int | None, Field(description="of the original")]
    width: Annotated[int | None, Field(description="of the original, in pixels")]
    height: Annotated[int | None, Field(description="of the original, in pixels")]
    keep: Annotated[
        Literal["reference", "copy", "thumbnail", "nothing"],
        Field(description="what the index keeps of the original"),
    ]
    image_url: str | None
    thumbnail_url: str | None
    vector: Annotated[list[float] | None, Field(description="when it was asked for")] = None


class PutAnswer(Answer):
    """An item is on the disk."""

    id: str
    replaced: Annotated[bool, Field(description="whether it took another's place")]


class AddedAnswer(Answer):
    """Items are on the disk."""

    added: int
    replaced: Annotated[int, Field(description="how many took another's place")]


class DeletedAnswer(Answer):
    """Items are gone."""

    deleted: int


class ListAnswer(Answer):
    """A page of items, in the order of their ids."""

    items: list[ItemAnswer]
    cursor: Annotated[str | None, Field(description="of the next page; null at the end")]


class Taken(Answer):
    """What the encoder takes."""

    kind: Literal["image", "features"]
    shape: Shape


class Limits(Answer):
    """The largest that is taken."""

    bytes: int
    pixels: int
    batch: int
    batch_bytes: int


class IndexAnswer(Answer):
    """An index."""

    index: Annotated[str, Field(description="its name in addresses")]
    name: Annotated[str, Field(description="of its bundle")]
    items: int
    bundle: Annotated[str, Field(description="SHA-256")]
    input: Taken
    vector: int
    distance: str
    rescores: bool
    format: Literal[2]
    generation: int | None = None
    generations: list[dict[str, Any]] | None = None
    bytes: int | None = None
    segments: list[dict[str, Any]] | None = None
    fresh: int | None = None
    fields: Annotated[list[str] | None, Field(description="names of metadata that there are")] = None
    role: Annotated[Literal["read", "write", "admin"], Field(description="what the request's sender may do")]
    limits: Limits


class IndexesAnswer(Answer):
    """The names of a server's indexes."""

    indexes: list[str]


class SnapshotAnswer(Answer):
    """A copy of one moment of an index is on the disk."""

    snapshot: Annotated[str, Field(description="its name in the operator's folder")]
