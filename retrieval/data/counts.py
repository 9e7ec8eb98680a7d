"""Whether data are as many as their makers published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Counts = Literal["published", "any"]
"""Whether a data set's numbers must be the published ones."""


class Count(NamedTuple):
    """Images, and how many classes they are of (None: not told)."""

    images: int
    classes: int | None = None

    def __str__(self) -> str:
        of = (
            ""
            if self.classes is None
            else f" of {self.classes:,} class{'' if self.classes == 1 else 'es'}"
        )
        return f"{self.images:,} image{'' if self.images == 1 else 's'}{of}"


def differing(
    published: Mapping[str, Sequence[Count]], labels: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return a sentence for each side whose numbers are not the published ones, naming both.

    Args:
        published: by side ("" for data without sides), each count that a release or its paper has.
        labels: by side, the labels of the images that are there.
    """
    problems = []
    for side in dict.fromkeys([*published, *labels]):
        present = labels.get(side, ())
        count = Count(len(present), len(set(present)))
        releases = published.get(side, ())
        if any(
            release.images == count.images and release.classes in (None, count.classes)
            for release in releases
        ):
            continue
        counts = " or ".join(str(release) for release in releases) or "no image"
        problems.append(
            f"as published {f'its {side} side' if side else 'it'} has {counts}; here it has"
            f' {count}. Complete it, or set counts = "any" and do not compare its metrics with'
            " published ones."
        )
    return problems
