"""Classification, similarity and retrieval with OAHU's embeddings (Gao et al. 2019, §3.6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike
from retrieval.base.arrays import Array, Floats, Floats64, Ints
from retrieval.helpers import read_labels

if TYPE_CHECKING:
    from retrieval.results import Bundle
# Largest number of distances in memory at a time.
_BLOCK = 1 << 22
# Number of neighbours beyond k whose distances are computed exactly. Distances from a float32
# product can order the last neighbours wrongly.
_MARGIN = 8


@dataclass(frozen=True)
class Spaces:
    """Items embedded in each of OAHU's L + 1 metric spaces, and the spaces' weights.

    Attributes:
        embeddings: (L + 1, N, E) unit embeddings.
        alpha: (L + 1,) weights, which sum to 1.
    """

    embeddings: Floats
    alpha: Floats

    @classmethod
    def of_bundle(cls, bundle: Bundle, inputs: Array, spaces: int | None = None) -> Spaces:
        """Embed inputs with an exported bundle, and use the weights that it stores.

        Args:
            bundle: an exported OAHU model with any value of `search`.
            inputs: a batch of inputs for the bundle's encoder.
            spaces: L + 1, the number of spaces. It is required for a bundle with `search` "sum",
                which does not store it.

        Raises:
            ValueError: `spaces` is missing, or does not divide the size of the vectors.
        """
        manifest = bundle.manifest
        encoded = bundle.encode(inputs)
        count = len(manifest.subspaces) or spaces
        if not count or encoded.vector.shape[1] % count:
            raise ValueError(
                f"The bundle's vectors have {encoded.vector.shape[1]} numbers. Set spaces to the"
                " number of equal spaces that they consist of."
            )
        embeddings = encoded.vector.reshape(len(inputs), count, -1).transpose(1, 0, 2)
        if manifest.subspaces:
            weights = np.array([space.weight for space in manifest.subspaces])
        else:
            # A query's embeddings have the weights as lengths; an embedding that is 0 says nothing.
            query = encoded.query.reshape(len(inputs), count, -1)
            weights = np.linalg.norm(query, axis=2).max(axis=0)
        return cls(np.ascontiguousarray(embeddings), weights / weights.sum())

    def __len__(self) -> int:
        return int(self.embeddings.shape[1])

    def __getitem__(self, items: Any) -> Spaces:
        """Return the items that an index into the N items selects."""
        return Spaces(self.embeddings[:, items], self.alpha)

    def codes(self) -> Floats:
        """Return embeddings (N, (L + 1) E), whose squared Euclidean distance is Σ α_l D_l²."""
        factors = np.sqrt(self.alpha).astype(self.embeddings.dtype)
        weighted = self.embeddings * factors[:, None, None]
        return np.ascontiguousarray(weighted.transpose(1, 0, 2)).reshape(len(self), -1)

    def distances(self, references: Spaces) -> Floats:
        """Return D_l (L + 1, N) between these items and N others, row by row (Eq 6)."""
        difference = self.embeddings.astype(np.float64) - references.embeddings
        distances: Floats = np.sqrt((difference * difference).sum(axis=2))
        return distances

    def classify(self, references: Spaces, labels: ArrayLike, k: int = 5) -> Array:
        """Return labels (N,) by the votes of the k nearest references in each space (Eq 23–25).

        Raises:
            ValueError: a label is missing, there is not one label per reference, or k is below 1.
        """
        names, classes = np.unique(read_labels(labels), return_inverse=True)
        if len(classes) != len(references):
            raise ValueError(f"There are {len(classes)} labels for {len(references)} references.")
        rows, scores = self._candidates(references, k)
        votes = np.zeros((len(self), len(names)))
        query = np.arange(len(self))[:, None]
        for space in range(len(rows)):
            np.add.at(votes, (query, classes[rows[space]]), scores[space])
        winners: Array = names[votes.argmax(axis=1)]
        return winners

    def similar(self, references: Spaces, threshold: float = 0.55) -> Floats64:
        """Return P (N,) of pairs, row by row (Eq 26); see `OAHU.similar`.

        Raises:
            ValueError: the threshold is not between 0 and 1, or the numbers of items differ.
        """
        if not 0 < threshold < 1:
            raise ValueError(f"threshold is {threshold} and must be above 0 and below 1.")
        if len(self) != len(references):
            raise ValueError(
                f"Both sides of the pairs must have the same number of items, not {len(self)} and"
                f" {len(references)}."
            )
        alike = self.distances(references) / 2 < threshold
        return np.asarray(self.alpha @ alike, dtype=np.float64)

    def retrieve(self, references: Spaces, k: int = 10) -> tuple[Ints, Floats64]:
        """Return rows and scores (N, k), best first, by Eq 27; see `OAHU.retrieve`.

        An item that several spaces propose gets the best of its scores, not their sum, because the
        paper keeps "distinct items" of a sorted list.
        """
        rows, scores = self._candidates(references, k)
        width = rows.shape[2]
        flat = np.concatenate(list(rows), axis=1)
        value = np.concatenate(list(scores), axis=1)
        # Sort by score and then row, and keep the first entry of each row.
        order = np.lexsort((flat, -value), axis=1)
        flat = np.take_along_axis(flat, order, 1)
        value = np.take_along_axis(value, order, 1)
        best_rows = np.empty((len(self), width), np.int64)
        best = np.empty((len(self), width))
        for query in range(len(self)):
            _, first = np.unique(flat[query], return_index=True)
            first = np.sort(first)[:width]
            best_rows[query] = flat[query, first]
            best[query] = value[query, first]
        return best_rows, best

    def _candidates(self, references: Spaces, k: int) -> tuple[Ints, Floats64]:
        """Return rows and scores (L + 1, N, k) of each space's k nearest references (Eq 23)."""
        if k < 1 or not len(references):
            raise ValueError(
                f"k and the number of references must be at least 1, not {k} and {len(references)}."
            )
        if self.embeddings.shape[::2] != references.embeddings.shape[::2]:
            raise ValueError(
                "The references are of another model: the number or size of their spaces differs."
            )
        pairs = [
            _nearest(q, r, min(k, len(references)))
            for q, r in zip(self.embeddings, references.embeddings, strict=True)
        ]
        rows = np.stack([p[0] for p in pairs])
        distances = np.stack([p[1] for p in pairs])
        least = distances[..., :1]
        most = distances[..., -1:]
        # If all distances are equal (or k = 1), the paper has 0/0; here they count as nearest.
        zeros = np.zeros_like(distances)
        spread = np.divide(distances - least, most - least, out=zeros, where=most > least)
        return rows, np.exp(-spread) * self.alpha[:, None, None]


def _nearest(query: Floats, references: Floats, k: int) -> tuple[Ints, Floats64]:
    """Return rows and distances (N, k), nearest first; equal distances are ordered by row."""
    size = len(references)
    rows = np.empty((len(query), k), np.int64)
    distances = np.empty((len(query), k))
    norms = (references * references).sum(axis=1)
    wide = min(size, k + _MARGIN)
    step = max(1, _BLOCK // size)
    for start in range(0, len(query), step):
        block = query[start : start + step]
        # The query's norm is left out, because it does not change the order.
        approximate = norms - 2 * block @ references.T
        if wide < size:
            candidates = np.argpartition(approximate, wide - 1, axis=1)[:, :wide]
            # So that equal distances are ordered by row.
            candidates = np.sort(candidates, axis=1)
        else:
            candidates = np.broadcast_to(np.arange(size), (len(block), size))
        difference = references[candidates].astype(np.float64) - block[:, None]
        exact = np.sqrt((difference * difference).sum(axis=2))
        order = np.argsort(exact, axis=1, kind="stable")[:, :k]
        rows[start : start + step] = np.take_along_axis(candidates, order, 1)
        distances[start : start + step] = np.take_along_axis(exact, order, 1)
    return rows, distances
