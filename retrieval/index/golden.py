"""Golden queries: queries whose right items are known, and how well an index finds them.

A file of golden queries has one JSON object a line: what to search for, as `query` (the path of an
image), `id` (of an item), `vector` or `text`, and the `relevant` ids, as a list or as grades by id.

The metrics are those of TREC's `trec_eval`. A query has R relevant items; ranks count from 1.

- recall@k: relevant items among the first k hits, divided by R;
- precision@k: relevant items among the first k hits, divided by k;
- ndcg@k: Σ grade / log2(rank + 1) over the first k hits, divided by the largest possible sum
  (Järvelin & Kekäläinen, "Cumulated gain-based evaluation of IR techniques", 2002);
- mrr: 1 / rank of the first relevant hit, or 0;
- map: the sum of precision@rank over the ranks of relevant hits, divided by R;
- exact: 1 if the first R hits are the relevant items, else 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from json import JSONDecodeError
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from retrieval.base.arrays import Floats32, Floats64
from retrieval.base.folder_kinds import StrPath
from retrieval.base.machine import ahead, cores
from retrieval.base.progress import Meter, Progress, showing
from retrieval.base.strict_json import strict_loads
from retrieval.base.trec import Rankings, lines_of, number_of, read_qrels, run_text
from retrieval.bundle.bundle import Bundle, Encoded
from retrieval.errors import BelowTarget, DataError, quantity, refuse, some
from retrieval.index.calibration import as_queries
from retrieval.index.queries_and_hits import Hit, encode_queries
from retrieval.store.items import Item

if TYPE_CHECKING:
    from retrieval.index.index import Index

DEFAULT_METRICS = ("recall@10", "precision@10", "mrr", "ndcg@10", "map", "exact")

DEPTH = 1000
"""Number of hits of a query that `mrr` and `map` look at, as is usual at TREC."""

Golden: TypeAlias = "StrPath | Sequence[Mapping[str, Any]]"
"""A file of golden queries, or its objects; paths are then relative to the working directory."""

Search: TypeAlias = "Callable[[Any, int], Sequence[Sequence[Hit]]]"
"""Takes queries, encoded or texts, and a number of hits; returns the hits of each query."""

_METRIC = re.compile(r"(recall|precision|ndcg)@([1-9][0-9]{0,2}|1000)|mrr|map|exact")
_IDS_PER_READ = 1000
_BATCH = 64  # images or searches at a time
_MIN_K = 10  # hits among which a relevant item is missed or not
_ROUNDING = 1e-9  # of a mean
_KINDS = ("query", "id", "vector", "text")


class TextQuery(NamedTuple):
    """A text to search for, which is no id."""

    text: str


class GoldenQuery(NamedTuple):
    """A query whose right items are known.

    Attributes:
        name: the query in reports and TREC files: its path, id or text, or its line.
        relevant: grade by id of each relevant item; grades are above 0.
        source: path of an image, id of an item, vector, or text.
    """

    name: str
    relevant: dict[str, float]
    source: Path | str | Floats64 | TextQuery


@dataclass(frozen=True)
class QueryScore:
    """How well one golden query was answered.

    Attributes:
        query: name of the query.
        values: value of each metric.
        missed: relevant ids that are not among the first 10 hits, or the first k for the largest k
            of a metric.
        hits: ids of the hits, nearest first.
    """

    query: str
    values: dict[str, float]
    missed: list[str]
    hits: list[str]


@dataclass(frozen=True)
class GoldenReport:
    """The result of `Index.evaluate`.

    Attributes:
        values: mean of each metric over the queries.
        queries: the score of each query.
        missing: number of ids that were left out because the index lacks them.
    """

    values: dict[str, float]
    queries: tuple[QueryScore, ...]
    missing: int = 0

    def __repr__(self) -> str:
        width = max(map(len, self.values))
        lines = [f"{name:<{width}}  {value:.4f}" for name, value in self.values.items()]
        failed = sum(bool(score.missed) for score in self.queries)
        queries = quantity(len(self.queries), "query", "queries")
        counts = f"{queries}, of which {failed:,} miss a relevant item"
        if self.missing:
            counts += f"; {self.missing:,} ids left out, which the index lacks"
        return "\n".join([*lines, counts])

    def require(self, at_least: Mapping[str, float]) -> None:
        """Raise `BelowTarget` if the mean of a metric is below its smallest accepted value."""
        sentences = [
            f"{name} is {self.values[name]:.4f}, {least - self.values[name]:.4f} below {least:g}."
            for name, least in at_least.items()
            if self.values[name] < least - _ROUNDING
        ]
        if sentences:
            raise BelowTarget(" ".join(sentences))

    def run_text(self) -> str:
        """Return the hits as a run in TREC's format."""
        return run_text({score.query: score.hits for score in self.queries})


def evaluate(
    index: Index,
    golden: Golden | Sequence[GoldenQuery],
    metrics: Sequence[str] = DEFAULT_METRICS,
    *,
    skip_missing: bool = False,
    progress: Progress = True,
) -> GoldenReport:
    """Return how well the index finds the right items of golden queries.

    Args:
        golden: a file of golden queries, or a list of such objects; see `retrieval.index.golden`. A
            query by the id of an item does not find this item.
        metrics: names such as "recall@5", "precision@1", "ndcg@10", "mrr", "map" and "exact".
        skip_missing: leave out ids that the index lacks, such as those of deleted items, and
            queries without any other relevant id. If False, an error counts them.
        progress: see `add`.

    Raises:
        DataError: the file has faults, of which the error lists ten; a query cannot be encoded; or
            the index lacks ids.
    """
    check_metrics(metrics)
    bundle = index.follow()
    queries, missing = known_queries(index, read_golden(golden), skip_missing=skip_missing)
    texts = [query for query in queries if isinstance(query.source, TextQuery)]
    encodable = [query for query in queries if not isinstance(query.source, TextQuery)]

    def search_texts(texts: Sequence[str], k: int) -> Sequence[Sequence[Hit]]:
        # No text is an item, so none finds itself.
        answers: list[Any] = index.search(text=list(texts), k=min(k, DEPTH))
        return answers

    scores: dict[bool, list[QueryScore]] = {True: [], False: []}
    with showing(progress):
        if encodable:
            encoded = encode_golden(bundle, encodable, queried_items(index, encodable))
            scores[False] = scores_of(encodable, encoded, index.search, metrics)
        if texts:
            # The index knows whether texts are compared with vectors, with words or with both.
            words = [query.name for query in texts]
            scores[True] = scores_of(texts, words, search_texts, metrics)
    in_order = [scores[isinstance(query.source, TextQuery)].pop(0) for query in queries]
    return report_of(in_order, metrics, missing)


def check_metrics(names: Iterable[str]) -> None:
    """Raise a `DataError` unless all metrics exist."""
    for name in names:
        if not _METRIC.fullmatch(name):
            raise DataError(
                f"There is no metric '{name}'. There are recall@K, precision@K, ndcg@K (K from 1 to"
                f" {DEPTH:,}), mrr, map and exact."
            )


# Reading


def read_golden(golden: Golden | Sequence[GoldenQuery]) -> list[GoldenQuery]:
    """Return the golden queries of a file or list; an error lists its faults."""
    lines: Iterable[Any]
    if isinstance(golden, str | PathLike):
        where = str(golden)
        folder = Path(golden).parent
        lines = lines_of(golden)
    else:
        where = "golden"
        folder = Path()
        lines = golden
    queries = []
    faults = []
    lines_by_name: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if isinstance(line, GoldenQuery):
            queries.append(line)
        elif line and not (isinstance(line, bytes) and line.isspace()):
            try:
                entry = strict_loads(line) if isinstance(line, bytes) else line
                query = _query_of(entry, folder, number)
                earlier = lines_by_name.setdefault(query.name, number)
                if earlier != number:
                    raise ValueError(f"repeats the query of line {earlier}")
                queries.append(query)
            except JSONDecodeError:
                faults.append(f'line {number}: not JSON, such as {{"id": "a", "relevant": ["b"]}}.')
            except ValueError as fault:
                faults.append(f"line {number}: {fault}.")
    if not queries and not faults:
        faults = ["it has no query."]
    if faults:
        refuse(where, faults)
    return queries


def _query_of(entry: Any, folder: Path, number: int) -> GoldenQuery:
    """Return a query from its object; raise a ValueError if it is invalid."""
    kind = next((kind for kind in _KINDS if isinstance(entry, Mapping) and kind in entry), None)
    if kind is None or entry.keys() != {kind, "relevant"}:
        raise ValueError('not an object of "query", "id", "vector" or "text", and "relevant"')
    source = entry[kind]
    if kind == "vector":
        name = f"line {number}"
        source = np.asarray(source)
        if source.ndim != 1 or source.dtype.kind not in "fiu" or not np.isfinite(source).all():
            raise ValueError('"vector" is not a list of finite numbers')
    else:
        name = source
        if not isinstance(source, str) or not source:
            raise ValueError(f'"{kind}" is not text')
        if kind == "query":
            source = folder / source
            if not source.is_file():
                raise ValueError(f"there is no file {source}")
        elif kind == "text":
            source = TextQuery(source)
    relevant = entry["relevant"]
    if not isinstance(relevant, Mapping):
        if not isinstance(relevant, list) or not all(isinstance(id, str) for id in relevant):
            raise ValueError('"relevant" is not a list of ids or an object of grades by id')
        relevant = dict.fromkeys(relevant, 1)
    grades = {id: number_of(grade) for id, grade in relevant.items()}
    # A query by id does not find its own item.
    grades = {id: grade for id, grade in grades.items() if grade > 0 and (kind, id) != ("id", name)}
    if not grades:
        raise ValueError("no item is relevant")
    return GoldenQuery(name, grades, source)


def read_judged(path: Path) -> list[GoldenQuery]:
    """Return the judgements of a file of TREC's qrels as queries by the id of an item.

    Queries without a relevant item are left out.

    Raises:
        DataError: the file has faults, or no item is relevant.
    """
    queries = []
    for name, grades in read_qrels(path).items():
        relevant = {id: grade for id, grade in grades.items() if grade > 0}
        if relevant:
            queries.append(GoldenQuery(name, relevant, name))
    if not queries:
        raise DataError(f"{path}: no item is relevant.")
    return queries


# Measuring


def known_queries(
    index: Index, queries: Sequence[GoldenQuery], *, skip_missing: bool
) -> tuple[list[GoldenQuery], int]:
    """Return the queries with the ids that an index has, and the number of ids that it lacks."""
    ids = {id for query in queries for id in query.relevant}
    ids |= {query.source for query in queries if isinstance(query.source, str)}
    known: set[str] = set()
    names = sorted(ids)
    for start in range(0, len(names), _IDS_PER_READ):
        known |= index.get(names[start : start + _IDS_PER_READ]).keys()
    missing = sorted(ids - known)
    if missing and not skip_missing:
        raise DataError(
            f"The index {index.path} lacks {len(missing):,} of {len(ids):,} ids of the golden"
            f" queries: {some(missing)}. If these items were deleted on purpose, leave them out"
            " with --skip-missing (in Python skip_missing=True)."
        )
    answerable = []
    for query in queries:
        relevant = {id: grade for id, grade in query.relevant.items() if id in known}
        if isinstance(query.source, str):
            relevant.pop(query.source, None)
            if query.source not in known:
                continue
        if relevant:
            answerable.append(query._replace(relevant=relevant))
    if not answerable:
        raise DataError(f"The index {index.path} has no item of the golden queries.")
    return answerable, len(missing)


def queried_items(index: Index, queries: Sequence[GoldenQuery]) -> dict[str, Item]:
    """Return the items of queries by id, with their arrays."""
    ids = [query.source for query in queries if isinstance(query.source, str)]
    return index.get(ids, arrays=True)


def encode_golden(
    bundle: Bundle, queries: Sequence[GoldenQuery], items: Mapping[str, Item]
) -> Encoded:
    """Return the encoded queries; `items` are those of the queries by id, with their arrays.

    Raises:
        DataError: queries cannot be encoded; the error lists ten.
    """

    def encode(query: GoldenQuery) -> tuple[Floats32, Floats32 | None] | str:
        source: Any = query.source
        try:
            if isinstance(source, str):
                if bundle.manifest.query_vectors:
                    raise DataError("the bundle encodes queries in another way; name an image.")
                if source not in items or not items[source].arrays:
                    raise DataError("this item has no vector.")
                source = as_queries(bundle, [items[source]])
            if isinstance(source, TextQuery):
                vectors, codes, _ = encode_queries(bundle, None, source.text)
            else:
                vectors, codes, _ = encode_queries(bundle, source)
        except DataError as fault:
            return f"{query.name}: {fault}"
        return vectors, codes

    results = []
    with Meter("encoding", len(queries), "queries") as meter:
        for result in ahead(encode, queries, workers=cores(), most=2 * _BATCH):
            results.append(result)
            meter.update(1)
    faults = [result for result in results if isinstance(result, str)]
    if faults:
        refuse("The list of golden queries", faults)
    encoded = [result for result in results if not isinstance(result, str)]
    vectors = np.concatenate([vector for vector, _ in encoded])
    codes = [code for _, code in encoded if code is not None]
    return Encoded(vectors, vectors, np.concatenate(codes) if codes else None, bundle.sha256)


def scores_of(
    queries: Sequence[GoldenQuery],
    encoded: Encoded | Sequence[str],
    search: Search,
    metrics: Sequence[str],
) -> list[QueryScore]:
    """Return how well a search answers queries, which are encoded or texts.

    The metrics at k are those of the search for the largest k: an approximate search, and one with
    a rescorer, may find more if it is asked for more.
    """
    k = _largest_k(metrics)
    is_deep = not all("@" in name for name in metrics)
    scores = []
    with Meter("searching", len(queries), "queries") as meter:
        for start in range(0, len(queries), _BATCH):
            rows = slice(start, start + _BATCH)
            # One more, because a query by id finds its own item.
            answers = search(encoded[rows], k + 1)
            deep_answers = search(encoded[rows], DEPTH + 1) if is_deep else answers
            for query, hits, deep_hits in zip(queries[rows], answers, deep_answers, strict=True):
                nearest = _ids(query, hits, k)
                scores.append(_score(query, nearest, _ids(query, deep_hits, DEPTH), metrics))
                meter.update(1)
    return scores


def evaluate_trec_run(
    queries: Sequence[GoldenQuery],
    hits: Rankings,
    metrics: Sequence[str] = DEFAULT_METRICS,
) -> GoldenReport:
    """Return the report on hits that are known by the name of the query; see
    `retrieval.base.trec.read_run`.

    A query without hits counts as 0, as with `trec_eval -c`.
    """
    check_metrics(metrics)
    k = _largest_k(metrics)
    scores = []
    for query in queries:
        ids = list(hits.get(query.name, ()))
        scores.append(_score(query, ids[:k], ids, metrics))
    return report_of(scores, metrics)


def _largest_k(metrics: Iterable[str]) -> int:
    return max([_MIN_K, *(int(name.partition("@")[2] or 0) for name in metrics)])


def _ids(query: GoldenQuery, hits: Sequence[Hit], k: int) -> list[str]:
    """Return the ids of the first k hits, without the item that is the query."""
    query_id = query.source if isinstance(query.source, str) else None
    return [hit.id for hit in hits if hit.id != query_id][:k]


def _score(
    query: GoldenQuery, nearest: list[str], deep: list[str], metrics: Sequence[str]
) -> QueryScore:
    """Return the score of hits; metrics at k look at those that are `nearest`."""
    best = np.array(sorted(query.relevant.values(), reverse=True))
    values = {}
    for name in metrics:
        hits = nearest if "@" in name else deep
        values[name] = _value(name, np.array([query.relevant.get(id, 0.0) for id in hits]), best)
    missed = sorted(query.relevant.keys() - set(nearest))
    return QueryScore(query.name, values, missed, deep)


def _value(name: str, grades: Floats64, best: Floats64) -> float:
    """Return a metric of hits with these grades; `best` are those of relevant items, descending."""
    stem, _, depth = name.partition("@")
    if depth:
        k = int(depth)
        grades = grades[:k]
        best_k = best[:k]
    ranks = np.flatnonzero(grades) + 1
    if stem == "recall":
        value = len(ranks) / len(best)
    elif stem == "precision":
        value = len(ranks) / k
    elif stem == "ndcg":
        value = _discounted(grades) / _discounted(best_k)
    elif stem == "mrr":
        value = 1 / ranks[0] if len(ranks) else 0.0
    elif stem == "map":
        value = (np.arange(1, len(ranks) + 1) / ranks).sum() / len(best)
    else:
        value = np.count_nonzero(ranks <= len(best)) == len(best)
    return float(value)


def _discounted(grades: Floats64) -> float:
    return float((grades / np.log2(np.arange(2, len(grades) + 2))).sum())


def report_of(
    scores: Sequence[QueryScore], metrics: Sequence[str], missing: int = 0
) -> GoldenReport:
    """Return the report on the scores of all queries."""
    values = {name: float(np.mean([score.values[name] for score in scores])) for name in metrics}
    return GoldenReport(values, tuple(scores), missing)
