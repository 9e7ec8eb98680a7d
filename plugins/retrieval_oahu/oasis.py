"""OASIS: a bilinear similarity, learned passive-aggressively."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field
from sklearn.utils.validation import check_is_fitted, validate_data

from retrieval_oahu.linear import add_outer
from retrieval_oahu.network import unit
from retrieval_oahu.online import OnlineLearner

if TYPE_CHECKING:
    from torch import nn

    from retrieval_oahu.bilinear import Bilinear

Floats = NDArray[np.floating[Any]]


class OASIS(OnlineLearner):
    """Online algorithm for scalable image similarity: S(x, y) = xᵀ W y, a passive-aggressive step
    for each violated margin.

    Chechik, Sharma, Shalit & Bengio, "Large Scale Online Learning of Image Similarity Through
    Ranking", JMLR 2010. W is neither symmetric nor positive: S is not a distance. Vectors are
    scaled to unit length, so that a search by inner product is one by distance: codes are unit
    vectors, and a query's are multiplied by Wᵀ.

    Args:
        aggressiveness: C, the largest step.
        margin: by how much a positive should be more similar than a negative; 0.01 on unit vectors
            is what the paper's 1 is on vectors of length 10, such as images of some hundred pixels.
        seeds: how many random triplets `fit` draws.
        closure: how many triplets that follow from those it adds.
        seed: seed of `fit`'s triplets; 0 by default.
        random_state: scikit-learn's name of `seed`; give one of them, or both the same number.

    Attributes:
        similarity_: (F, F) W.
    """

    similarity_: Floats

    def __init__(
        self,
        aggressiveness: Annotated[float, Field(gt=0)] = 0.1,
        margin: Annotated[float, Field(gt=0)] = 0.01,
        seeds: Annotated[int, Field(ge=0)] = 5000,
        closure: Annotated[int, Field(ge=0)] = 5000,
        seed: int | None = None,
        random_state: int | None = None,
    ) -> None:
        self.aggressiveness = aggressiveness
        self.margin = margin
        self.seeds = seeds
        self.closure = closure
        self.seed = seed
        self.random_state = random_state

    def transform(self, X: ArrayLike) -> Floats:
        """Return unit vectors (N, F), which are searched; `queries` gives the vectors to search
        with.
        """
        check_is_fitted(self, "n_triplets_")
        return unit(validate_data(self, X, reset=False, dtype=(np.float64, np.float32)))

    def queries(self, X: ArrayLike) -> Floats:
        """Return Wᵀ x (N, F), whose inner product with `transform`'s codes is the similarity."""
        codes = self.transform(X)
        asked: Floats = codes @ self.similarity_.astype(codes.dtype)
        return asked

    def pair_distance(self, pairs: ArrayLike) -> Floats:
        """Return |Wᵀx − y| of the unit vectors x and y of each pair (P, 2, F), (P,): what a search
        of the exported model measures.

        The first item of a pair is the query. For one query, items are in the order of
        `pair_score`; the distance is not symmetric, and that of an item and itself is not 0.

        Raises:
            NotFittedError: nothing has been fitted.
            ValueError: the array has another shape or width, or holds NaN or infinity.
        """
        query, item = self._sides(pairs)
        return np.asarray(np.linalg.norm(self.queries(query) - self.transform(item), axis=1))

    def pair_score(self, pairs: ArrayLike) -> Floats:
        """Return the learned similarity xᵀ W y of the unit vectors of each pair (P, 2, F), (P,);
        larger is more alike.

        See `pair_distance` for the errors.
        """
        query, item = self._sides(pairs)
        return np.asarray(np.einsum("pf,pf->p", self.queries(query), self.transform(item)))

    def to_model_parts(self) -> tuple[nn.Module, Bilinear]:
        """Return the head, which scales to unit length, and the combiner, which multiplies queries."""
        from retrieval_oahu.bilinear import Bilinear, UnitLength

        check_is_fitted(self, "n_triplets_")
        return UnitLength(), Bilinear(self.similarity_)

    def _begin(self, features: int, sample: Floats | None) -> None:
        for name in ("aggressiveness", "margin"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)} and must be above 0.")
        self.similarity_ = np.eye(features)

    def _learn(self, triplets: Floats) -> int:
        used = 0
        for a, p, n in unit(triplets):
            apart = p - n
            loss = self.margin - float(a @ self.similarity_ @ apart)
            size = float(a @ a) * float(apart @ apart)
            if loss > 0 and size > 0:
                add_outer(self.similarity_, min(self.aggressiveness, loss / size), a, apart)
                used += 1
        return used

    @property
    def _n_features_out(self) -> int:
        return int(self.n_features_in_)
