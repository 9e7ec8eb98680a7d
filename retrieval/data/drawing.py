"""Lend a generator to all that draws from torch in one thread, for as long as an image is changed.

While it is lent, Python is asked at every call of torch and every look at a tensor's shape.
torchvision's transforms draw first and change the image afterwards, which is most of the calls; so
`without_asking` makes them do the second part outside.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from retrieval.errors import DataError

_LENT: frozenset[Any] = frozenset(
    getattr(torch, name)
    for name in (
        "bernoulli",
        "multinomial",
        "normal",
        "poisson",
        "rand",
        "randint",
        "randn",
        "randperm",
        "_sample_dirichlet",
        "_standard_gamma",
    )
) | frozenset(
    getattr(Tensor, name)
    for name in (
        "bernoulli",
        "bernoulli_",
        "cauchy_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "multinomial",
        "normal_",
        "random_",
        "uniform_",
    )
)
"""What draws, and takes a generator by name."""
_INSTEAD: Mapping[Any, str] = {
    torch.rand_like: "torch.rand(x.shape)",
    torch.randn_like: "torch.randn(x.shape)",
    torch.randint_like: "torch.randint(low, high, x.shape)",
    torch.binomial: "torch.rand(n).lt(p).sum()",
    torch.manual_seed: "no seed of its own",
    torch.seed: "no seed of its own",
}
"""What draws and takes none, or changes the generator that the model draws from; and what to use
instead.
"""


class Drawing(TorchFunctionMode):
    """Lends a generator to each call in this thread that would draw from the global one: what it
    draws follows from a seed alone.

    Other threads draw as ever. Several `with` blocks of one seed go on where the last one stopped.

    Args:
        seed: the first one.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def seed(self, seed: int) -> None:
        """Begin anew, with a seed of 64 bits."""
        self.generator.manual_seed(seed)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call what is called."""
        if func in _LENT and not (kwargs and kwargs.get("generator") is not None):
            if func in _BY_PLACE and len(args) < _BY_PLACE[func]:
                return func(*args, self.generator)
            return func(*args, **{**(kwargs or {}), "generator": self.generator})
        if func in _INSTEAD:
            name = getattr(func, "__name__", str(func))
            raise DataError(
                f"An augmentation calls torch.{name}, and what that draws could not be repeated"
                f" when a run is resumed. Use {_INSTEAD[func]}."
            )
        return func(*args, **kwargs) if kwargs else func(*args)


_BY_PLACE: Mapping[Any, int] = {torch._sample_dirichlet: 2, torch._standard_gamma: 2}


_AFTERWARDS = ("transform", "_apply_image_or_video_transform")
"""What torchvision's transforms call when they have drawn."""


def without_asking(transform: Any) -> Any:
    """Return a copy of a transform of torchvision's own that changes the image outside of
    `Drawing`; of any other, itself.

    Whoever writes a subclass may draw anywhere, so it is not one of torchvision's own.
    """
    if not type(transform).__module__.startswith("torchvision.transforms.v2."):
        return transform
    made = copy.copy(transform)
    own = vars(made)
    for name in _AFTERWARDS:
        if hasattr(made, name):
            own[name] = _Outside(made, name)
    if isinstance(own.get("transforms"), list):  # of RandomApply and its like
        own["transforms"] = [without_asking(each) for each in own["transforms"]]
    return made


class _Outside:
    """A method of a transform, which no mode of torch's functions sees.

    It goes to processes that decode, as a closure could not.

    Args:
        transform: whose method.
        name: what its class calls it.
    """

    def __init__(self, transform: Any, name: str) -> None:
        self.transform, self.name = transform, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        with torch._C.DisableTorchFunction():
            return getattr(type(self.transform), self.name)(self.transform, *args, **kwargs)
