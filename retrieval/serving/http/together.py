"""Searches that wait and are alike, done as one: exact search reads its vectors once for all of them, and a GPU encodes all at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError, RetrievalError
from retrieval.serving.bundle import Bundle, Encoded
from retrieval.serving.http.errors import Gone
from retrieval.serving.http.pool import Job
from retrieval.serving.http.queries import Query
from retrieval.serving.http.settings import Settings
from retrieval.serving.queries import encode_vectors
from retrieval.serving.stages import Span, Trail, following, stage

_SLOW = 0.002  # seconds of a search from which an image's waits for others, rather than be done where it was decoded
_PART = 0.25  # of the deadline
_LATEST = 0.1  # weight of the latest search in the estimate

What = NDArray[Any] | Encoded
"""Of one query: a vector (P,) or features (F,); pixels (1, C, H, W), which a GPU is to encode; or what was encoded, N = 1."""


class Asked(NamedTuple):
    """One query that may be searched for together with others.

    Attributes:
        query: how.
        what: is searched for.
        finish: makes the answer.
    """

    query: Query
    what: What
    finish: Callable[[Any], bytes]


class Pace:
    """How long a search of an index takes, as measured: decides where those of images are done, and how many are done at once."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def note(self, seconds: float, queries: int) -> None:
        """Count a search for some queries; threads that do so at a time may lose one."""
        self._seconds += _LATEST * (seconds / max(1, queries) - self._seconds)

    def most(self, settings: Settings) -> int:
        """Return how many queries to search for at once: as many as take a part of the deadline one by one, so that a batch meets it."""
        return max(1, min(settings.together, int(_PART * settings.deadline / max(self._seconds, 1e-6))))

    def waits(self, bundle: Bundle) -> bool:
        """Whether an image's search is worth another thread's: it is long, or a GPU encodes."""
        return self._seconds > _SLOW or bundle.device != "cpu"


def key_of(owner: object, bundle: Bundle, query: Query, what: What) -> Hashable:
    """Return what queries have in common that can be searched for at once."""
    kind = "encoded" if isinstance(what, Encoded) else what.ndim
    return id(owner), bundle.sha256, kind, query.k, query.where, query.candidates


def fits(bundle: Bundle, what: What) -> bool:
    """Whether a query can be one of several; one that cannot is searched for alone, and told why."""
    if isinstance(what, Encoded) or what.ndim > 1:
        return True
    said = bundle.manifest
    width = said.input.shape[0] if said.input.kind == "features" else said.vector
    with np.errstate(over="ignore"):
        return what.shape == (width,) and bool(np.isfinite(what.astype(np.float32)).all())


def encode_together(bundle: Bundle, given: Sequence[What]) -> Encoded | NDArray[Any]:
    """Return queries of one kind as an index is asked for them all.

    Raises:
        DataError: one of them, or what the encoder makes of it, cannot be used.
    """
    encoded = [one for one in given if isinstance(one, Encoded)]
    if encoded:
        codes = [one.code for one in encoded if one.code is not None]
        return Encoded(
            np.concatenate([one.vector for one in encoded]),
            np.concatenate([one.query for one in encoded]),
            np.concatenate(codes) if codes else None,
            encoded[0].bundle,
        )
    arrays = [one for one in given if not isinstance(one, Encoded)]
    if arrays[0].ndim > 1:
        with stage("encode", len(arrays)):
            return bundle.encode(np.concatenate(arrays))
    if bundle.manifest.input.kind != "features":
        return np.stack(arrays)
    with stage("encode", len(arrays)):
        return encode_vectors(bundle, np.stack(arrays))


def answer_together(
    jobs: Sequence[Job[bytes]], bundle: Bundle, search: Callable[[Sequence[Asked]], Sequence[Any]]
) -> list[Any]:
    """Return the answer of each job, or its error: of one whose client has left, `Gone`; of one that is at fault, its own.

    Args:
        jobs: alike.
        bundle: of them all.
        search: gives for each what was found. An error of the index is everybody's; of any other, each is asked for alone.
    """
    given = [job.given for job in jobs]
    good = [at for at, one in enumerate(given) if one is not None and fits(bundle, one.what)]
    made: list[Any] = [Gone() if one is None else None for one in given]
    trail = Trail()
    found: Sequence[Any] = ()
    try:
        if good:
            with following(trail):
                found = search([given[at] for at in good])
    except DataError:
        good = []
    except RetrievalError as fault:
        for at in good:
            made[at] = copy.copy(fault)
    except Exception:
        good = []
    for number, at in enumerate(good if found else ()):
        _share(trail, jobs[at].trail, first=number == 0)
        made[at] = _finished(jobs[at], given[at], found[number])
    return [job.alone() if one is None else one for job, one in zip(jobs, made, strict=True)]


def _finished(job: Job[bytes], asked: Asked, found: Any) -> Any:
    try:
        job.check()
        with following(job.trail):
            return asked.finish(found)
    except Exception as fault:
        return fault


def _share(common: Trail, own: Trail | None, *, first: bool) -> None:
    """Note what was done for all on the trail of one; how many went through at once only on the first, as it happened once."""
    if own is not None:
        own.spans += [
            span if first else Span(span.stage, span.began, span.ended, span.own, 0) for span in common.spans
        ]
