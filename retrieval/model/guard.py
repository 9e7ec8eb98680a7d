"""Check what a plugin's part returns on every call; an error names the part and its fault.

Checking shapes, types and devices costs almost nothing. Checking the range of a miner's indices
costs one transfer from the GPU per batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from retrieval.errors import PluginError
from retrieval.host.factory import calling
from retrieval.model.contracts import Combiner, TripletIndices


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
    if isinstance(value, list | tuple) and 0 < len(value) <= 6:
        return f"a {type(value).__name__} of {len(value)} ({', '.join(map(in_words, value))})"
    return f"a {type(value).__name__}"


def refuse_class(value: Any, what: str) -> None:
    """Raise a `PluginError` for a class in place of an object."""
    if isinstance(value, type):
        name = value.__name__
        raise PluginError(f"{what} is a class, {name}; pass an object of it: {name}(…).")


def breach(what: str, value: Any, must: str, part: str = "") -> PluginError:
    """Return the error "WHAT gave VALUE PART; it must give MUST"."""
    return PluginError(f"{what} gave {in_words(value)}{part}; it must give {must}")


def checked_scalar(value: Any, what: str, inputs: Tensor, owner: nn.Module | None = None) -> Tensor:
    """Return the result of a loss or objective if it is a valid scalar.

    The scalar must be differentiable in `inputs` or in the parameters of `owner`. `what` names the
    part at the beginning of an error: "The loss acme.margin".

    Raises:
        PluginError: the result is not a scalar, is on another device, or has no gradient.
    """
    scalar = (
        "a scalar: a tensor of one floating-point number, through which the gradient reaches the"
        " embeddings"
    )
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    if not is_float or value.numel() != 1:
        hint = ""
        if isinstance(value, Mapping):
            hint = (
                " A reducer turns pytorch-metric-learning's dictionary into a scalar: subclass"
                " BaseMetricLossFunction and define compute_loss."
            )
        elif isinstance(value, int | float):
            hint = (
                " Do not call item() or float(); if there are no pairs, return embeddings.sum()"
                " * 0."
            )
        elif is_float and value.numel() > 1:
            hint = " Take its mean."
        raise breach(what, value, f"{scalar}.{hint}")
    if value.device != inputs.device:
        raise PluginError(
            f"{what} gave {in_words(value)} on {value.device}; its input is on {inputs.device}."
        )
    trains = inputs.requires_grad or (
        owner is not None and any(p.requires_grad for p in owner.parameters())
    )
    # A loss may return a constant zero for a batch without pairs.
    if trains and not value.requires_grad and torch.is_grad_enabled() and float(value) != 0:
        raise PluginError(
            f"{what} gave {float(value):.4g} without a gradient; it must give {scalar}. Was it"
            " detached, taken through numpy, or computed under torch.no_grad()?"
        )
    return cast(Tensor, value).reshape(())


def checked_indices(
    picked: Any, what: str, sizes: tuple[int, int], device: torch.device
) -> TripletIndices:
    """Return a miner's result as int64 tensors; `sizes` are the numbers of anchors and others.

    Raises:
        PluginError: the types, lengths, device or range of the indices are wrong.
    """
    must = (
        "(anchor, positive, negative) or (anchor1, positive, anchor2, negative): int64 tensors with"
        " one index per triplet or pair, on the device of the codes"
    )
    if not isinstance(picked, list | tuple) or len(picked) not in (3, 4):
        raise breach(what, picked, f"{must}.")
    devices = {str(x.device) for x in picked if isinstance(x, Tensor)} - {str(device)}
    if devices or not all(
        isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32) and x.ndim == 1
        for x in picked
    ):
        names = ", ".join(sorted(devices))
        if devices:
            place = f" on {names} (the codes are on {device})"
        else:
            place = ""
        raise breach(what, picked, f"{must}.", place)
    if len(picked) == 3:
        groups = [picked]
    else:
        groups = [picked[:2], picked[2:]]
    if any(len({len(x) for x in group}) > 1 for group in groups):
        raise breach(what, picked, f"{must}, of equal length.")
    indices = [x.long() for x in picked]
    limits: tuple[int, ...] = (sizes[0], sizes[1], sizes[1])
    if len(picked) == 4:
        limits = sizes * 2
    nonempty = [(x, size) for x, size in zip(indices, limits, strict=True) if len(x)]
    if nonempty:
        # One stacked tensor costs one transfer from the GPU, not one per limit.
        ends = torch.stack([torch.stack(torch.aminmax(x)) for x, _ in nonempty]).tolist()
        for (low, high), (_, size) in zip(ends, nonempty, strict=True):
            if low < 0 or high >= size:
                raise PluginError(
                    f"{what} gave indices from {low} to {high}, but the {size} items are numbered"
                    " from 0."
                )
    return cast(TripletIndices, tuple(indices))


def count_indices(indices: TripletIndices | None) -> int:
    """Return the number of a miner's triplets, or of its positive and negative pairs."""
    if indices is None:
        return 0
    return sum(anchors.numel() for anchors in (indices[:1] if len(indices) == 3 else indices[::2]))


def checked_rows(
    value: Any, what: str, like: tuple[int, int], device: torch.device, of: str
) -> Tensor:
    """Return a value if it is a floating-point matrix of the expected shape and device.

    Args:
        value: features, codes or distances.
        what: the part that returned the value, for error messages.
        like: the expected shape; a width of −1 allows any.
        device: the expected device.
        of: what the value should be, for error messages, such as "codes".

    Raises:
        PluginError: the value has another type, shape or device.
    """
    rows, width = like
    if not (
        isinstance(value, Tensor)
        and value.ndim == 2
        and value.is_floating_point()
        and len(value) == rows
        and width in (-1, value.shape[1])
    ):
        expected = f"({rows}, {'any width' if width < 0 else width})"
        raise breach(what, value, f"{of}: floating-point numbers of shape {expected}.")
    if value.device != device:
        raise PluginError(f"{what} gave {of} on {value.device}; its input is on {device}.")
    return value


def check_width(features: Any, what: str, width: int) -> None:
    """Raise a `PluginError` if features do not have the width that their backbone states."""
    if features.ndim != 2 or features.shape[1] != width:
        must = f"features of its stated width, of shape ({len(features)}, {width})."
        raise breach(what, features, must)


def checked_objective(
    value: Any, what: str, codes: Tensor
) -> tuple[Tensor | None, Mapping[str, Any]]:
    """Return the result of a combiner's `objective` if valid: a scalar or None, and metrics."""
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[1], Mapping):
        raise breach(what, value, "a scalar (or None), and metrics by name.", " from objective")
    loss, metrics = value
    for name, number in metrics.items():
        is_scalar = isinstance(number, Tensor) and number.numel() == 1
        if not is_scalar and (not isinstance(number, int | float) or isinstance(number, bool)):
            raise PluginError(
                f"{what} gave {in_words(number)} for the metric '{name}' of objective; it must be"
                " one number."
            )
    metrics = {k: v.detach() if isinstance(v, Tensor) else v for k, v in metrics.items()}
    return None if loss is None else checked_scalar(loss, f"{what}'s objective", codes), metrics


def combiner_warnings(
    combiner: Combiner | None, metrics: Mapping[str, float], what: str
) -> list[str]:
    """Return a combiner's warnings for the user."""
    if combiner is None:
        return []
    with calling(what):
        sentences: Any = combiner.warnings(metrics)
        if isinstance(sentences, str):
            sentences = [sentences]
        return [str(sentence) for sentence in sentences]
