"""One question to an index: the options of a search, checked once for every way to ask it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from numbers import Integral, Real
from typing import Any, TypeAlias, TypedDict, Unpack

from retrieval.bundle.text import checked_texts
from retrieval.errors import DataError, at_least_one
from retrieval.images.preprocessing import ImageLike, is_image
from retrieval.store.filters import FilterLike
from retrieval.store.filters.tree import Field, parse_field

DIVERSITY_POOL = 100
"""Least number of nearest hits (with `group_by`, groups) from which `diversity` chooses."""

Likes: TypeAlias = "ImageLike | list[Any] | tuple[Any, ...]"
"""One or several ids of items or pictures."""


class Id(str):
    """The id of an item to like or dislike, which is never read as the path of a picture."""


class QueryOptions(TypedDict, total=False):
    """The keywords of `Index.search`; see there."""

    text: str | Sequence[str] | None
    words: float | None
    candidates: int | None
    filter: FilterLike
    like: Likes
    dislike: Likes
    group_by: str | None
    group_size: int
    max_distance: float | None
    offset: int
    diversity: float
    facets: str | Sequence[str]
    order_by: str | None
    scores: bool


@dataclass(frozen=True)
class Query:
    """The options of one search; `Index.search` describes them.

    Attributes:
        k: number of hits or, with `group_by`, of groups.
        text: text of the query, or one for each query; `None` for queries that are no texts.
        words: from 0 to 1, the weight of the items' words beside the vectors in a search for text;
            `None` weighs them equally, or takes what there is.
        candidates: number of candidates per sub-space that are rescored.
        filter: filter that hits match.
        likes: ids of items or pictures that hits should resemble.
        dislikes: ids of items or pictures that hits should not resemble.
        group_by: field whose values are the groups.
        group_size: largest number of hits per group.
        max_distance: largest distance of a hit.
        offset: number of hits or groups to skip.
        diversity: from 0 (the nearest) to 1 (as different as possible).
        facets: fields whose values are counted among the hits.
        order_by: field by whose value the hits are listed; with "-" before it, from the largest.
        scores: whether hits have a score.
        ids: id of each query that is an item, in the order of the queries; an item is no hit of its
            own query.

    Raises:
        DataError: an option has no such value.
    """

    k: int = 10
    text: str | Sequence[str] | None = None
    words: float | None = None
    candidates: int | None = None
    filter: FilterLike = None
    likes: tuple[Any, ...] = ()
    dislikes: tuple[Any, ...] = ()
    group_by: str | None = None
    group_size: int = 1
    max_distance: float | None = None
    offset: int = 0
    diversity: float = 0.0
    facets: tuple[str, ...] = ()
    order_by: str | None = None
    scores: bool = False
    ids: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # NumPy's whole numbers become Python's, which every store can write.
        object.__setattr__(self, "k", at_least_one("k", self.k))
        if self.candidates is not None:
            count = at_least_one("The number of candidates", self.candidates)
            object.__setattr__(self, "candidates", count)
        if self.text is not None:
            texts = checked_texts(self.text, "text")
            if not isinstance(self.text, str):
                object.__setattr__(self, "text", tuple(texts))
            if self.scores:
                raise DataError(
                    "The index is calibrated for queries like its items, not for texts, whose"
                    " distances are larger. Leave scores out."
                )
        if self.words is not None:
            if not (isinstance(self.words, Real) and 0 <= self.words <= 1):
                raise DataError(f"words must be a number from 0 to 1, not {self.words!r}.")
            if self.text is None:
                raise DataError("words weighs the words of items in a search for a text: add one.")
        if self.is_plain:
            return
        object.__setattr__(self, "group_size", at_least_one("group_size", self.group_size))
        if self.group_size != 1 and self.group_by is None:
            raise DataError("group_size needs group_by, the field whose values are the groups.")
        if not isinstance(self.offset, Integral) or self.offset < 0:
            raise DataError(f"offset must be a whole number from 0, not {self.offset!r}.")
        limit = self.max_distance
        if limit is not None and not (isinstance(limit, Real) and limit >= 0):
            raise DataError(f"max_distance must be a number from 0, not {limit!r}.")
        if not (isinstance(self.diversity, Real) and 0 <= self.diversity <= 1):
            raise DataError(f"diversity must be a number from 0 to 1, not {self.diversity!r}.")
        for name in ("likes", "dislikes", "facets"):
            value = getattr(self, name)
            # A text or a picture stands for a list of one.
            object.__setattr__(self, name, (value,) if is_image(value) else tuple(value))
        # A field that is none is refused before anything is searched.
        for name in self.facets:
            parse_field(name)
        _ = self.group_field, self.order_field

    @property
    def is_plain(self) -> bool:
        """Whether only the nearest items are asked for, which takes no further step."""
        return not (
            self.likes
            or self.dislikes
            or self.group_by is not None
            or self.group_size != 1
            or self.max_distance is not None
            or self.offset
            or self.diversity
            or self.facets
            or self.order_by is not None
            or self.scores
            or self.ids
        )

    @cached_property
    def group_field(self) -> Field | None:
        """The field of `group_by`."""
        if self.group_by is None:
            return None
        return parse_field(self.group_by)

    @cached_property
    def order_field(self) -> Field | None:
        """The field of `order_by`."""
        if self.order_by is None:
            return None
        return parse_field(str(self.order_by).removeprefix("-"))

    @property
    def pool(self) -> int:
        """Number of nearest hits or groups from which the answer is chosen."""
        last = self.offset + self.k
        if self.diversity:
            return max(DIVERSITY_POOL, 2 * last)
        return last


# Making a frozen object takes a few per cent of the fastest searches, so the plain ones are kept.
plain_query = lru_cache(Query)


def query_of(k: int, **options: Unpack[QueryOptions]) -> Query:
    """Return the query that `Index.search` makes of its arguments."""
    fields: dict[str, Any] = {**options}
    fields["likes"] = fields.pop("like", ())
    fields["dislikes"] = fields.pop("dislike", ())
    return Query(k, **fields)
