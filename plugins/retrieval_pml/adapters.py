"""Adapters that turn classes of pytorch-metric-learning into factories, and shared base classes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field
from pytorch_metric_learning import reducers
from pytorch_metric_learning.utils import common_functions, loss_and_miner_utils
from retrieval.plugin import Part, Sums, as_given, first_row, full_precision
from torch import Tensor, nn

from retrieval_pml.pair_matrix import Pairs, similarities

Distance = Annotated[nn.Module | None, Part("distances")]
Reducer = Annotated[nn.Module | None, Part("reducers")]
Regularizer = Annotated[nn.Module | None, Part("regularizers")]
AnyLoss = Annotated[nn.Module, Part("losses")]
AnyMiner = Annotated[nn.Module | None, Part("miners")]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Several = Annotated[int, Field(ge=2)]
PerAnchor = Annotated[int, Field(ge=1)] | Literal["all"]
Init = (
    Literal[
        "normal",
        "kaiming_normal",
        "kaiming_uniform",
        "xavier_normal",
        "xavier_uniform",
        "orthogonal",
    ]
    | None
)
"""Initialiser of proxies or class weights; `None` uses the loss's default."""
# pytorch-metric-learning has no types: what these classes are mixed into has attributes that
# nn.Module lacks
_Mixin: Any = nn.Module
F = TypeVar("F", bound=Callable[..., Any])
MEANINGS = {
    "distance": "how two embeddings are compared; Euclidean on unit vectors by default.",
    "reducer": "how the items' losses become one number; the mean by default.",
    "embedding_regularizer": "a penalty on the embeddings, added to the loss.",
    "embedding_reg_weight": "the factor of that penalty.",
    "weight_regularizer": "a penalty on the class weights, added to the loss.",
    "weight_reg_weight": "the factor of that penalty.",
    "weight_init_func": "how the class weights begin; standard normal by default.",
}
"""Descriptions of parameters that many factories share; a factory's docstring may override them."""
UPSTREAM = {"classes": "num_classes"}
"""Upstream's names of parameters that the framework sets."""


def _full_precision(embeddings: Tensor, ref_emb: Tensor | None) -> tuple[Tensor, Tensor | None]:
    full = full_precision(embeddings)
    if ref_emb is None or ref_emb is embeddings:
        return full, None if ref_emb is None else full
    return full, full_precision(ref_emb)


def _no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    return torch.autocast(device_type=x.device.type, enabled=False)


class PreciseLoss(_Mixin):
    """Computes a loss in at least float32, for half-precision embeddings and under autocast.

    Upstream casts a loss's *parameters* (proxies, class weights) to the embeddings' type, so one
    bfloat16 batch would round them permanently. Exponentials of 64 × a cosine also need more than 8
    bits.

    Attributes:
        known_classes: number of classes that the loss has weights for, or `None`.
    """

    known_classes: int | None = None

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Any:
        """Return the loss, a scalar; see `retrieval.plugin.Loss`.

        Raises:
            ValueError: the loss has class weights, and a label is not a class number. On a GPU the
                device's assertion fails instead, because reading labels would wait for the device.
        """
        if labels is not None and self.known_classes is not None:
            _require_classes(labels, self.known_classes)
        full, reference = _full_precision(embeddings, ref_emb)
        with _no_autocast(embeddings):
            loss = self.measured(full, labels, indices_tuple, reference, ref_labels)
        return as_given(loss, embeddings) if isinstance(loss, Tensor) else loss

    def measured(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
    ) -> Any:
        """Return upstream's `forward` for embeddings in full precision."""
        return super().forward(embeddings, labels, indices_tuple, ref_emb, ref_labels)


def _require_classes(labels: Tensor, classes: int) -> None:
    """Raise ValueError for labels that are not class numbers; upstream accepts −1."""
    try:
        torch._assert_async(
            ((labels >= 0) & (labels < classes)).all(), "a label is not the number of a class"
        )
    except RuntimeError:
        raise ValueError(
            f"labels go from {int(labels.min())} to {int(labels.max())}, and there are {classes}"
            " classes, from 0"
        ) from None


class PreciseMiner(_Mixin):
    """Mines in at least float32, for half-precision embeddings and under autocast."""

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Any:
        """Return index tensors; see `retrieval.plugin.Miner`."""
        full, reference = _full_precision(embeddings, ref_emb)
        with _no_autocast(embeddings):
            return super().forward(full, labels, reference, ref_labels)


class EveryPair(_Mixin):
    """Computes the loss of a batch with a single pair, for which upstream returns 0."""

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> Any:
        """Return the losses by name, in the format of upstream's reducers."""
        common_functions.labels_or_indices_tuple_required(labels, indices_tuple)
        pairs = loss_and_miner_utils.convert_to_pairs(indices_tuple, labels, ref_labels)
        # a mean over anchors includes rows without a pair if other rows of the batch have some
        if all(len(indices) == 0 for indices in pairs) and first_row() is None:
            return self.zero_losses()
        return self.loss_method(similarities(self.distance, embeddings, ref_emb), pairs)


class MaskedPairs(_Mixin):
    """Passes the pairs to a loss as masks of the matrix of all pairs instead of lists of indices.

    A batch with a single pair has a loss; upstream returns 0 if no list has more than one pair.
    """

    rows, rows_by_labels = "anchors", True

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> Any:
        """Return the losses by name, in the format of upstream's reducers."""
        common_functions.labels_or_indices_tuple_required(labels, indices_tuple)
        if indices_tuple is None:
            assert labels is not None and ref_labels is not None
            pairs = Pairs(labels, ref_labels)
        else:
            pairs = Pairs.mined(indices_tuple, (len(embeddings), len(ref_emb)), labels, ref_labels)
        return element(self.of_rows(similarities(self.distance, embeddings, ref_emb), pairs))


class Whole(_Mixin):
    """Computes and reduces a loss of all pairs or triplets as a whole."""

    def measured(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
    ) -> Any:
        """Return the loss by upstream's steps, with `whole` instead of `compute_loss`."""
        common_functions.check_shapes(embeddings, labels)
        parts, classes = None, labels
        if labels is not None:
            classes = common_functions.to_device(labels, embeddings)
            reference, theirs = common_functions.set_ref_emb(
                embeddings, classes, ref_emb, ref_labels
            )
            if indices_tuple is not None:
                parts = self.whole_of(indices_tuple, embeddings, classes, reference, theirs)
            elif getattr(self, "triplets_per_anchor", "all") == "all":
                parts = self.whole(embeddings, classes, reference, theirs)
        if parts is None:
            return super().measured(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        self.reset_stats()
        self.add_embedding_regularization_to_loss_dict(parts, embeddings)
        return self.reducer(parts, embeddings, classes)

    def whole_of(
        self,
        indices_tuple: Any,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor,
        ref_labels: Tensor,
    ) -> Any:
        """Return the loss of a miner's pairs or triplets, reduced; None if it needs single ones."""
        return None

    def reducer_of(self, name: str) -> Any:
        """Return the reducer of one part of the loss."""
        chosen: Any = self.reducer
        chosen = chosen.inner if isinstance(chosen, Sums) else chosen
        if type(chosen) is not reducers.MultipleReducers:
            return chosen
        return dict(chosen.reducers).get(name, chosen.default_reducer)


def bounds(reducer: Any) -> tuple[float | None, float | None, bool] | None:
    """Return a reducer's lower and upper bound and whether it takes a mean, or None."""
    if reducer.collect_stats:
        return None
    if type(reducer) in (reducers.AvgNonZeroReducer, reducers.ThresholdReducer):
        return reducer.low, reducer.high, True
    if type(reducer) in (reducers.MeanReducer, reducers.SumReducer):
        return None, None, type(reducer) is reducers.MeanReducer
    return None


class OfBatch(_Mixin):
    """Base of losses that compare a batch with itself and do not accept a reference set.

    A subclass defines `of_batch(mat, labels, indices_tuple)`, where `mat` (N, N) compares all items
    of the batch.

    Attributes:
        weighted: whether a miner's indices weight the items; otherwise they are an error.
    """

    weighted = False

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> Any:
        """Return the losses by name, in the format of upstream's reducers."""
        common_functions.ref_not_supported(embeddings, labels, ref_emb, ref_labels)
        if not self.weighted:
            common_functions.indices_tuple_not_supported(indices_tuple)
        labels = on_labels(labels, embeddings, type(self).__name__)
        mat = similarities(self.distance, embeddings, embeddings)
        return self.of_batch(mat, labels, indices_tuple)

    def weigh(self, losses: Tensor, some: Tensor, labels: Tensor, indices_tuple: Any) -> Any:
        """Return the losses (N,) where `some` is true, times their weights by a miner's indices."""
        kept = torch.where(some)[0]
        if len(kept) == 0:
            return self.zero_losses()
        weights = loss_and_miner_utils.convert_to_weights(indices_tuple, labels, dtype=losses.dtype)
        return numbers((losses * weights)[kept], kept, "element")


def require_similarity(distance: nn.Module | None, name: str) -> None:
    """Raise an error if a loss that needs a similarity gets a distance."""
    if distance is not None and not getattr(distance, "is_inverted", False):
        raise ValueError(
            f"{name} needs a similarity (pml.cosine_similarity or pml.dot_product_similarity), "
            f"and {type(distance).__name__} is a distance"
        )


def no_reference(name: str, ref_emb: Tensor | None) -> None:
    """Raise an error if a reference set is passed."""
    if ref_emb is not None:
        raise ValueError(f"{name} compares the batch with itself and takes no ref_emb")


def no_indices(name: str, indices_tuple: Any) -> None:
    """Raise an error if a miner's indices are passed."""
    if indices_tuple is not None:
        raise ValueError(f"{name} chooses its own pairs and takes no indices: remove the miner")


def on_labels(labels: Tensor | None, embeddings: Tensor, name: str) -> Tensor:
    """Return the labels on the embeddings' device."""
    if labels is None:
        raise ValueError(f"{name} needs labels")
    return labels.to(embeddings.device)


def cosines_within(cosines: Tensor) -> Tensor:
    """Clip cosines to slightly within ±1, where the angle's derivative is finite."""
    edge = 1 - 4 * torch.finfo(cosines.dtype).eps
    return cosines.clamp(-edge, edge)


def numbers(
    losses: Tensor, indices: Any, kind: str, name: str = "loss"
) -> dict[str, dict[str, Any]]:
    """Return losses of one kind and what they are of, as upstream's reducers read them."""
    return {name: {"losses": losses, "indices": indices, "reduction_type": kind}}


def element(losses: Tensor, name: str = "loss") -> dict[str, dict[str, Any]]:
    """Return one loss per item (N,) as upstream's reducers read it."""
    return numbers(losses, common_functions.torch_arange_from_size(losses), "element", name)


def reduced(loss: Tensor) -> dict[str, dict[str, Any]]:
    """Return a scalar loss as upstream's reducers read it."""
    return numbers(loss, None, "already_reduced")


def _shared(*parameters: tuple[str, Any, Any]) -> tuple[inspect.Parameter, ...]:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return tuple(
        inspect.Parameter(name, kind, default=default, annotation=annotation)
        for name, annotation, default in parameters
    )


REGULARIZED = _shared(
    ("embedding_regularizer", Regularizer, None), ("embedding_reg_weight", float, 1.0)
)
"""Parameters of every loss that can penalise its embeddings."""
WEIGHTED = (
    *_shared(
        ("weight_regularizer", Regularizer, None),
        ("weight_reg_weight", float, 1.0),
        ("weight_init_func", Init, None),
    ),
    *REGULARIZED,
)
"""Parameters of every loss that has class weights or proxies."""


def forwards(
    upstream: Callable[..., Any], shared: Sequence[inspect.Parameter] = (), **renamed: str
) -> Callable[[F], F]:
    """Make a factory from a function with a signature, a docstring and only checks in its body.

    A call runs the function, which may raise errors, and then passes all arguments and defaults to
    `upstream` by name. If the number of classes is passed, the loss checks labels against it. An
    initialiser's name becomes PyTorch's function. Parameters of `MEANINGS` need no line in the
    docstring.

    Args:
        upstream: the class to build.
        shared: parameters that follow the function's own, `REGULARIZED` or `WEIGHTED`.
        renamed: upstream's names of parameters, where they differ from the function's and from
            `UPSTREAM`.
    """

    def decorate(function: F) -> F:
        own = inspect.signature(function)
        signature = own.replace(parameters=[*own.parameters.values(), *shared])
        names = {**UPSTREAM, **renamed}

        @functools.wraps(function)
        def make(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            function(**{name: bound.arguments[name] for name in own.parameters})
            values = {names.get(name, name): value for name, value in bound.arguments.items()}
            if values.get("weight_init_func") is not None:
                values["weight_init_func"] = getattr(nn.init, f"{values['weight_init_func']}_")
            part = upstream(**values)
            if isinstance(part, PreciseLoss) and bound.arguments.get("classes") is not None:
                part.known_classes = bound.arguments["classes"]
            return part

        make.__signature__ = signature  # type: ignore[attr-defined]
        make.__annotations__ = {
            **function.__annotations__,
            **{p.name: p.annotation for p in shared},
        }
        make.__doc__ = _documented(inspect.getdoc(function) or "", list(signature.parameters))
        return make  # type: ignore[return-value]

    return decorate


def _documented(text: str, parameters: list[str]) -> str:
    """Return a docstring with a line under `Args:` for each parameter of `MEANINGS` without one."""
    lines = [
        f"    {name}: {MEANINGS[name]}"
        for name in parameters
        if name in MEANINGS and f"\n    {name}: " not in text
    ]
    if lines and "\nArgs:\n" not in text:
        text += "\n\nArgs:"
    return "\n".join([text, *lines])
