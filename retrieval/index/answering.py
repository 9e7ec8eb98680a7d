"""Answer a query: its nearest items, chosen by groups, likes, distance and diversity.

A store proposes the nearest items and knows nothing else. If an option leaves too few of them, the
store is asked for more, until the answer is the one that all items would give.

A search for a text may rank items by their words, too. The two rankings are joined by reciprocal
rank fusion (Cormack, Clarke and Büttcher, 2009): a hit's score is (1 - w) / (60 + v) + w / (60 +
b), where w is the weight of the words, v the item's place among the nearest vectors, and b its
place by BM25. Places begin at 1, equal items share the first of their places, and a place beyond
`FUSED` adds nothing. All options choose among these hits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from retrieval.base.arrays import Floats32
from retrieval.bundle.bundle import Bundle
from retrieval.errors import DataError
from retrieval.index.calibration import Calibration, need_calibration
from retrieval.index.duplicates import item_distances, stacked_arrays
from retrieval.index.queries_and_hits import Hit, Hits, encode_queries, hits_of, ranked
from retrieval.index.query import Id, Query
from retrieval.store.contract import MARGIN, Candidates, Item, Superseded, require_time, spans_of
from retrieval.store.filters import And, Exists, Filter, In, Not, as_filter
from retrieval.store.filters.evaluating import ABSENT, value_of
from retrieval.store.filters.tree import MOST_CHARACTERS, Field, parse_field

if TYPE_CHECKING:
    from retrieval.index.index import Index

DISLIKE_SHARE = 1 / 3
"""Weight of the dislikes beside the likes."""

_QUERIES_PER_BLOCK = 256  # limits the memory for candidates and their distances
_HITS_AT_ONCE = 50_000  # limits the memory for hits from which an answer is chosen

FUSED = 1000
"""Places of each ranking that a search for a text joins."""

_EQUAL = 0.5  # weight of the words of items beside their vectors
_RANK_CONSTANT = 60  # as in the paper

Value: TypeAlias = tuple[bool, Any]
"""A field's value, preceded by whether it is a boolean, because True == 1 in Python."""


def answer(index: Index, queries: Any, query: Query) -> list[Any]:
    """Return the hits of one query, or a list of hits per query; see `Index.search`.

    Raises:
        Superseded: the index serves another bundle by now.
    """
    bundle = index.bundle
    filter = as_filter(query.filter)
    words = weight_of_words(index, query.text, query.words)
    vectors: Floats32 | None = None
    codes: Floats32 | None = None
    if query.is_plain and not words:
        vectors, codes, is_single = encode_queries(bundle, queries, query.text)
        propose = index.store.propose
        nearest = nearest_hits(propose, bundle, vectors, codes, query, filter, query.k)
        answers = [Hits(hits, index.store.original) for hits in nearest]
    else:
        examples: Set[str] = frozenset()
        measured = None
        if query.scores:
            measured = need_calibration(index)
            if index.bundle is not bundle:
                raise Superseded("Another bundle is served.")
        if words == 1:
            _refuse_vectors(queries, query)
            is_single = isinstance(query.text, str)
        elif query.likes or query.dislikes:
            vectors, is_single, examples = _by_example(index, bundle, queries, query)
        else:
            vectors, codes, is_single = encode_queries(bundle, queries, query.text)
        texts: Sequence[str] = ()
        if query.text is not None:
            texts = [query.text] if isinstance(query.text, str) else query.text
        excluded = [examples] * (len(texts) if vectors is None else len(vectors))
        if query.ids:
            excluded = [examples | {id} for id in query.ids]
        search = _Search(index, bundle, query, vectors, codes, excluded, texts, words)
        answers = []
        for hits in search.hits(filter):
            if measured is not None:
                hits = _scored(hits, measured)
            if query.order_field is not None:
                hits = _ordered(index, hits, query.order_field, str(query.order_by).startswith("-"))
            answers.append(Hits(hits, index.store.original))
            answers[-1].facets = {name: _facet(index, name, hits) for name in query.facets}
    if not any(answers):
        index.store.refuse_impossible(filter)
    if is_single:
        return answers[0]
    return answers


def weight_of_words(index: Index, text: object, words: float | None) -> float:
    """Return the weight of the items' words, from 0 (vectors alone) to 1 (words alone).

    Args:
        index: the index.
        text: texts of the queries; `None` for queries that are no texts.
        words: the weight that was asked for; see `Query`.

    Raises:
        DataError: there is nothing to compare with texts.
    """
    if text is None:
        return 0.0
    has_encoder = index.bundle.manifest.text is not None
    if words is not None:
        return float(words)
    if index.store.keeps_words():
        return _EQUAL if has_encoder else 1.0
    if not has_encoder:
        raise DataError(
            "This index takes no texts: its model has no text encoder, and it keeps no words of its"
            " items. Search with an image, a vector or an item, or first run 'retrieval index"
            " words'."
        )
    return 0.0


def _refuse_vectors(queries: Any, query: Query) -> None:
    """Raise a `DataError` if a search by words alone has something that compares vectors."""
    if queries is not None:
        raise DataError("Search with an image or vector, or with a text, not with both.")
    for name in ("likes", "dislikes", "max_distance", "diversity", "candidates"):
        if getattr(query, name):
            raise DataError(
                f"For {name}, vectors are compared, and this search compares the words of items"
                " alone. Leave it out, or set words below 1 if the model takes texts."
            )


def nearest_hits(
    propose: Callable[..., Iterable[Candidates]],
    bundle: Bundle,
    vectors: Floats32,
    codes: Floats32 | None,
    query: Query,
    filter: Filter | None,
    k: int,
) -> list[list[Hit]]:
    """Return the k nearest matching items of each vector; see `Store.propose`."""
    count = k
    # If the bundle's distance is not the store's, their orders may differ: request more.
    if not bundle.compares_vectors_alone:
        count += MARGIN
    rescorer = bundle.manifest.rescorer
    if query.candidates is not None:
        count = max(count, query.candidates)
    elif rescorer is not None:
        count = max(count, rescorer.candidates)
    hits: list[list[Hit]] = []
    for start in range(0, len(vectors), _QUERIES_PER_BLOCK):
        block = vectors[start : start + _QUERIES_PER_BLOCK]
        proposed = propose(
            block, count, bundle.sha256, filter=filter, arrays=not bundle.compares_vectors_alone
        )
        for row, group in enumerate(proposed, start):
            if codes is None:
                code = None
            else:
                code = codes[row]
            hits.append(ranked(bundle, vectors[row], code, group, k, count))
    return hits


@dataclass(frozen=True)
class _Search:
    """Encoded queries, and for each of them the ids of the items that cannot be hits.

    Attributes:
        vectors: vectors (Q, P) of the queries; `None` for a search by words alone.
        codes: codes (Q, C) of the queries, if the bundle has a rescorer.
        excluded: for each query the ids of the items that cannot be hits.
        texts: text of each query, if queries are texts.
        words: weight of the items' words.
    """

    index: Index
    bundle: Bundle
    query: Query
    vectors: Floats32 | None
    codes: Floats32 | None
    excluded: Sequence[Set[str]]
    texts: Sequence[str]
    words: float

    def nearest(self, rows: slice, filter: Filter | None, k: int) -> list[list[Hit]]:
        """Return the k nearest matching items of each of the queries in `rows`."""
        require_time()
        if self.vectors is None:
            return [[] for _ in self.texts[rows]]
        codes = self.codes
        if codes is not None:
            codes = codes[rows]
        vectors = self.vectors[rows]
        propose = self.index.store.propose
        return nearest_hits(propose, self.bundle, vectors, codes, self.query, filter, k)

    def _fused(self, row: int, filter: Filter | None, depth: int) -> list[Hit]:
        """Return the hits of a text by vectors and words, the one with the largest score first."""
        store = self.index.store
        (nearest,) = self.nearest(slice(row, row + 1), filter, FUSED)
        hits = {hit.id: hit for hit in nearest}
        fitting = dict(store.search_words(self.texts[row], FUSED, filter=filter, also=list(hits)))
        scores = defaultdict[str, float](float)
        for ids, costs, weight in (
            (hits, [hit.distance for hit in nearest], 1 - self.words),
            (fitting, [-score for score in fitting.values()], self.words),
        ):
            # Both ascend, so the first place of an equal cost is where it would be inserted.
            places = 1 + np.searchsorted(costs, costs)
            for id, score in zip(ids, (weight / (_RANK_CONSTANT + places)).tolist(), strict=True):
                scores[id] += score
        order = sorted(scores, key=lambda id: (-scores[id], id))
        if self.query.group_by is None and self.query.max_distance is None:
            # No option passes over hits, so the others need not be read.
            order = order[:depth]
        missing = [id for id in order if id not in hits]
        hits |= {hit.id: hit for hit in self._measured(row, missing)}
        # An item may have been deleted since its words were found.
        return [hits[id]._replace(score=scores[id]) for id in order if id in hits]

    def _measured(self, row: int, ids: Sequence[str]) -> list[Hit]:
        """Return the items of some ids as hits of a query, with their distances if they have any.

        Raises:
            Superseded: another bundle is served.
        """
        has_vector = self.vectors is not None
        items = list(self.index.get(ids, arrays=has_vector).values())
        embedded = [item for item in items if item.arrays]
        bare = [item for item in items if not item.arrays]
        hits = hits_of(bare, np.full(len(bare), np.nan))
        if self.vectors is not None and embedded:
            if self.index.follow() is not self.bundle:
                raise Superseded("Another bundle is served.")
            group = Candidates(embedded, stacked_arrays(embedded))
            count = len(embedded)
            hits += ranked(self.bundle, self.vectors[row], None, group, count, count)
        return hits

    def hits(self, filter: Filter | None) -> list[list[Hit]]:
        """Return the hits of each query, with all options."""
        query = self.query
        if query.group_field is not None:
            filter = _both(filter, Exists(query.group_field))
        depth = query.pool * query.group_size + max(map(len, self.excluded), default=0)
        if self.words:
            if query.offset + query.k > FUSED:
                raise DataError(
                    f"A search for the words of items ends at the {FUSED:,}th hit: make k and"
                    " offset smaller, or set words to 0."
                )
            rows = range(len(self.excluded))
            return [
                self._choice(row, filter, depth, self._fused(row, filter, depth)) for row in rows
            ]
        step = max(1, _HITS_AT_ONCE // depth)
        choices = []
        for start in range(0, len(self.excluded), step):
            nearest = self.nearest(slice(start, start + step), filter, depth)
            for row, hits in enumerate(nearest, start):
                choices.append(self._choice(row, filter, depth, hits))
        return choices

    def _choice(self, row: int, filter: Filter | None, depth: int, hits: list[Hit]) -> list[Hit]:
        """Return the hits of one query, of which `hits` are the `depth` nearest items."""
        query = self.query
        field = query.group_field
        last = query.offset + query.k
        if field is None:
            groups = {(False, hit.id): [hit] for hit in hits if self._fits(row, hit)}
        else:
            groups = self._groups(row, hits)
        everything = is_last = bool(self.words) or self._is_last(hits, depth)
        while field is not None and len(groups) < query.pool and not is_last:
            # Without the groups that are known, the next ones are near again.
            depth = _deeper(depth)
            narrowed = filter
            if groups:
                narrowed = _both(filter, Not(_one_of(field, groups)))
            is_last = self._extend(groups, row, narrowed, depth)
        keys = list(groups)
        if not self.words:
            # An item that was added between two searches may be nearer than the earlier hits.
            keys.sort(key=lambda key: groups[key][0].distance)
        keys = keys[: query.pool]
        if query.diversity:
            keys = self._diverse(groups, keys, last)
        keys = keys[query.offset : last]
        while field is not None and not everything:
            incomplete = [key for key in keys if len(groups[key]) < query.group_size]
            if not incomplete:
                break
            depth = _deeper(depth)
            narrowed = _both(filter, _one_of(field, incomplete))
            everything = self._extend(groups, row, narrowed, depth)
        return [hit for key in keys for hit in groups[key]]

    def _extend(
        self, groups: dict[Value, list[Hit]], row: int, filter: Filter | None, depth: int
    ) -> bool:
        """Add the groups of a query's `depth` nearest items; return whether these are all."""
        count = sum(map(len, groups.values()))
        (hits,) = self.nearest(slice(row, row + 1), filter, depth)
        groups |= self._groups(row, hits)
        is_last = self._is_last(hits, depth)
        if not is_last and depth >= _HITS_AT_ONCE and count == sum(map(len, groups.values())):
            raise DataError(
                f"The {depth:,} nearest items have lists, objects or long texts in the field"
                f" {self.query.group_by}, which are no groups. Leave such items out by a filter."
            )
        return is_last

    def _fits(self, row: int, hit: Hit) -> bool:
        """Return whether an item can be a hit of a query."""
        limit = self.query.max_distance
        return hit.id not in self.excluded[row] and (limit is None or hit.distance <= limit)

    def _is_last(self, hits: Sequence[Hit], depth: int) -> bool:
        """Return whether no item beyond the `depth` nearest can be a hit."""
        limit = self.query.max_distance
        return len(hits) < depth or (limit is not None and hits[-1].distance > limit)

    def _groups(self, row: int, hits: Iterable[Hit]) -> dict[Value, list[Hit]]:
        """Return the nearest hits of each group, the group with the nearest hit first.

        An object, a list or a text that no filter can name is no group.
        """
        assert self.query.group_field is not None
        groups: dict[Value, list[Hit]] = {}
        for hit in hits:
            if not self._fits(row, hit):
                continue
            for key in _values(hit, self.query.group_field, lists=False):
                if isinstance(key[1], str) and len(key[1]) > MOST_CHARACTERS:
                    continue
                group = groups.setdefault(key, [])
                if len(group) < self.query.group_size:
                    group.append(hit)
        return groups

    def _diverse(
        self, groups: dict[Value, list[Hit]], keys: Sequence[Value], count: int
    ) -> list[Value]:
        """Return `count` groups by maximal marginal relevance (Carbonell and Goldstein, 1998).

        The next group is the one with the largest λ d(hit, nearest chosen hit) − (1 − λ) d(query,
        hit), where λ is the diversity and hit the nearest hit of a group.
        """
        stored = _stored(self.index, self.bundle, [groups[key][0].id for key in keys])
        # An item may have been deleted since it was found.
        keys = [key for key in keys if groups[key][0].id in stored]
        if not keys:
            return []
        items = [stored[groups[key][0].id] for key in keys]
        arrays = stacked_arrays(items)
        weight = float(self.query.diversity)
        cost = (1 - weight) * np.array([groups[key][0].distance for key in keys])
        gap = np.full(len(keys), np.inf)
        chosen = [0]
        while len(chosen) < min(count, len(keys)):
            require_time()
            gap = np.minimum(gap, item_distances(self.bundle, items[chosen[-1]], arrays))
            scores = weight * gap - cost
            scores[chosen] = -np.inf
            chosen.append(int(scores.argmax()))
        return [keys[position] for position in chosen]


def rocchio(likes: Floats32, dislikes: Floats32, spans: Iterable[tuple[int, int]]) -> Floats32:
    """Return the vector (P,) to search for, given liked (n, P) and disliked vectors (m, P).

    It is the mean of the likes minus a share of the mean of the dislikes (Rocchio, 1971), scaled in
    each sub-space (a column range of `spans`) to the mean length of the likes.
    """
    mean = likes.mean(axis=0, dtype=np.float64)
    if len(dislikes):
        mean -= DISLIKE_SHARE * dislikes.mean(axis=0, dtype=np.float64)
    for start, stop in spans:
        part = mean[start:stop]
        length = np.linalg.norm(part)
        if length:
            part *= np.linalg.norm(likes[:, start:stop], axis=1).mean() / length
    vector: Floats32 = mean.astype(np.float32)
    return vector


def _by_example(
    index: Index, bundle: Bundle, queries: Any, query: Query
) -> tuple[Floats32, bool, Set[str]]:
    """Return one vector per query, whether it is a single one, and the ids of the examples.

    Each query counts as one more like. Without queries, the likes are the query.
    """
    if bundle.manifest.rescorer is not None:
        raise DataError(
            "The rescorer of this index compares codes, of which likes and dislikes have no mean."
            " Search for one image."
        )
    examples = [*query.likes, *query.dislikes]
    texts = [example for example in examples if isinstance(example, str)]
    items = _stored(index, bundle, texts)
    if items and bundle.manifest.query_vectors:
        raise DataError(
            "The bundle of this index encodes queries differently from items: like and dislike"
            " images, not ids."
        )
    vectors = np.stack([_example_vector(bundle, items, example) for example in examples])
    likes, dislikes = np.split(vectors, [len(query.likes)])
    spans = spans_of(bundle)
    if queries is None and query.text is None:
        if not len(likes):
            raise DataError("A search needs a query or something to like besides the dislikes.")
        return rocchio(likes, dislikes, spans)[None], True, items.keys()
    encoded, _, is_single = encode_queries(bundle, queries, query.text)
    moved = [rocchio(np.vstack([row[None], likes]), dislikes, spans) for row in encoded]
    return np.array(moved, np.float32).reshape(encoded.shape), is_single, items.keys()


def _example_vector(bundle: Bundle, items: dict[str, Item], example: Any) -> Floats32:
    """Return the vector (P,) of an item's id or of a picture."""
    if isinstance(example, str) and example in items:
        return items[example].vector
    if isinstance(example, Id):
        raise DataError(f"The index has no item with a vector and the id {str(example)!r}.")
    try:
        (vector,), _, _ = encode_queries(bundle, example)
    except DataError as error:
        if not isinstance(example, str):
            raise
        raise DataError(
            f"The index has no item {example!r}, nor is it a picture: {error}"
        ) from error
    return np.asarray(vector, np.float32)


def _stored(index: Index, bundle: Bundle, ids: Sequence[str]) -> dict[str, Item]:
    """Return the items with vectors among `ids`.

    Raises:
        Superseded: the vectors may belong to another bundle.
    """
    items = index.get(ids, arrays=True)
    if index.follow() is not bundle:
        raise Superseded("Another bundle is served.")
    return {id: item for id, item in items.items() if item.arrays}


def _both(filter: Filter | None, other: Filter) -> Filter:
    if filter is None:
        return other
    return And((filter, other))


def _one_of(field: Field, keys: Iterable[Value]) -> Filter:
    return In(field, tuple(value for _, value in keys))


def _deeper(depth: int) -> int:
    """Return how many hits to ask for next: twice as many, as far as the memory allows."""
    return max(depth, min(2 * depth, _HITS_AT_ONCE))


def _scored(hits: Sequence[Hit], measured: Calibration) -> list[Hit]:
    """Return hits with their scores."""
    scores = 1 - measured.shares([hit.distance for hit in hits])
    return [hit._replace(score=score) for hit, score in zip(hits, scores.tolist(), strict=True)]


def _ordered(index: Index, hits: Sequence[Hit], field: Field, from_largest: bool) -> list[Hit]:
    """Return hits by the value of a field, and those without a number or text last."""
    values = [value_of(field, hit.id, hit.label, hit.metadata) for hit in hits]
    rows = [row for row, value in enumerate(values) if isinstance(value, str | int | float)]
    if not rows:
        # An error says if the field has never existed.
        index.count(Exists(field))
    rows.sort(key=lambda row: (isinstance(values[row], str), values[row]), reverse=from_largest)
    rest = sorted(set(range(len(hits))).difference(rows))
    return [hits[row] for row in rows + rest]


def _facet(index: Index, name: str, hits: Iterable[Hit]) -> list[tuple[Any, int]]:
    """Return the values of a field among hits and their numbers, the most frequent first."""
    field = parse_field(name)
    counts = Counter(chain.from_iterable(_values(hit, field, lists=True) for hit in hits))
    if not counts:
        # An error says if the field has never existed.
        index.count(Exists(field))
    return [(value, count) for (_, value), count in counts.most_common()]


def _values(hit: Hit, field: Field, *, lists: bool) -> list[Value]:
    """Return the different values of a hit's field: of a list its elements, or nothing."""
    value = value_of(field, hit.id, hit.label, hit.metadata)
    if isinstance(value, list) and lists:
        values = value
    else:
        values = [value]
    keys = (
        (isinstance(element, bool), element)
        for element in values
        if element is not ABSENT and not isinstance(element, dict | list)
    )
    return list(dict.fromkeys(keys))
