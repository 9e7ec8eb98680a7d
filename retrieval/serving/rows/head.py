"""The head: what an index is at its latest moment, as one text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from retrieval.errors import StoreError
from retrieval.serving.store.contract import Generation

FORMAT = 1
_TIMES = 32


@dataclass(frozen=True)
class Head:
    """See above.

    Attributes:
        identity: of the index.
        moment: the latest.
        numbers: the highest number of a row so far.
        count: items.
        swept: rows that died by this moment may be gone.
        begun: the number of the newest generation, which is never used again.
        seen: what readers pass to the engine, to see all of this moment.
        loose: whether there may be items that have more than their terms say.
        generations: oldest first.
        times: some moments, and when they came, in seconds since 1970.
        structure: how the tables of generations are searched, and its parameters.
        tuned: what was measured before that was chosen.
    """

    identity: str
    moment: int = 0
    numbers: int = 0
    count: int = 0
    swept: int = 0
    begun: int = 0
    seen: int = 0
    loose: bool = False
    generations: tuple[Generation, ...] = ()
    times: tuple[tuple[int, float], ...] = ()
    structure: tuple[str, Mapping[str, Any]] = field(default_factory=lambda: ("flat", {}))
    tuned: Mapping[str, Any] | None = None

    def text(self) -> str:
        """Return it as JSON."""
        return json.dumps({"format": FORMAT, **asdict(self), "times": self.times[-_TIMES:]})

    @classmethod
    def parse(cls, text: str, address: str) -> Head:
        """Return what `text` gave.

        Raises:
            StoreError: it is of another format, or no head.
        """
        try:
            said = json.loads(text)
            if said.pop("format") != FORMAT:
                raise StoreError(
                    f"The index {address} was written by a newer version of this package. Install that one."
                )
            said["generations"] = tuple(
                Generation(**{**one, "spans": tuple(tuple(span) for span in one["spans"])}) for one in said["generations"]
            )  # fmt: skip
            said["times"] = tuple(tuple(one) for one in said["times"])
            said["structure"] = tuple(said["structure"])
            return cls(**said)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise StoreError(f"{address} is damaged, or is no index.") from None

    def served(self) -> Generation:
        """Return the generation that is served."""
        return next(one for one in self.generations if one.state == "served")
