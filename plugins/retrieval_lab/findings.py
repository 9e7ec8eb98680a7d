"""Problems found in a data set, as text and as JSON."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, get_args

from retrieval.errors import one_line, quantity

By = Literal["bytes", "pixels", "numbers", "picture", "model"]
_TEST_ROLES = ("query", "gallery")


@dataclass(frozen=True, slots=True)
class Subject:
    """An item of the checked data.

    Attributes:
        name: path or key of the item.
        label: the item's label, or `None`.
        side: "train", "validation", "test", "query" or "gallery"; the source's name if there are
            several sources; "" without a split.
    """

    name: str
    label: str | None
    side: str = ""


@dataclass(frozen=True, slots=True)
class Alike:
    """A group of identical items, or a pair of near duplicates.

    Attributes:
        items: the items' numbers, ascending.
        by: what the items have in common: identical file "bytes", "pixels" or "numbers" of a
            vector; a similar small "picture" or a similar embedding by a "model".
        distance: distance of near duplicates; 0 for identical items.
    """

    items: tuple[int, ...]
    by: By
    distance: float = 0.0


@dataclass(frozen=True, repr=False)
class Findings:
    """The problems that `check_data` found.

    Attributes:
        checked: name of the checked data.
        subjects: all items.
        broken: number of each unreadable item, and the reason.
        same: groups of items with identical bytes, pixels or numbers.
        near: pairs of items that are similar but not identical.
        within: largest distance of a pair, by the kind of comparison (`Alike.by`).
        lone: labels with only one item.
        spelt: groups of labels that differ only in case, spaces, Unicode form or number format
            (1, 1.0, 01). Each group is most likely one class.
        complete: False if the search for pairs stopped because there are too many.
        notes: further sentences for the user.
        few_levels: number of each 16-bit image that has few levels left in 8 bits, and the reason.
    """

    checked: str
    subjects: Sequence[Subject]
    broken: Sequence[tuple[int, str]]
    same: Sequence[Alike]
    near: Sequence[Alike]
    within: dict[str, float]
    lone: Sequence[str]
    spelt: Sequence[tuple[str, ...]]
    complete: bool = True
    notes: Sequence[str] = ()
    few_levels: Sequence[tuple[int, str]] = ()

    def __repr__(self) -> str:
        return self.text()

    @property
    def clean(self) -> bool:
        """True if no problems were found."""
        return not any(self.counts().values())

    def leaks(self, alike: Alike) -> bool:
        """Return whether items lie on different sides; query and gallery count as one side."""
        sides = {self.subjects[i].side for i in alike.items} - {""}
        # nothing is trained on a query or on the gallery, so these two may share items
        sides = {"test" if side in _TEST_ROLES else side for side in sides}
        return len(sides) > 1

    def contradicts(self, alike: Alike) -> bool:
        """Return whether items have different labels; items without a label do not count."""
        return len({self.subjects[i].label for i in alike.items} - {None}) > 1

    def as_dict(self) -> dict[str, Any]:
        """Return the findings as JSON values, as written by `retrieval data check --output`."""
        return {
            "checked": self.checked,
            "items": len(self.subjects),
            "labels": len(self._labels()),
            "sides": dict(Counter(entry.side for entry in self.subjects if entry.side)),
            "complete": self.complete,
            "within": self.within,
            "counts": self.counts(),
            "notes": list(self.notes),
            "broken": [{**self._item(i), "why": why} for i, why in self.broken],
            "few_levels": [{**self._item(i), "why": why} for i, why in self.few_levels],
            "same": [self._alike(entry) for entry in self.same],
            "near": [{**self._alike(entry), "distance": entry.distance} for entry in self.near],
            "labels_of_one_item": list(self.lone),
            "labels_spelt_alike": list(map(list, self.spelt)),
        }

    def counts(self) -> dict[str, int]:
        """Return the number of problems of each kind."""
        alike = [*self.same, *self.near]
        return {
            "broken": len(self.broken),
            "few_levels": len(self.few_levels),
            "same": len(self.same),
            "items_too_many": sum(len(group.items) - 1 for group in self.same),
            "near": len(self.near),
            "leaks": sum(map(self.leaks, alike)),
            "label_errors": sum(map(self.contradicts, alike)),
            "labels_of_one_item": len(self.lone),
            "labels_spelt_alike": len(self.spelt),
        }

    def text(self, shown: int = 10) -> str:
        """Return the findings as text, `shown` lines of each kind, leaks and label errors first."""
        lines = [self._head(), *(f"note: {note}" for note in self.notes)]
        lines += _part("broken", [why for _, why in self.broken], shown)
        lines += _part("few_levels", [why for _, why in self.few_levels], shown)
        for by in get_args(By):
            group = [alike for alike in (*self.same, *self.near) if alike.by == by]
            group.sort(key=lambda x: (-self.leaks(x) - self.contradicts(x), x.distance))
            about = ""
            marks = []
            if by in self.within:
                about = f" (within {self.within[by]:.3g})"
            if leaks := sum(map(self.leaks, group)):
                marks.append(f"{leaks:,} across the split")
            if labels := sum(map(self.contradicts, group)):
                marks.append(f"{labels:,} with different labels")
            if marks:
                about += f", {' and '.join(marks)}"
            lines += _part(by, list(map(self._line, group)), shown, about)
        lines += _part("lone", self.lone, shown)
        lines += _part("spelt", [" / ".join(map(repr, labels)) for labels in self.spelt], shown)
        if not self.complete:
            lines.append(
                "There are more pairs than can be listed. Choose a smaller distance (within)."
            )
        if self.clean:
            lines.append("No problems found.")
        return "\n".join(lines)

    def _head(self) -> str:
        sides = Counter(subject.side for subject in self.subjects if subject.side)
        parts = [f"{self.checked}: {len(self.subjects):,} items of {len(self._labels()):,} labels"]
        if without := sum(subject.label is None for subject in self.subjects):
            parts.append(f"{without:,} without a label")
        if sides:
            parts.append(", ".join(f"{n:,} {side}" for side, n in sides.items()))
        return "; ".join(parts)

    def _labels(self) -> set[str]:
        return {subject.label for subject in self.subjects if subject.label is not None}

    def _line(self, alike: Alike) -> str:
        parts = []
        if self.leaks(alike):
            parts.append("LEAK")
        if self.contradicts(alike):
            parts.append("LABEL")
        if alike.by in self.within:
            parts.append(f"{alike.distance:.3f}")
        for i in alike.items[:_NAMED]:
            subject = self.subjects[i]
            about = ", ".join(part for part in (subject.side, subject.label) if part)
            parts.append(f"{subject.name} ({about})" if about else subject.name)
        if len(alike.items) > _NAMED:
            parts.append(f"and {len(alike.items) - _NAMED:,} more")
        return "  ".join(parts)

    def _item(self, number: int) -> dict[str, Any]:
        subject = self.subjects[number]
        return {"item": subject.name, "label": subject.label, "side": subject.side or None}

    def _alike(self, alike: Alike) -> dict[str, Any]:
        return {
            "by": alike.by,
            "leak": self.leaks(alike),
            "labels_differ": self.contradicts(alike),
            "items": [self._item(i) for i in alike.items],
        }


_NAMED = 6
"""Largest number of items that the line on a group names."""
_TITLES = {
    "broken": ("item cannot be read", "items cannot be read"),
    "few_levels": (
        "16-bit image loses most of its levels",
        "16-bit images lose most of their levels",
    ),
    "bytes": ("group of files is the same", "groups of files are the same"),
    "pixels": (
        "group of images has the same pixels in different files",
        "groups of images have the same pixels in different files",
    ),
    "numbers": ("group of vectors is the same", "groups of vectors are the same"),
    "picture": ("pair of images looks the same", "pairs of images look the same"),
    "model": ("pair of items is the same to the model", "pairs of items are the same to the model"),
    "lone": ("label has one item", "labels have one item"),
    "spelt": (
        "group of labels is likely one class: only case, spaces, Unicode or number format differ",
        "groups of labels are likely one class each: only case, spaces, Unicode or number format"
        " differ",
    ),
}
"""Heading of each kind of problem, in the singular and in the plural."""


def _part(kind: str, lines: Sequence[str], shown: int, about: str = "") -> list[str]:
    """Return a heading with the number of lines, then the first lines; `[]` without lines."""
    if not lines:
        return []
    part = [f"{quantity(len(lines), *_TITLES[kind])}{about}:"]
    part += [f"  {one_line(line)}" for line in lines[:shown]]
    if len(lines) > shown:
        part.append(f"  … and {len(lines) - shown:,} more")
    return part


def lone_labels(subjects: Sequence[Subject]) -> list[str]:
    """Return the labels with only one item, in order of appearance."""
    counts = Counter(subject.label for subject in subjects if subject.label is not None)
    return [label for label, number in counts.items() if number == 1]


def spelt_alike(subjects: Sequence[Subject]) -> list[tuple[str, ...]]:
    """Return groups of labels that differ only in case, spaces, Unicode form or number format."""
    groups: defaultdict[str | Decimal, list[str]] = defaultdict(list)
    for label in dict.fromkeys(subject.label for subject in subjects if subject.label is not None):
        text = " ".join(unicodedata.normalize("NFKC", label).casefold().split())
        number = text.isascii() and re.fullmatch(r"[+-]?[0-9]+(\.[0-9]+)?", text)
        # equal decimals hash alike, so that 1, 1.0 and 01 share a group
        groups[Decimal(text) if number else text].append(label)
    return [tuple(labels) for labels in groups.values() if len(labels) > 1]
