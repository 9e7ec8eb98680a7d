"""Base class of a recipe's tables, and types of their values."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from retrieval.errors import did_you_mean

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Trainable = Literal["backbone", "head", "combiner", "loss", "generator"]


def selector(text: str) -> str:
    """Return `text` if it is a valid selector. Training checks that a parameter matches."""
    if text in (*get_args(Trainable), "vectors") or re.fullmatch(r"stages:[1-9]\d{0,2}", text):
        return text
    if ":" in text or not any(sign in text for sign in ".*?["):
        parts = get_args(Trainable)
        raise ValueError(
            f"{text!r} selects no parameters.{did_you_mean(text, [*parts, 'vectors'])} Write a"
            f' part ({", ".join(parts)}), "stages:N", "vectors", or a pattern of parameter names,'
            ' such as "backbone.*.bias"'
        )
    return text


Selector = Annotated[str, AfterValidator(selector)]
"""Text that selects parameters of the model and the loss.

The text is the name of a part; `stages:N` for the backbone's first N stages; `vectors` for
parameters of one dimension (biases and the scales of norms); or a shell pattern of full parameter
names, such as `backbone.*.bias`.
"""


class Section(BaseModel):
    """Base class of a recipe's tables; the text below a field is its description."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for field in cls.model_fields.values():
            field.description = " ".join((field.description or "").split())
