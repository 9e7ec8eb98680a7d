"""A factory from a signature and a docstring alone: its arguments go to one constructor of
pytorch-metric-learning.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from retrieval_pml.common import PreciseLoss

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


def forwards(upstream: Callable[..., Any], **renamed: str) -> Callable[[F], F]:
    """Make a factory of a function that has a signature and a docstring, and no body but checks.

    A call runs the function, which may refuse its arguments, and then gives all of them, defaults
    too, to `upstream` by name. What is made knows the number of classes, where that is given, and
    refuses labels of no class. An initialiser's name becomes PyTorch's function. Parameters of
    `MEANINGS` need no line in the docstring.

    Args:
        upstream: the class.
        renamed: what `upstream` calls a parameter, where that differs from the function and from
            `UPSTREAM`.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        names = {**UPSTREAM, **renamed}

        @functools.wraps(function)
        def make(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            function(**bound.arguments)
            values = {names.get(name, name): value for name, value in bound.arguments.items()}
            if values.get("weight_init_func") is not None:
                values["weight_init_func"] = getattr(nn.init, f"{values['weight_init_func']}_")
            made = upstream(**values)
            if isinstance(made, PreciseLoss) and bound.arguments.get("classes") is not None:
                made.known_classes = bound.arguments["classes"]
            return made

        make.__doc__ = _documented(inspect.getdoc(function) or "", list(signature.parameters))
        return make  # type: ignore[return-value]

    return decorate


def _documented(text: str, parameters: list[str]) -> str:
    """Return a docstring with a line under `Args:`, its last section, for each parameter of
    `MEANINGS` that has none.
    """
    lines = [
        f"    {name}: {MEANINGS[name]}"
        for name in parameters
        if name in MEANINGS and f"\n    {name}: " not in text
    ]
    if lines and "\nArgs:\n" not in text:
        text += "\n\nArgs:"
    return "\n".join([text, *lines])
