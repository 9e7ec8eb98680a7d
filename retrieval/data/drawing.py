"""Lend a generator to all that draws from torch in one thread, for as long as an image is changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from retrieval.errors import DataError

_LENT: frozenset[Any] = frozenset(
    getattr(torch, name)
    for name in (
        "bernoulli", "multinomial", "normal", "poisson", "rand", "randint", "randn", "randperm",
        "_sample_dirichlet", "_standard_gamma",
    )
) | frozenset(
    getattr(Tensor, name)
    for name in (
        "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial", "normal_",
        "random_", "uniform_",
    )
)  # fmt: skip
"""What draws, and takes a generator by name."""
_INSTEAD: Mapping[Any, str] = {
    torch.rand_like: "torch.rand(x.shape)",
    torch.randn_like: "torch.randn(x.shape)",
    torch.randint_like: "torch.randint(low, high, x.shape)",
    torch.binomial: "torch.rand(n).lt(p).sum()",
    torch.manual_seed: "no seed of its own",
    torch.seed: "no seed of its own",
}
"""What draws and takes none, or changes the generator that the model draws from; and what to use instead."""


class _Lent(TorchFunctionMode):
    """Gives a generator to each call in this thread that would draw from the global one.

    Args:
        generator: the one that is lent.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call what is called."""
        kwargs = kwargs or {}
        if func in _LENT and kwargs.get("generator") is None:
            if func in _BY_PLACE and len(args) < _BY_PLACE[func]:
                return func(*args, self.generator)
            kwargs = {**kwargs, "generator": self.generator}
        elif func in _INSTEAD:
            name = getattr(func, "__name__", str(func))
            raise DataError(
                f"An augmentation calls torch.{name}, and what that draws could not be repeated when a run is resumed. "
                f"Use {_INSTEAD[func]}."
            )
        return func(*args, **kwargs)


_BY_PLACE: Mapping[Any, int] = {torch._sample_dirichlet: 2, torch._standard_gamma: 2}


def drawing(seed: int) -> TorchFunctionMode:
    """Return a context in which what this thread draws from torch follows from `seed` alone; other threads draw as ever."""
    return _Lent(torch.Generator().manual_seed(seed))
