"""What building an index did."""

from __future__ import annotations

from dataclasses import dataclass

from retrieval.serving.store.address import IndexPlace


@dataclass(frozen=True)
class Summary:
    """What was indexed, and how long it took.

    Attributes:
        path: the index.
        count: items in it.
        skipped: why an image could not be used, a sentence each.
        repeated: files that were named more than once and taken once.
        left_out: a sentence on the files of folders that are not images, for each reason.
        resumed: items that an interrupted run had done already.
        backend: the back end's name, chosen or given; at an address the store's.
        recall_at_10: of an approximate back end, else None.
        seconds: how long it took.
    """

    path: IndexPlace
    count: int
    skipped: tuple[str, ...]
    repeated: int
    resumed: int
    backend: str
    recall_at_10: float | None
    seconds: float
    left_out: tuple[str, ...] = ()
