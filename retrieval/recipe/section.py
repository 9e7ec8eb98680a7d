"""What the tables of a recipe are made of: their base class and the types of their values."""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Count = Annotated[int, Field(ge=1)]
Trainable = Literal["backbone", "head", "combiner", "loss", "generator"]


def selector(text: str) -> str:
    """Check that a text can name parameters; whether any has such a name is known later."""
    if text in (*get_args(Trainable), "vectors") or re.fullmatch(r"stages:[1-9]\d{0,2}", text):
        return text
    if not any(sign in text for sign in ".*?["):
        raise ValueError(
            f"{text!r} selects no parameters: write a part ({', '.join(get_args(Trainable))}),"
            ' "stages:N", "vectors", or a pattern of their names, such as "backbone.*.bias"'
        )
    return text


Selector = Annotated[str, AfterValidator(selector)]
"""Parameters of the model and the loss.

A part; `stages:N`, the backbone's first N stages; `vectors`, parameters of one dimension (biases
and the scales of norms); or a shell pattern of full names, such as `backbone.*.bias`.
"""


class Section(BaseModel):
    """Base class of a recipe's tables."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )
