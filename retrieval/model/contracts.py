"""The contracts of plugins' parts: backbone, loss, miner, generator, combiner and others.

Shapes: B items in a batch, F features, C numbers in a code (the head's output), P numbers in a
vector that the index stores, T triplets, Q queries, R references. "The host" is this package, which
calls the parts. Losses and miners are called as in pytorch-metric-learning, so its losses and
miners work here. The contract of a dataset is in `retrieval.data.datasets`.

`breach` makes the error for a part that does not keep its contract.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from torch import Tensor, nn

from retrieval.base.arrays import Array, Bools, Floats, Floats32, Floats64, Ints
from retrieval.base.lazy import defer_import
from retrieval.errors import PluginError

# A function for labels of a hierarchy and one loss use these parts of SciPy, which take most of a
# second to import.
_PML = "pytorch_metric_learning"
defer_import("scipy.stats", f"{_PML}.utils.common_functions")
defer_import("scipy.special", f"{_PML}.losses.large_margin_softmax_loss")

from pytorch_metric_learning.distances import BaseDistance  # noqa: E402

if TYPE_CHECKING:
    from retrieval.images.preprocessing import Preprocessing


TripletIndices = tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]
"""A miner's (T,) int64 indices: (anchor, positive, negative) or (anchor1, positive, anchor2,
negative)."""


@dataclass(frozen=True)
class TrainingItems:
    """The items that a batch sampler chooses from, and the sizes that `[sampler]` sets.

    Attributes:
        labels: class ids (N,) of the training items.
        metadata: the columns of these items, one mapping per item, or `None`.
        classes: number P of classes in a batch.
        rows: number M of items of each class; a batch has P × M rows.
        batches: number of batches in an epoch.
        embeddings: current embeddings (N, C) of these items, for a sampler with `uses_embeddings`;
            `None` when the host only tries the sampler before training.
    """

    labels: Ints
    metadata: Sequence[Mapping[str, Any]] | None
    classes: int
    rows: int
    batches: int
    embeddings: Floats32 | None = None


class BatchSampler(ABC):
    """Chooses the items of each training batch, an epoch at a time.

    An epoch's batches must follow from the arguments of `draw` alone, so that a resumed run draws
    the same batches. Several processes share each batch.

    Attributes:
        uses_embeddings: whether `draw` needs the items' current embeddings, which cost a pass of
            all training items through the model in each epoch.
    """

    uses_embeddings: ClassVar[bool] = False

    def batches(self, items: TrainingItems) -> int:
        """Return the number of batches in an epoch.

        Raises:
            DataError: no batch can be made of these items.
        """
        return items.batches

    @abstractmethod
    def draw(
        self,
        items: TrainingItems,
        epoch: int,
        random: np.random.RandomState,
    ) -> Iterable[Sequence[int] | Ints]:
        """Return an epoch's batches, each as positions in `items.labels`.

        `epoch` counts from 0. `random` is the source of all randomness, seeded by the run's seed
        and the epoch.
        """


class Transform(Protocol):
    """A random change to one training image, such as torchvision's.

    Random numbers from torch's default generator depend only on the run's seed and the image's
    epoch, batch and place in the batch, so a resumed run and any number of processes draw the same
    numbers. Random numbers from elsewhere (`random`, NumPy) are not reproducible.
    """

    def __call__(self, pixels: Tensor, /) -> Tensor:
        """Return changed pixels, uint8 (channels, H, W), of the same size.

        May be called from several threads, or in another process.
        """


class Backbone(nn.Module):
    """Maps normalised images (B, channels, H, W), or vectors (B, F'), to features (B, F).

    Attributes:
        features: number of features F.
        preprocessing: how images are resized, cropped and normalised; `None` for a backbone of
            vectors.
    """

    features: int
    preprocessing: Preprocessing | None = None


class TextEncoder(nn.Module):
    """Maps the tokens of texts, `ids` and `mask` int64 (N, L), to features (N, F).

    The mask is 1 for a token and 0 for padding, which must not change the features.

    Attributes:
        tokenizer: content of a `tokenizer.json` of the package `tokenizers`, with truncation to at
            most `length` tokens and with padding.
        length: largest number of tokens of a text.
    """

    tokenizer: bytes
    length: int


@runtime_checkable
class Loss(Protocol):
    """A loss, with the signature of pytorch-metric-learning's losses."""

    def __call__(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: TripletIndices | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """Return a scalar, differentiable in `embeddings` (B, C) and `ref_emb` (R, C).

        The loss of a batch without pairs is 0.
        """


@runtime_checkable
class Miner(Protocol):
    """A miner of pairs or triplets, with the signature of pytorch-metric-learning's miners."""

    def __call__(
        self,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> TripletIndices:
        """Return indices of anchors in `embeddings` (B, C) and of their partners in `ref_emb`.

        Without `ref_emb`, all indices refer to `embeddings`.
        """


def _missing(part: nn.Module, method: str) -> NotImplementedError:
    return NotImplementedError(f"{type(part).__name__} must define {method}")


class Generator(nn.Module):
    """Makes synthetic samples from triplets; they extend the loss's reference set.

    `space` says whether a sample is a row of features (the head's input) or of codes (the head's
    output). If it is "embeddings", read (T, C) for the shape (T, F) below.

    A generator with parameters gets its own optimiser, which minimises `objective` alone. For a
    generator without parameters (a closed form), `objective` is never called. If the backbone
    trains, the loss's gradient reaches it through `forward`.

    Attributes:
        replaces: "positive" or "negative", the member of the triplet whose place and label a
            synthetic sample takes.
        space: "features" or "embeddings", what the generator works on.
        classmates: whether `forward` gets a fourth argument: for each negative, the row of another
            random item of its class, or the negative's own row if the batch has no other.
    """

    replaces: ClassVar[Literal["positive", "negative"]] = "negative"
    space: ClassVar[Literal["features", "embeddings"]] = "features"
    classmates: ClassVar[bool] = False

    def bind(self, head: nn.Module) -> None:
        """Store the model's head, which maps features (B, F) to codes (B, C), for use in `forward`.

        The host calls this once, before training. Keep the head in a tuple. As a plain attribute,
        the head would become a submodule that is saved and trained twice, which raises an error.
        """

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Return synthetic rows (T, F) for the negatives (or positives) of triplets."""
        raise _missing(self, "forward(anchor, positive, negative)")

    def objective(
        self,
        anchor: Tensor,
        positive: Tensor,
        negative: Tensor,
        synthetic: Tensor,
        distance: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Return the scalar that the generator minimises.

        `synthetic` are the rows (T, F) that `forward` returned. `distance` maps two tensors (T, F)
        to the model's current distances (T,); it applies the head if `space` is "features".
        """
        raise _missing(self, "objective(…), as it has parameters")


@dataclass(frozen=True)
class Subspace:
    """Columns `start:stop` of the index vector, searched separately for candidates.

    If the combiner's `merge` is "score", `weight` > 0 multiplies the scores of this sub-space.
    """

    name: str
    start: int
    stop: int
    weight: float = 1.0


class Combiner(BaseDistance):
    """A distance over codes, smaller for closer items; any loss with a `distance` can train it.

    Attributes:
        exact: True if the Euclidean distances between `query_vectors` and `index_vectors` order the
            items as this distance does. If not, export adds a rescorer, which orders the
            candidates by `compute_mat`.
        subspaces: column ranges that are searched separately for candidates. If empty, the whole
            vector is searched.
        merge: how the candidates of several sub-spaces become one list if there is no rescorer.
            "min" keeps each item's smallest Euclidean distance. "score" lets each sub-space score
            its own k nearest items and keeps each item's best score
            (`retrieval.bundle.distances.best_score`). That order matches no distance between two
            codes, so `compute_mat` is then used for training and exact evaluation only.
        candidates: default number of candidates that a rescorer gets; `choose_candidates` may
            return another.
        measure: the distance that answers report if there is no rescorer: "euclidean" between query
            vector and stored vector, or "inner", `retrieval.bundle.distances.product_distances` of
            their inner product. Use "inner" if `compute_mat` equals that, and not the Euclidean
            distance. Both give the same order if all stored vectors have the same length.
        plain: True if there is nothing to combine, as with one part. The model then keeps only the
            head, bit for bit as if the recipe had no combiner.
    """

    exact: bool = True
    subspaces: tuple[Subspace, ...] = ()
    merge: Literal["min", "score"] = "min"
    measure: Literal["euclidean", "inner"] = "euclidean"
    candidates: int = 200
    plain: bool = False

    def __init__(self) -> None:
        # Normalised codes would have another distance.
        super().__init__(normalize_embeddings=False, p=2, power=1, is_inverted=False)

    def build_head(self, features: int) -> nn.Module:
        """Return a module that maps features (B, F) to codes (B, C)."""
        raise _missing(self, "build_head(features)")

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return distances (Q, R) between codes (Q, C) and (R, C)."""
        raise _missing(self, "compute_mat(query, reference)")

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return distances (N,) between codes (N, C) and (N, C), row by row."""
        raise _missing(self, "pairwise_distance(query, reference)")

    def index_vectors(self, codes: Tensor) -> Tensor:
        """Return the vectors (N, P) that FAISS stores for codes (N, C)."""
        return codes

    def query_vectors(self, codes: Tensor) -> Tensor:
        """Return the vectors (N, P) that queries search with; they may differ from stored ones."""
        return self.index_vectors(codes)

    def objective(
        self,
        codes: Tensor,
        labels: Tensor,
        indices: TripletIndices | None,
    ) -> tuple[Tensor | None, Mapping[str, Tensor]]:
        """Return the combiner's own objective for a training batch, and metrics for the log.

        Codes are (B, C), labels class ids (B,), and indices the miner's, if any. The objective is a
        scalar, which is added to the loss in the phases that train the combiner, or `None`. The
        means of the metrics are logged for each epoch.
        """
        return None, {}

    def warnings(self, metrics: Mapping[str, float]) -> Sequence[str]:
        """Return warnings for the user, from an epoch's mean `metrics`; by default none."""
        return ()

    def choose_candidates(self, codes: Tensor) -> int:
        """Return the rescorer's default number of candidates, given codes (N, C) of real items."""
        return self.candidates


@runtime_checkable
class Learner(Protocol):
    """A scikit-learn estimator on feature vectors, for use in `Pipeline` and `GridSearchCV` too."""

    def fit(self, X: Floats, y: Array) -> Any:
        """Learn from features (N, F) and labels (N,)."""

    def transform(self, X: Floats) -> Floats:
        """Return embeddings (N, C) of features (N, F)."""

    def to_model_parts(self) -> tuple[nn.Module, Combiner | None]:
        """Return a head that computes the same as `transform`, and the combiner or `None`."""


@dataclass(frozen=True)
class PooledHits:
    """The nearest items of all queries, for a metric that ranks the hits of all queries together.

    Attributes:
        matches: (Q, k), true where the item at a rank is relevant, nearest first.
        distances: (Q, k), the distances of the items, infinity where there is none.
        relevant: (Q,), how many items of the gallery are relevant, 0 for a query without an answer.
        query_class: (Q,), the class number of each query.
        item_class: (Q, k), the class number of the item at each rank, −1 where there is none.
        classes: number of classes in the gallery.
    """

    matches: Bools
    distances: Floats32
    relevant: Ints
    query_class: Ints
    item_class: Ints
    classes: int


class Metric(Protocol):
    """A retrieval metric with one value per query, so that any number of queries fits in memory.

    A metric for graded relevance has an additional method `graded(gains, ideal)`, which the host
    calls instead if `[evaluate]` sets `levels` or `tags`. `gains` (Q, k) are the grades of the
    items at each rank, `ideal` (Q, k) the gallery's largest grades, largest first.

    A metric of all queries together, such as a micro-average, has a method `pooled(hits)`, which
    the host calls instead with `PooledHits` of all queries, also of those without an answer. It
    returns one number. Its `depth` is a number.

    Attributes:
        depth: how many neighbours the metric needs: a number, "relevant" (as many as the query has
            relevant items), or "all".
        larger_is_better: false if `[train] monitor` should prefer smaller values. The attribute may
            be missing.
    """

    depth: int | Literal["relevant", "all"]

    def __call__(self, matches: Bools, relevant: Ints) -> Floats64:
        """Return one value per query (Q,); the host takes the mean.

        Args:
            matches: (Q, k), true where the neighbour at a rank has the query's label. Neighbours
                are sorted nearest first, without the query itself; k is at least `depth`.
            relevant: (Q,), how many items of the gallery have the query's label, at least 1.
        """


@dataclass(frozen=True)
class TrackedRun:
    """Description of a run, which the run's tracker gets at the beginning.

    Attributes:
        name: name of the recipe; in a comparison, with the seed.
        group: the comparison that this training belongs to, or `None`.
        configuration: the recipe, as JSON values.
        key: for a resumed run, the key that `begin` returned when the run began; otherwise `None`.
        folder: the folder of the run.
    """

    name: str
    group: str | None
    configuration: Mapping[str, Any]
    key: str | None
    folder: str


class Tracker(Protocol):
    """Logs the progress of one run to a service or a file.

    The factory is called before anything is written, so import the tracker's packages there.
    Training waits for each call. If a tracker raises an error, the user gets a message, and the run
    continues without the tracker.

    A tracker may also have `log_steps(step, metrics)`, with the arguments of the hook
    `retrieval_steps_end`, and `image(title, pixels)`. The host calls `image` at the end of training
    with a sheet of validation queries and their nearest items, as a uint8 array (H, W, 3).
    """

    def begin(self, run: TrackedRun) -> tuple[str, str]:
        """Begin a run, or resume the run with the key `run.key`; the host calls this once, first.

        Return the run's key, and the address where the user finds the run.
        """

    def log(self, metrics: Mapping[str, float], epoch: int | None) -> None:
        """Log the metrics of an epoch, counted from 1, or the final metrics if `epoch` is `None`.

        An interrupted epoch is repeated and logged again.
        """

    def end(self, how: Literal["finished", "stopped", "failed"]) -> None:
        """End the run; called last. A stopped run may be resumed later."""


def in_words(value: Any) -> str:
    """Describe a value for an error message: an array by shape and type, most others by type."""
    if isinstance(value, Tensor):
        return (
            f"a tensor of shape {tuple(value.shape)} and type"
            f" {str(value.dtype).removeprefix('torch.')}"
        )
    if isinstance(value, np.ndarray):
        return f"a numpy array of shape {value.shape} and type {value.dtype}"
    if value is None or isinstance(value, bool | int | float):
        return f"{value}"
    # The parts of a short tuple show which of them is wrong; those of a long list fill a page.
    if isinstance(value, list | tuple) and 0 < len(value) <= 6:
        return f"a {type(value).__name__} of {len(value)} ({', '.join(map(in_words, value))})"
    return f"a {type(value).__name__}"


def refuse_class(value: Any, what: str) -> None:
    """Raise a `PluginError` for a class in place of an object."""
    if isinstance(value, type):
        name = value.__name__
        raise PluginError(f"{what} is a class, {name}; pass an object of it: {name}(…).")


def breach(
    what: str,
    value: Any,
    must: str,
    part: str = "",
) -> PluginError:
    """Return the error "WHAT gave VALUE PART; it must give MUST"."""
    return PluginError(f"{what} gave {in_words(value)}{part}; it must give {must}")
