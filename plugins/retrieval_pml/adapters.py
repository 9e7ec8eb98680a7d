"""How a class of pytorch-metric-learning becomes one of ours, and what losses of one kind share."""

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
"""How proxies or class weights begin; None leaves the choice to the loss."""
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
"""What parameters mean that many factories have; a factory whose own means something else says so
in its docstring.
"""
UPSTREAM = {"classes": "num_classes"}
"""What upstream calls a parameter that the host gives."""


def _full_precision(embeddings: Tensor, ref_emb: Tensor | None) -> tuple[Tensor, Tensor | None]:
    full = full_precision(embeddings)
    if ref_emb is None or ref_emb is embeddings:
        return full, None if ref_emb is None else full
    return full, full_precision(ref_emb)


def _no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    return torch.autocast(device_type=x.device.type, enabled=False)


class PreciseLoss(_Mixin):
    """Computes a loss in float32 when it is given half-precision embeddings, also under autocast.

    Upstream casts the *parameters* of a loss (proxies, class weights) to the embeddings' type, so
    one bfloat16 batch would leave them rounded for good; and exponentials of 64 × a cosine have no
    place in 8 bits.

    Attributes:
        known_classes: how many classes a loss has weights of; None of a loss that has none.
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
            ValueError: the loss has weights of classes, and a label is not the number of one; on a
                GPU, where reading labels would wait for the device, the device's own assertion
                fails instead.
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
        """Return what upstream's `forward` does of embeddings in full precision."""
        return super().forward(embeddings, labels, indices_tuple, ref_emb, ref_labels)


def _require_classes(labels: Tensor, classes: int) -> None:
    """Refuse labels that number no class: upstream takes −1 for the last class."""
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
    """Mines in float32 when it is given half-precision embeddings, also under autocast."""

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
    """Lets a batch with a single pair count, where upstream returns 0."""

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
        # rows without a pair count in a mean over anchors, where other rows of the batch have some
        if all(len(indices) == 0 for indices in pairs) and first_row() is None:
            return self.zero_losses()
        return self.loss_method(similarities(self.distance, embeddings, ref_emb), pairs)


class MaskedPairs(_Mixin):
    """Gives a loss of the matrix of all pairs its pairs as masks instead of lists of indices.

    A batch with a single pair counts; upstream returns 0 when no list of pairs is longer than one.
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
    """Lets a loss of all pairs or triplets be measured and reduced as a whole."""

    def measured(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
    ) -> Any:
        """Return the loss: upstream's steps, with `whole` in the place of `compute_loss`."""
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
    """Return the bounds between which a reducer counts, and whether it takes a mean; or None."""
    if reducer.collect_stats:
        return None
    if type(reducer) in (reducers.AvgNonZeroReducer, reducers.ThresholdReducer):
        return reducer.low, reducer.high, True
    if type(reducer) in (reducers.MeanReducer, reducers.SumReducer):
        return None, None, type(reducer) is reducers.MeanReducer
    return None


class OfBatch(_Mixin):
    """A loss of a batch with itself, by its labels; a reference set is refused.

    A loss defines `of_batch(mat, labels, indices_tuple)` of the matrix (N, N) of the batch's items.

    Attributes:
        weighted: whether a miner's indices weigh the items; else they are refused.
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
    """Refuse a distance where only a similarity makes sense."""
    if distance is not None and not getattr(distance, "is_inverted", False):
        raise ValueError(
            f"{name} needs a similarity (pml.cosine_similarity or pml.dot_product_similarity), "
            f"and {type(distance).__name__} is a distance"
        )


def no_reference(name: str, ref_emb: Tensor | None) -> None:
    """Refuse a reference set."""
    if ref_emb is not None:
        raise ValueError(f"{name} compares the batch with itself and takes no ref_emb")


def no_indices(name: str, indices_tuple: Any) -> None:
    """Refuse a miner's indices."""
    if indices_tuple is not None:
        raise ValueError(f"{name} chooses its own pairs and takes no indices: remove the miner")


def on_labels(labels: Tensor | None, embeddings: Tensor, name: str) -> Tensor:
    """Return the labels on the embeddings' device."""
    if labels is None:
        raise ValueError(f"{name} needs labels")
    return labels.to(embeddings.device)


def cosines_within(cosines: Tensor) -> Tensor:
    """Return cosines kept a hair inside ±1, where the angle's derivative is still finite."""
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
    """Make a factory of a function that has a signature and a docstring, and no body but checks.

    A call runs the function, which may refuse its arguments, and then gives all of them, defaults
    too, to `upstream` by name. What is made knows the number of classes, where that is given, and
    refuses labels of no class. An initialiser's name becomes PyTorch's function. Parameters of
    `MEANINGS` need no line in the docstring.

    Args:
        upstream: the class.
        shared: parameters that follow the function's own: `REGULARIZED` or `WEIGHTED`.
        renamed: what `upstream` calls a parameter, where that differs from the function and from
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
