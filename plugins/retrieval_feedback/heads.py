"""Learned heads: a comparison of learners, and the export of the best one as an ONNX graph."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from retrieval.base.arrays import Floats32
from retrieval.errors import BundleError, DataError
from retrieval.feedback.interleaving import load_head
from retrieval.host.plugins import create
from retrieval.plugin import MetricLearner

BASE_ALONE = "base"
"""Name of the candidate without a head."""
LEARNERS = ("feedback.low_rank", "feedback.diagonal", "oahu.warm", "oahu.oahu")
"""Learners that compete unless others are named."""
WINDOWS = (1.0, 1 / 3)
"""Shares of the triplets, the latest, that each learner may learn from: tastes change."""
MAX_COMPARED_TRIPLETS = 20_000
"""Number of latest triplets on which learners are compared; the best learner learns from all."""
_CHUNK = 50_000
_VERIFIED = 512
"""Number of vectors on which a graph is compared with torch."""
Map = Callable[[Floats32], Floats32]
"""A function from base vectors (N, P) to vectors (N, P')."""


class Candidate(NamedTuple):
    """A learner, what it learned from, and how it does on voters whom it did not learn from.

    Attributes:
        learner: its name.
        window: share of the triplets, the latest, that it learned from.
        gain: share of a voter's comparisons that it decides correctly, minus the incumbent's share;
            the mean over voters.
        error: standard error of `gain`.
    """

    learner: str
    window: float
    gain: float
    error: float

    @property
    def is_promising(self) -> bool:
        """Whether it may be better than the incumbent, so that a trial is worthwhile.

        It has learned from half of the voters; from all of them, it is likely to be better still.
        """
        return self.gain > 0


def compete(
    triplets: Floats32, voters: Sequence[str], incumbent: Map, learners: Sequence[str]
) -> list[Candidate]:
    """Compare learners by cross-validation over voters; return all candidates, the best one first.

    The best is the first, in the order in which learners are named, whose gain is within one
    standard error of the largest. Each half of the voters judges what was learned from the other
    half, by the later half of their triplets. A positive should be nearer than its negative, and
    nearer than the negative of another triplet: hits of one query are all alike, and a map that
    orders them better may mix them with what nobody wants. The base itself is a candidate as well.

    Args:
        triplets: (T, 3, P) base vectors, the latest first.
        voters: voter of each triplet.
        incumbent: the map that is served.
        learners: names of learners.
    """
    triplets = triplets[:MAX_COMPARED_TRIPLETS]
    voters = voters[:MAX_COMPARED_TRIPLETS]
    fold = np.array([hashlib.sha256(voter.encode()).digest()[0] % 2 for voter in voters])
    later = np.arange(len(triplets)) < len(triplets) / 2
    rows: dict[str, list[int]] = {}
    for row in np.flatnonzero(later).tolist():
        rows.setdefault(voters[row], []).append(row)
    before = _correct_share(incumbent, triplets)
    candidates = []

    def compare(name: str, window: float, gains: Floats32) -> None:
        by_voter = [float(gains[of_voter].mean()) for of_voter in rows.values()]
        error = float(np.std(by_voter) / max(len(by_voter) - 1, 1) ** 0.5)
        candidates.append(Candidate(name, window, float(np.mean(by_voter)), error))

    compare(BASE_ALONE, 1.0, _correct_share(load_head(None), triplets) - before)
    for name in learners:
        for window in WINDOWS:
            gains = -before
            for side in (0, 1):
                lessons = triplets[fold != side]
                learner = fit_learner(name, lessons[: round(window * len(lessons))])
                gains[fold == side] += _correct_share(learner.transform, triplets)[fold == side]
            compare(name, window, gains)
    best = max(candidates, key=lambda candidate: candidate.gain - candidate.error)
    first = next(c for c in candidates if c.gain >= best.gain - best.error)
    return [first, *(candidate for candidate in candidates if candidate is not first)]


def fit_learner(name: str, triplets: Floats32) -> Any:
    """Return a learner that has learned from triplets (T, 3, P), which are given latest first.

    Raises:
        DataError: the learner does not learn from triplets.
    """
    learner = create("learner", name)
    if not hasattr(learner, "partial_fit"):
        raise DataError(f"The learner {name} has no partial_fit, so it cannot learn from triplets.")
    in_order = triplets[::-1]
    for start in range(0, len(in_order), _CHUNK):
        learner.partial_fit(in_order[start : start + _CHUNK])
    return learner


def export_head(learner: Any, vectors: Floats32) -> bytes:
    """Export a fitted learner; return its ONNX graph from "input" (N, P) to "vector" (N, P').

    The graph agrees with torch on `vectors` (N, P). The same learner gives the same bytes.

    Raises:
        BundleError: torch cannot export it, or the learner compares embeddings in another way than
            by their Euclidean distance.
    """
    from retrieval.export.agreement import encoder_graph, torch_outputs
    from retrieval.model.graph import TOLERANCE, EncoderModule, ready
    from retrieval.model.model import Model

    head, combiner = learner.to_model_parts()
    # A metric learner's distance is that of its embeddings, unless it says otherwise.
    is_euclidean = getattr(type(learner), "pair_distance", None) is MetricLearner.pair_distance
    if combiner is not None and not is_euclidean:
        raise BundleError(
            f"{type(learner).__name__} compares embeddings in another way than by their Euclidean"
            " distance. Name other learners."
        )
    backbone = create("backbone", "core.features", features=vectors.shape[1])
    model = Model(backbone, head)
    items = vectors[:_VERIFIED]
    with ready(model):
        encoder = EncoderModule(model).eval()
        outputs = torch_outputs(encoder, items)
        return encoder_graph(encoder, items, outputs, TOLERANCE, "head")[0]


def _correct_share(function: Map, triplets: Floats32) -> Floats32:
    """Return for each triplet (T, 3, P) the share, 0, ½ or 1, of two negatives that are farther
    than its positive: its own, and that of the triplet half the list away.
    """
    rows = np.asarray(function(triplets.reshape(-1, triplets.shape[2])), np.float64)
    anchors, positives, negatives = np.moveaxis(rows.reshape(len(triplets), 3, -1), 1, 0)
    distance = ((anchors - positives) ** 2).sum(axis=1)
    share: Floats32 = np.zeros(len(triplets), np.float32)
    for side in (negatives, np.roll(negatives, len(triplets) // 2, axis=0)):
        share += 0.5 * (((anchors - side) ** 2).sum(axis=1) > distance)
    return share
