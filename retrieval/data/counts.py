"""Comparison of a data set's numbers of images and classes with the published ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Counts = Literal["published", "any"]
"""Whether a data set must have the published numbers of images and classes."""


class Count(NamedTuple):
    """Number of images and of their classes (None if not published)."""

    images: int
    classes: int | None = None

    def __str__(self) -> str:
        images = f"{self.images:,} image{'' if self.images == 1 else 's'}"
        if self.classes is None:
            return images
        return f"{images} of {self.classes:,} class{'' if self.classes == 1 else 'es'}"


def differing(
    published: Mapping[str, Sequence[Count]], labels: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return a sentence for each side whose numbers differ from all published ones.

    By side ("" for data without sides), `published` holds the counts of each release or paper, and
    `labels` the label of each image that is present.
    """
    problems = []
    for side in dict.fromkeys([*published, *labels]):
        present = labels.get(side, ())
        count = Count(len(present), len(set(present)))
        releases = published.get(side, ())
        if {count, count._replace(classes=None)} & set(releases):
            continue
        counts = " or ".join(str(release) for release in releases) or "no image"
        problems.append(
            f"as published {f'its {side} side' if side else 'it'} has {counts}; here it has"
            f' {count}. Complete it, or set counts = "any" and do not compare its metrics with'
            " published ones."
        )
    return problems
