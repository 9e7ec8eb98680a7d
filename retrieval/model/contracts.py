"""What the host asks of a loss, miner, generator, combiner, learner, backbone, dataset and metric.

Shapes: B items in a batch, F feature width, C code width, P vector width, T triplets, Q queries, R
references. Losses and miners follow pytorch-metric-learning's calls exactly, so that whatever was
written for it works here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from retrieval.host.lazy import kept_out

if TYPE_CHECKING:
    from PIL.Image import Image

    from retrieval.serving.images import Preprocessing

# SciPy loads these when it is asked for them, which pytorch-metric-learning seldom does
with kept_out("scipy.stats"), kept_out("scipy.special"):
    import pytorch_metric_learning.losses  # noqa: F401 (whoever imports it first, it is without them)
    from pytorch_metric_learning.distances import BaseDistance


TripletIndices = tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]
"""What a miner gives: `(anchor, positive, negative)` or `(anchor1, positive, anchor2, negative)`,
each (T,) int64.
"""


class Dataset(ABC):
    """Items with a label each: images, or vectors that are already there.

    A dataset knows all labels and keys, and gives one item at a time: nothing obliges it to hold
    all pixels in memory.

    Attributes:
        kind: "image" or "features".
        labels: one label per item, as text. A whole number, also of NumPy or in a tensor, is taken
            as its digits; anything else is refused.
        keys: one stable name an item (a path, or "digits/17"), each given once.
        splits: "train", "validation" or "test" for each item, where the data come with a split;
            else None.
        roles: "query", "gallery" or "" for each item, where the data come with a protocol; else
            None.
        metadata: further columns of each item, or None.
        arrays: all images as uint8 (N, H, W) or (N, H, W, 3), or all vectors as float32 (N, F),
            when they are in memory (or mapped) anyway: batches are then sliced from it. Otherwise
            None.
        files: one path per item, where items are files: with `arrays` or `files` a frozen
            backbone's features are cached from run to run.
        notes: what the user should know of how the data were read, such as what was left out; kept
            in `run.json`.
    """

    kind: Literal["image", "features"] = "image"
    labels: Sequence[str]
    keys: Sequence[str]
    splits: Sequence[str] | None = None
    roles: Sequence[str] | None = None
    metadata: Sequence[Mapping[str, Any]] | None = None
    arrays: NDArray[Any] | None = None
    files: Sequence[Path] | None = None
    notes: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def __getitem__(self, index: int) -> Image | NDArray[Any]:
        """Return item `index`: a Pillow image, or an array as in `arrays` without the first axis;
        from any thread.

        The item alone, without its label; what is neither is refused in a sentence that names the
        item.

        Raises:
            DataError: it cannot be read; the sentence names the item.
        """


class Transform(Protocol):
    """A random change to one training image, such as torchvision's.

    What it draws from torch, with no generator named, follows from the run's seed and from the
    image's epoch, batch and place: it is the same in a run that is resumed, and with any number of
    processes. What it draws from elsewhere (`random`, NumPy) would not be.
    """

    def __call__(self, pixels: Tensor, /) -> Tensor:
        """Return pixels, uint8 (channels, H, W), of the size of those that are given; from several
        threads, or in another process.
        """


class Backbone(nn.Module):
    """Images (B, channels, H, W), normalised, or vectors (B, F), to features (B, F).

    Attributes:
        features: F.
        preprocessing: what an image goes through before; None for a backbone of vectors.
    """

    features: int
    preprocessing: Preprocessing | None = None


@runtime_checkable
class Loss(Protocol):
    """pytorch-metric-learning's loss call."""

    def __call__(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: TripletIndices | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """Return a scalar, differentiable in `embeddings` (B, C) and `ref_emb` (R, C); 0 for a
        batch without pairs.
        """


@runtime_checkable
class Miner(Protocol):
    """pytorch-metric-learning's miner call."""

    def __call__(
        self,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> TripletIndices:
        """Return indices into `embeddings` (B, C) for anchors and into `ref_emb` (or `embeddings`)
        for the others.
        """


class Generator(nn.Module):
    """Makes synthetic features from triplets' features, which extend the reference set.

    With parameters, the host gives it an optimiser of its own, stepped on `objective` alone.
    Without (a closed form), `objective` is never called. The loss's gradient passes through
    `forward` to the backbone, where that trains.

    Attributes:
        replaces: whose place in its triplet a synthetic sample takes, and whose label.
    """

    replaces: ClassVar[Literal["positive", "negative"]] = "negative"

    def bind(self, head: nn.Module) -> None:
        """Take note of the model's head, for a generator that uses the current metric.

        Called once, when the model is built and before it trains. The head stays the model's: kept
        as an attribute it would be a sub-module, saved and trained twice, which is refused. Keep it
        in a tuple.

        Args:
            head: features (B, F) to codes (B, C).
        """

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Return synthetic features (T, F) in place of the negatives (or positives) of triplets'
        features, each (T, F).
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define forward(anchor, positive, negative)"
        )

    def objective(
        self,
        anchor: Tensor,
        positive: Tensor,
        negative: Tensor,
        synthetic: Tensor,
        distance: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Return the scalar that the generator minimises.

        Args:
            anchor: (T, F) features, as are `positive`, `negative`.
            positive: see `anchor`.
            negative: see `anchor`.
            synthetic: (T, F), what `forward` gave.
            distance: the metric being learned, head and combiner: two (T, F) feature tensors to
                (T,) distances.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has parameters, so it must define objective(…)"
        )


@dataclass(frozen=True)
class Subspace:
    """Columns `start` to `stop` of the index vector, searched for candidates of their own.

    Merge "score" multiplies the sub-space's scores with `weight`, which is above 0.
    """

    name: str
    start: int
    stop: int
    weight: float = 1.0


class Combiner(BaseDistance):
    """A distance over codes, so that any loss that takes a `distance` trains it; smaller is closer.

    Attributes:
        exact: True when the order of `index_vectors` under the Euclidean distance to
            `query_vectors` *is* the distance's order. Otherwise export adds a rescorer, which
            orders the candidates by `compute_mat`.
        subspaces: several ranges of columns with candidates of their own; empty: the whole vector
            is one.
        merge: how candidates of several sub-spaces become one list when there is no rescorer: "min"
            keeps an item's smallest Euclidean distance; "score" is
            `retrieval.serving.merging.best_score`: each sub-space scores its own k nearest, and an
            item keeps its best. Those answers are not the order of any distance of two codes, so
            `compute_mat` then serves training and exact evaluation only.
        candidates: how many candidates a rescorer is given by default, unless `choose_candidates`
            says otherwise.
        measure: how the distance of an answer is measured where vectors alone decide: "euclidean",
            between query vector and stored vector; "inner", as
            `retrieval.serving.merging.of_products`: needed where that, and not the Euclidean
            distance of the two, is `compute_mat`. Both have one order where stored vectors are of
            one length.
        plain: True when there is nothing to combine, as with one part: the model keeps the head and
            goes without the combiner, bit for bit as if the recipe named none.
    """

    exact: bool = True
    subspaces: tuple[Subspace, ...] = ()
    merge: Literal["min", "score"] = "min"
    measure: Literal["euclidean", "inner"] = "euclidean"
    candidates: int = 200
    plain: bool = False

    def __init__(self) -> None:
        # Codes arrive ready: a second normalisation would change what the combiner measures.
        super().__init__(normalize_embeddings=False, p=2, power=1, is_inverted=False)

    def build_head(self, features: int) -> nn.Module:
        """Return a module from features (B, F) to codes (B, C)."""
        raise NotImplementedError(f"{type(self).__name__} must define build_head(features)")

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return distances (Q, R) between codes (Q, C) and (R, C)."""
        raise NotImplementedError(
            f"{type(self).__name__} must define compute_mat(query, reference)"
        )

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return distances (N,) between codes (N, C) and (N, C), row by row."""
        raise NotImplementedError(
            f"{type(self).__name__} must define pairwise_distance(query, reference)"
        )

    def index_vectors(self, codes: Tensor) -> Tensor:
        """Return the vectors (N, P) that FAISS stores for codes (N, C)."""
        return codes

    def query_vectors(self, codes: Tensor) -> Tensor:
        """Return the vectors (N, P) that FAISS is asked with; may differ from `index_vectors`."""
        return self.index_vectors(codes)

    def objective(
        self, codes: Tensor, labels: Tensor, indices: TripletIndices | None
    ) -> tuple[Tensor | None, Mapping[str, Tensor]]:
        """Return what the combiner minimises besides the loss, and metrics for the log; of each
        training batch.

        Args:
            codes: (B, C).
            labels: (B,).
            indices: what the miner picked, if there is one.

        Returns:
            A scalar that is added to the loss in the phases that train the combiner, or None; and
            scalars by name, whose means are in each epoch's log.
        """
        return None, {}

    def warnings(self, metrics: Mapping[str, float]) -> Sequence[str]:
        """Return sentences for whoever trains, from an epoch's mean `metrics`; none by default."""
        return ()

    def choose_candidates(self, codes: Tensor) -> int:
        """Return the rescorer's default number of candidates, by codes (N, C) of real items."""
        return self.candidates


@runtime_checkable
class Learner(Protocol):
    """A scikit-learn estimator on feature vectors, also in `Pipeline` and `GridSearchCV`."""

    def fit(self, X: NDArray[np.floating[Any]], y: NDArray[Any]) -> Any:
        """Learn from features (N, F) and labels (N,)."""

    def transform(self, X: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
        """Return codes (N, C)."""

    def to_model_parts(self) -> tuple[nn.Module, Combiner | None]:
        """Return the head, with the numbers of `transform`, and the combiner or None."""


class Metric(Protocol):
    """A retrieval figure, query by query, so that any number of queries fits in memory.

    A metric that knows grades of relevance has a method `graded(gains, ideal)` besides, which is
    called in its place where `[evaluate]` sets `levels` or `tags`: with the grades (Q, k) of the
    items at each rank and the gallery's largest grades, largest first.

    Attributes:
        depth: how many neighbours it looks at: a number, "relevant" (as many as the query has
            relevant items), or "all".
    """

    depth: int | Literal["relevant", "all"]

    def __call__(
        self, matches: NDArray[np.bool_], relevant: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return one value per query (Q,); the host takes the mean.

        Args:
            matches: (Q, k) whether the neighbour at each rank, nearest first and the query itself
                left out, has the query's label; k is at least `depth`.
            relevant: (Q,) how many items of the gallery have the query's label, at least 1.
        """


def as_tensor(array: NDArray[Any]) -> Tensor:
    """Return a tensor that shares the array's memory where it can."""
    return torch.from_numpy(np.ascontiguousarray(array))


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told at the beginning.

    Attributes:
        name: what to call it: the recipe's name, or the comparison's.
        group: the comparison that a training belongs to; None where it belongs to none.
        configuration: the recipe, or the comparison's settings: tables of what JSON can say.
        key: what `begin` gave when this run began, where it goes on; else None.
    """

    name: str
    group: str | None
    configuration: Mapping[str, Any]
    key: str | None


class Tracker(Protocol):
    """Is told how one run goes.

    All calls come from one thread, which is not the one that trains; what makes it is called by
    that one, before anything else, and is the place to import what it needs.

    Whatever a tracker raises is told in a sentence, and the run goes on without it.
    """

    def begin(self, run: TrackedRun) -> tuple[str, str]:
        """Begin a run, or go on with the one that `run.key` names; called first, and once.

        Returns:
            The run's key, and where a person finds it.
        """

    def log(self, metrics: Mapping[str, float], epoch: int | None) -> None:
        """Take metrics, by name.

        Args:
            metrics: an epoch's, or the final ones. An epoch that was cut off is done, and told,
                again.
            epoch: its number from 0; None: they are final.
        """

    def table(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        """Take a table, its head first."""

    def end(self, how: Literal["finished", "stopped", "failed"]) -> None:
        """End the run; called last. One that was stopped may go on later."""
