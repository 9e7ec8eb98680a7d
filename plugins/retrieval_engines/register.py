"""The register of an index in a database engine: notes on the index and its generations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from retrieval.errors import StoreError
from retrieval.store.items import VECTOR, Generation, Item, served_of

REGISTER = Generation(0, "", None, {VECTOR: 2}, ((0, 2),), "kept")
"""Stands for the register in calls that take a generation; its rows have no arrays."""


@dataclass(frozen=True)
class RegisterContent:
    """What the register says at one moment.

    Attributes:
        notes: all notes by name; the value of a deleted note is None.
        generations: all generations, oldest first.
    """

    notes: Mapping[str, Any]
    generations: tuple[Generation, ...]

    @property
    def served(self) -> Generation:
        """The generation that is served."""
        return served_of(self.generations)

    def latest(self, generation: Generation) -> Generation:
        """Return a generation in its latest state; raise a `StoreError` if it was dropped."""
        for latest in self.generations:
            if latest.number == generation.number:
                return latest
        raise StoreError("This generation was dropped.")

    def note(self, generation: Generation) -> dict[str, Any]:
        """Return the note of a generation."""
        return dict(self.notes[f"generation {generation.number}"])

    def names(self, prefix: str) -> list[str]:
        """Return the names of the notes that begin with a prefix, without the prefix."""
        return [name.removeprefix(prefix) for name in self.notes if name.startswith(prefix)]


def generation_of(number: int, note: Mapping[str, Any], served: int | None = None) -> Generation:
    """Return a generation from its note; `served` is the number of the one that is served."""
    state: Literal["served", "building", "kept"] = "building"
    if number == served:
        state = "served"
    elif note["served"]:
        state = "kept"
    spans = tuple((start, stop) for start, stop in note["spans"])
    return Generation(number, note["bundle"], note["variant"], note["widths"], spans, state)


def field_notes(item: Item) -> Iterator[str]:
    """Yield the names of the notes on an item's metadata fields."""
    for name, value in item.metadata.items():
        yield f"field {name}"
        if _has_list(value):
            yield f"list {name}"


def _has_list(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_list, value.values()))
    return isinstance(value, list | tuple)
