"""What a search may try: the lines of `[search]`."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from retrieval.recipe.section import Section


class Range(Section):
    """One line of `[search]`: what may be tried, from `low` to `high` (whole numbers where both
    are), or one of `choices`.
    """

    low: int | float | None = Field(None, description="The smallest value.")
    high: int | float | None = Field(None, description="The largest value.")
    log: bool = Field(False, description="Draw evenly over the logarithm, as for a learning rate.")
    choices: list[str | int | float | bool] = Field(
        [], description="The values, instead of a range."
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.choices:
            if self.low is not None or self.high is not None or self.log:
                raise ValueError("write either choices, or low and high")
        elif self.low is None or self.high is None or not self.low < self.high:
            raise ValueError("write two numbers low < high, or choices")
        elif self.log and self.low <= 0:
            raise ValueError("with log = true, low must be above 0")
        return self


def flat(search: Any) -> Any:
    """Return `[search]` by keys such as `loss.margin`: to TOML, `loss.margin = {…}` is a table in a
    table.
    """
    found: dict[str, Any] = {}

    def walk(place: str, value: Any) -> None:
        if (
            isinstance(value, dict)
            and value
            and all(isinstance(each, dict) for each in value.values())
        ):
            for key, each in value.items():
                walk(f"{place}.{key}", each)
        else:
            found[place] = value

    if not isinstance(search, dict):
        return search
    for key, value in search.items():
        walk(key, value)
    return found
