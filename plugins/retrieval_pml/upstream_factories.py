"""Factories from the classes of pytorch-metric-learning ("upstream"), and helpers for losses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from pytorch_metric_learning.losses.base_metric_loss_function import BaseMetricLossFunction
from pytorch_metric_learning.miners import BaseMiner
from retrieval.helpers import full_precision
from retrieval.plugin import CheckedLoss, Distance, Part, Reducer, traits
from torch import Tensor, nn

Regularizer = Annotated[nn.Module | None, Part("regularizers")]
Share = Annotated[float, Field(ge=0, le=1)]
PerAnchor = PositiveInt | Literal["all"]
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
"""Initialiser of proxies or class weights; `None` uses the default of the loss."""
MEANINGS = {
    "distance": "distance of two embeddings; by default the Euclidean one of unit vectors.",
    "reducer": "reduces the losses of the items to one number; the mean by default.",
    "weight_regularizer": "penalty on the class weights, added to the loss.",
    "weight_reg_weight": "factor of that penalty.",
    "weight_init_func": "initialiser of the class weights; standard normal by default.",
    "embedding_regularizer": "penalty on the embeddings, added to the loss.",
    "embedding_reg_weight": "factor of that penalty.",
}
"""Descriptions of parameters that many parts share, in the order in which a part lists them."""
TYPES: dict[str, Any] = {
    "distance": Distance,
    "reducer": Reducer,
    "embedding_regularizer": Regularizer,
    "weight_regularizer": Regularizer,
    "weight_init_func": Init,
    "triplets_per_anchor": PerAnchor,
    **dict.fromkeys(["classes", "embedding_size"], int),
    **dict.fromkeys(["num_bins", "pos_per_bin", "neg_per_bin", "K", "sub_centers"], PositiveInt),
    "centers_per_class": PositiveInt,
    **dict.fromkeys(["alpha", "beta", "gamma", "la", "scale", "softmax_scale"], PositiveFloat),
    **dict.fromkeys(["temperature", "p", "power"], PositiveFloat),
}
"""Types of parameters that mean the same in every part.

Any other parameter has the type of its default value.
"""
NAMES = {"num_classes": "classes", "l": "embedding_size", "descriptors_dim": "embedding_size"}
"""The framework sets these upstream parameters itself, under the names on the right."""
HIDDEN = ("aggregation_func", "collect_stats", "is_inverted", "mat_based_loss")
"""Upstream parameters that no part offers.

They are for upstream's own loggers, or its classes set them when they call their base classes.
"""
FIXED = ("distance",)
"""Value of `without` for a part whose formula holds for one distance only."""


class _Loss(CheckedLoss):
    """A loss of pytorch-metric-learning with checked input, computed in at least float32.

    Upstream casts the parameters of a loss to the type of the embeddings, so a single bfloat16
    batch would round the parameters permanently. Losses also take exponentials of scaled cosines,
    such as 64 × a cosine, for which bfloat16's 8 significant bits are too few.
    """

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Any, ref_labels: Any
    ) -> Any:
        """Return upstream's losses by name, in shapes that reducers read correctly.

        Losses of items become a vector (N,) instead of a column (N, 1). Losses without indices are
        summed to one number.
        """
        if not len(embeddings):
            return self.zero_losses()
        if labels is not None and self.known_classes and labels.dtype == torch.int32:
            # torch's cross-entropy accepts int64 only.
            labels = ref_labels = labels.long()
        parts = super().compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        for part in parts.values():
            if isinstance(part["losses"], Tensor):
                whole = part["indices"] is None
                part["losses"] = part["losses"].sum() if whole else part["losses"].flatten()
        return parts


class _Miner(BaseMiner):
    """A miner that computes in at least float32, also under autocast."""

    def forward(
        self, embeddings: Tensor, labels: Tensor, ref_emb: Any = None, ref_labels: Any = None
    ) -> Any:
        """Return index tensors; see `retrieval.plugin.Miner`."""
        if ref_emb is not None and not self.__retrieval_traits__["ref_emb"]:
            raise ValueError(
                f"{type(self).__name__} looks only at its batch and accepts no ref_emb"
            )
        if ref_emb is None:
            reference = None
        else:
            reference = full_precision(ref_emb)
        with torch.autocast(device_type=embeddings.device.type, enabled=False):
            return super().forward(full_precision(embeddings), labels, reference, ref_labels)


def offer(
    cls: Any,
    doc: str | None = None,
    *,
    ref_emb: bool = True,
    miner: bool = True,
    rows: str | None = None,
    similarity: bool | None = None,
    without: Sequence[str] = (),
    **types: Any,
) -> Callable[..., Any]:
    """Return a factory of a class of pytorch-metric-learning, or of a subclass.

    The factory offers the upstream parameters with their defaults, except `HIDDEN` and `without`.
    If the number of classes is passed, a loss checks labels against it.

    Args:
        cls: the class.
        doc: the factory's docstring; the class's own by default.
        ref_emb: whether a loss or miner accepts a reference set.
        miner: whether a loss accepts a miner's indices.
        rows: how a loss can be divided among processes; see `retrieval.helpers.Rows`.
        similarity: whether `distance` must be a similarity (true) or must not be one (false).
        without: upstream parameters that the factory does not offer.
        types: types by parameter; they override `TYPES` and the types of the defaults.
    """
    offered = {
        name: default
        for name, default in _upstream_parameters(cls).items()
        if name not in (*HIDDEN, *without)
    }
    empty = inspect.Parameter.empty
    # Shared parameters come last, as in the docstrings. A signature needs those without a default
    # first; the sort is stable, so nothing else moves.
    order = [*(x for x in offered if x not in MEANINGS), *(x for x in MEANINGS if x in offered)]
    order.sort(key=lambda name: offered[name] is not empty)
    parameters = [_parameter(name, offered[name], types) for name in order]
    upstream = dict(zip([p.name for p in parameters], order, strict=True))
    signature = inspect.Signature(parameters)
    takes = {"ref_emb": ref_emb} | ({} if issubclass(cls, BaseMiner) else {"miner": miner})
    built = _checked(cls, takes, rows)

    def make(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = {upstream[name]: value for name, value in bound.arguments.items()}
        if similarity is not None:
            _check_distance(values["distance"], similarity, cls.__name__)
        if values.get("weight_init_func") is not None:
            values["weight_init_func"] = getattr(nn.init, f"{values['weight_init_func']}_")
        part = built(**values)
        # A margin loss with one boundary for all classes accepts any label.
        if isinstance(part, _Loss) and values.get("per_class", True):
            part.known_classes = bound.arguments.get("classes")
        return part

    make.__qualname__ = cls.__name__
    make.__signature__ = signature  # type: ignore[attr-defined]
    make.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": cls}
    make.__doc__ = _documented(inspect.cleandoc(doc or cls.__doc__), [p.name for p in parameters])
    if built is not cls:
        return traits(**takes)(make)
    return make


def _upstream_parameters(cls: type) -> dict[str, Any]:
    """Return the parameters of a class and, if it has `**kwargs`, of its bases, with defaults."""
    parameters: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        signature = inspect.signature(vars(base)["__init__"])
        after_self = list(signature.parameters.values())[1:]
        for p in after_self:
            if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
                parameters.setdefault(p.name, p.default)
        # Only `**kwargs` passes a base class's parameters on.
        if not any(p.kind is p.VAR_KEYWORD for p in after_self):
            break
    return parameters


def _parameter(name: str, default: Any, types: dict[str, Any]) -> inspect.Parameter:
    """Return an upstream parameter with the framework's name and a type."""
    known = NAMES.get(name, name)
    annotation = types.get(known, TYPES.get(known))
    if annotation is None:
        # Upstream writes whole defaults, such as margin=1, for real numbers.
        if type(default) is int:
            annotation = float
        else:
            annotation = type(default)
    if type(default) is int and annotation not in (int, PositiveInt):
        default = float(default)
    return inspect.Parameter(
        known, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation
    )


def _checked(cls: Any, takes: dict[str, bool], rows: str | None) -> Any:
    """Return a subclass of a loss or miner that checks its input, or another class unchanged."""
    mixin: Any = {BaseMetricLossFunction: _Loss, BaseMiner: _Miner}
    for base, check in mixin.items():
        if issubclass(cls, base):
            # `CheckedLoss` is the first base, and its `__init__` knows no parameters of this class.
            members = {"__init__": cls.__init__, "__retrieval_traits__": takes}
            members |= {"rows": rows} if rows else {}
            return type(cls.__name__, (check, cls), members | {"__doc__": cls.__doc__})
    return cls


def _check_distance(distance: nn.Module | None, similarity: bool, name: str) -> None:
    if distance is None or getattr(distance, "is_inverted", False) is similarity:
        return
    kind = type(distance).__name__
    if similarity:
        raise ValueError(
            f"{name} needs a similarity (pml.cosine_similarity or pml.dot_product_similarity), "
            f"but {kind} is a distance"
        )
    raise ValueError(f"{name} needs a distance, such as pml.lp, but {kind} is a similarity")


def _documented(text: str, parameters: list[str]) -> str:
    """Add to a docstring the parameters that it does not describe, as `MEANINGS` does."""
    lines = [
        f"    {name}: {MEANINGS[name]}"
        for name in parameters
        if name in MEANINGS and f"\n    {name}: " not in text
    ]
    if lines and "\nArgs:\n" not in text:
        text += "\n\nArgs:"
    return "\n".join([text, *lines])


def cosines_within(cosines: Tensor) -> Tensor:
    """Clip cosines slightly within ±1, where the derivative of the angle is finite."""
    edge = 1 - 4 * torch.finfo(cosines.dtype).eps
    return cosines.clamp(-edge, edge)
