"""OASIS: a bilinear similarity, learned passive-aggressively."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from retrieval_oahu.linear import add_outer
from retrieval_oahu.network import unit
from retrieval_oahu.online import OnlineLearner

if TYPE_CHECKING:
    from torch import nn

    from retrieval_oahu.bilinear import Bilinear

Floats = NDArray[np.floating[Any]]


class OASIS(ClassNamePrefixFeaturesOutMixin, TransformerMixin, OnlineLearner):
    """Online algorithm for scalable image similarity: S(x, y) = xᵀ W y, a passive-aggressive step for each violated margin.

    Chechik, Sharma, Shalit & Bengio, "Large Scale Online Learning of Image Similarity Through Ranking", JMLR 2010. W is neither symmetric nor
    positive: S is no distance. Vectors are scaled to unit length, so that a search by inner product is one by distance:
    codes are unit vectors, and a query's are multiplied by Wᵀ.

    Args:
        aggressiveness: C, the largest step.
        margin: by how much a positive should be more similar than a negative; 0.01 on unit vectors is what the paper's 1 is on vectors of
            length 10, such as images of some hundred pixels.
        seeds: how many random triplets `fit` draws.
        closure: how many triplets that follow from those it adds.
        seed: seed of `fit`'s triplets.

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
        seed: int = 0,
    ) -> None:
        self.aggressiveness = aggressiveness
        self.margin = margin
        self.seeds = seeds
        self.closure = closure
        self.seed = seed

    def transform(self, X: ArrayLike) -> Floats:
        """Return unit vectors (N, F), what is searched; `queries` gives what it is searched with."""
        check_is_fitted(self, "n_triplets_")
        return unit(validate_data(self, X, reset=False, dtype=(np.float64, np.float32)))

    def queries(self, X: ArrayLike) -> Floats:
        """Return Wᵀ x (N, F), whose inner product with `transform`'s codes is the similarity."""
        codes = self.transform(X)
        asked: Floats = codes @ self.similarity_.astype(codes.dtype)
        return asked

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
