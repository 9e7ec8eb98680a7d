"""Search an index for the queries of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from retrieval.base.timing import stage
from retrieval.bundle.bundle import Bundle, Encoded
from retrieval.errors import DataError
from retrieval.index.answering import weight_of_words
from retrieval.index.index import Index
from retrieval.index.queries_and_hits import encode_vectors
from retrieval.index.query import Query as Question
from retrieval.store.contract import BASE, CODE, VECTOR, Superseded

from retrieval_server.feedback import Feedback
from retrieval_server.problems import RequestError, no_item
from retrieval_server.request_bodies import IdentifyOptions, Query, QueryInput


def hits_of(
    index: Index, query: Query, pixels: NDArray[Any] | None, feedback: Feedback | None = None
) -> Sequence[Any]:
    """Return the hits of each query in order, or a verdict; an item is no hit of its own query.

    A search with a voter is noted in `feedback`, and perhaps explored.
    """
    if query.voter is None:
        feedback = None
    bundle = index.bundle
    options = query.options
    if query.question is not None:
        encoded, answers = _answers(index, query, query.question, pixels)
        if feedback is None:
            return answers
        return feedback.noted(bundle, query, encoded, answers)
    encoded = _queries(index, query, pixels)
    ids = [input.id for input in query.inputs]
    # An item finds itself, so one hit more is needed.
    by_id = ids[0] is not None
    if isinstance(options, IdentifyOptions):
        with stage("search", len(ids)):
            return [index.identify(encoded, options.far, without=[id for id in ids if id])]
    challenger = None
    # A challenger ranks vectors alone.
    if feedback is not None and not _weight_of_words(index, query):
        challenger = feedback.challenger_for(bundle, query)
    if feedback is not None and challenger is not None:
        with stage("search"):
            interleaved = feedback.explored(index, challenger, encoded, query)
        if interleaved is not None:
            return feedback.noted(bundle, query, encoded, [interleaved], challenger)
    with stage("search", len(ids)):
        hits_by_query = index.search(
            encoded,
            options.k + by_id,
            text=query.texts,
            candidates=options.candidates,
            filter=query.filter,
        )
    nearest = [
        [hit for hit in hits if hit.id != id][: options.k]
        for id, hits in zip(ids, hits_by_query, strict=True)
    ]
    if feedback is None:
        return nearest
    return feedback.noted(bundle, query, encoded, nearest)


def _queries(index: Index, query: Query, pixels: NDArray[Any] | None) -> Any:
    """Return the inputs of a query as the index takes them; an item's stored vectors."""
    if query.inputs[0].id is not None:
        return _stored(index, query)
    if query.texts is not None:
        if _weight_of_words(index, query) == 1:
            return None
        return encoded_texts(index.bundle, query.texts)
    return _encoded(index.bundle, query.inputs, pixels)


def _weight_of_words(index: Index, query: Query) -> float:
    """Return the weight of the items' words; see `weight_of_words`."""
    words = None if query.question is None else query.question.words
    return weight_of_words(index, query.texts, words)


def _answers(
    index: Index, query: Query, question: Question, pixels: NDArray[Any] | None
) -> tuple[Any, list[Any]]:
    """Return the queries as the index takes them and the hits of each, with all options.

    The queries are `None` if examples to like or dislike moved them.
    """
    names = {*question.likes, *question.dislikes}
    if names and (unknown := names.difference(index.get(names))):
        raise RequestError(404, f"There is no item {min(unknown)[:80]!a} to like or dislike.")
    count = len(query.inputs)
    queries: Any = None
    if any(query.examples.values()):
        assert pixels is not None
        with stage("encode", len(pixels)):
            vectors = index.bundle.encode(pixels).query
        ends = [count, count + len(query.examples["like"])]
        queries, likes, dislikes = np.split(vectors, ends)
        question = replace(
            question,
            likes=(*question.likes, *likes),
            dislikes=(*question.dislikes, *dislikes),
        )
    elif count:
        queries = _queries(index, query, pixels)
    with stage("search", max(1, count)):
        if not count:
            return None, [index.answer(None, question)]
        ids = tuple(input.id for input in query.inputs if input.id is not None)
        answers = index.answer(queries, replace(question, ids=ids, text=query.texts))
    if question.likes or question.dislikes:
        return None, answers
    return queries, answers


def encoded_texts(bundle: Bundle, texts: Sequence[str]) -> Encoded:
    """Encode texts.

    Raises:
        DataError: the bundle takes no texts; the message names no path.
    """
    if not bundle.takes_text:
        raise DataError(
            "This index takes no texts: its model has no text encoder. Search with an image, a"
            " vector or an item instead."
        )
    with stage("encode", len(texts)):
        return bundle.encode_text(texts)


def _encoded(bundle: Bundle, queries: Sequence[QueryInput], pixels: NDArray[Any] | None) -> Any:
    """Encode images or features as queries; vectors are returned as they are."""
    if pixels is None:
        vectors = [query.vector for query in queries if query.vector is not None]
        if len({len(vector) for vector in vectors}) > 1:
            raise DataError("The vectors of one request must have the same length.")
        stacked = np.stack(vectors)
        if bundle.manifest.input.kind != "features":
            width = bundle.manifest.vector
            length = stacked.shape[1]
            # `search` would mistake the array for the pixels of an image.
            if length != width:
                raise DataError(f"A query vector of this index has {width} numbers, not {length}.")
            return stacked
    with stage("encode", len(queries)):
        if pixels is not None:
            return bundle.encode(pixels)
        return encode_vectors(bundle, stacked)


def _stored(index: Index, query: Query) -> Encoded:
    """Return the stored vectors of items, as queries."""
    bundle = index.bundle
    ids = [str(input.id) for input in query.inputs]
    if bundle.manifest.query_vectors:
        raise DataError(
            "The bundle of this index encodes queries differently from items: search with the"
            " item's image."
        )
    items = index.get(ids, arrays=True)
    # The arrays may belong to the new bundle.
    if index.follow() is not bundle:
        raise Superseded("Another bundle is served.")
    for number, id in enumerate(ids, 1):
        if id not in items or VECTOR not in items[id].arrays:
            raise no_item(f"Query {number}: there" if len(ids) > 1 else "There")
    vectors = np.stack([items[id].arrays[VECTOR] for id in ids])
    codes = None
    if bundle.manifest.rescorer is not None:
        codes = np.stack([items[id].arrays[CODE] for id in ids])
    base = None
    if bundle.manifest.adapter is not None:
        base = np.stack([items[id].arrays[BASE] for id in ids])
    return Encoded(vectors, vectors, codes, bundle.sha256, base)
