"""Folders of embeddings, as `retrieval embed` writes them: what their files hold, and how an index reads them.

A folder has `embedding.json`, which says what was embedded with what, and one Parquet file for each part of the items. A part appears whole
or not at all, and its name is its number: so no item is there twice, whoever embedded it how often.
"""

from __future__ import annotations

import bisect
import json
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError
from retrieval.serving.bundle import Bundle
from retrieval.serving.files.strict_json import parse_json, strict_loads
from retrieval.serving.index.encoding import Done, Sink
from retrieval.serving.index.locations import PLAN, Location, is_embedding, shown
from retrieval.serving.index.origins import Origin, Source, Sources, text_problem
from retrieval.serving.index.tables import Table, list_lengths, sentences
from retrieval.serving.progress import Meter
from retrieval.serving.store.contract import Keep

if TYPE_CHECKING:
    from retrieval.serving.index.index import Index

BAD = "bad.jsonl"
FORMAT = 1
_PLAN_BYTES = 1_000_000
ROWS = 512
ARRAYS = {"vector": "vectors", "code": "codes", "features": "features"}
"""The columns of numbers, and what an encoder's sink calls them."""
_TEXTS = ("key", "label", "metadata", "stamp", "path", "source", "bytes", "width", "height")


@dataclass(frozen=True)
class Plan:
    """What a folder of embeddings is to hold; the same plan gives the same parts.

    Attributes:
        bundle: SHA-256 of the bundle's manifest.
        variant: of its encoder; None for the encoder itself.
        sources: SHA-256 over all items: their keys, labels, metadata, and what changes when their files do.
        items: how many there are.
        part: items of a part; the last one has the rest.
        batch: items that go through the encoder at once.
        widths: numbers of each column: "vector", perhaps "code" and "features".
        limits: the largest images that are decoded: pixels, bytes.
        complete: whether every part is there.
        bad: items that could not be used; None until the folder is complete.
    """

    bundle: str
    variant: str | None
    sources: str
    items: int
    part: int
    batch: int
    widths: Mapping[str, int]
    limits: Sequence[int]
    complete: bool = False
    bad: int | None = None

    @property
    def parts(self) -> int:
        """How many parts there are."""
        return math.ceil(self.items / self.part)

    def rows(self, number: int) -> range:
        """Return which items a part has."""
        return range(number * self.part, min((number + 1) * self.part, self.items))

    def text(self) -> str:
        """Return what `embedding.json` holds."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """Return a folder's plan.

        Raises:
            DataError: it cannot be read, or is not one.
        """
        where = folder / PLAN
        try:
            with where.open("rb") as file:
                text = file.read(_PLAN_BYTES + 1)
        except OSError as fault:
            raise DataError(f"{where} cannot be read: {fault.strerror or fault}.") from None
        if len(text) > _PLAN_BYTES:
            raise DataError(f"{where} is larger than any that 'retrieval embed' writes.")
        said = parse_json(text, where, "embedding", DataError, frozenset({FORMAT}))
        del said["format"]
        try:
            plan = cls(**said)
            plan._check()
        except (TypeError, ValueError) as fault:
            raise DataError(f"{where} is damaged: {fault}. Embed again into another folder.") from None
        return plan

    def _check(self) -> None:
        """Refuse values that no plan has.

        Raises:
            ValueError: naming the first.
        """
        whole = {"items": self.items, "part": self.part, "batch": self.batch, **dict(self.widths)}
        if name := next((name for name, one in whole.items() if type(one) is not int or one < 1), None):
            raise ValueError(f"'{name}' is no number of at least 1")
        texts = {"bundle": self.bundle, "sources": self.sources}
        if name := next((name for name, one in texts.items() if not isinstance(one, str)), None):
            raise ValueError(f"'{name}' is no text")
        if not isinstance(self.variant, str | None) or not set(self.widths) <= set(ARRAYS):
            raise ValueError("'variant' or 'widths' is not what it should be")
        if "vector" not in self.widths or type(self.complete) is not bool:
            raise ValueError("'widths' has no 'vector', or 'complete' is neither true nor false")
        if len(self.limits) != 2 or not isinstance(self.bad, int | None):
            raise ValueError("'limits' or 'bad' is not what it should be")


def part_file(folder: Path, number: int) -> Path:
    """Return where a part is."""
    return folder / f"part-{number:06}.parquet"


def rows(
    folder: Path, plan: Plan, arrays: Sequence[str]
) -> Iterator[tuple[list[tuple[Source, Done]], dict[str, NDArray[np.float32]]]]:
    """Give the items of a complete folder, some hundred at a time, and their numbers.

    Args:
        folder: what `retrieval embed` wrote.
        plan: its plan.
        arrays: which columns of numbers are wanted: "vector", "code", "features".

    Raises:
        DataError: a part is missing, is damaged, or holds what no part does.
    """
    for number in range(plan.parts):
        location = Location(os.fspath(part_file(folder, number).absolute()))
        with Table(location, "features") as table:
            names = set(table.schema.names)
            if lacking := [name for name in (*_TEXTS, *arrays, "bundle") if name not in names]:
                raise DataError(
                    f"{location.name} is no part of an embedding: it has no column '{lacking[0]}'."
                )
            for group in range(len(table.starts()) - 1):
                for batch in table.batches([*_TEXTS, *arrays, "bundle"], ROWS, group):
                    with sentences(location):
                        numbers = {ARRAYS[name]: numbers_of(location, batch, name, plan) for name in arrays}
                        texts = {name: batch.column(name).to_pylist() for name in (*_TEXTS, "bundle")}
                    if set(texts.pop("bundle")) - {plan.bundle}:
                        raise DataError(
                            f"{location.name} holds vectors of another bundle than {folder / PLAN} names."
                        )
                    yield (
                        [
                            _item(location, dict(zip(texts, row, strict=True)))
                            for row in zip(*texts.values(), strict=True)
                        ],
                        numbers,
                    )


def numbers_of(location: Location, batch: Any, name: str, plan: Plan) -> NDArray[np.float32]:
    """Return a column of lists (n, width)."""
    column, width = batch.column(name), plan.widths[name]
    if column.null_count or (list_lengths(column) != width).any():
        raise DataError(f"{location.name}: '{name}' has rows of another width than {width:,}.")
    with np.errstate(over="ignore"):
        found = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    if not np.isfinite(found).all():
        raise DataError(f"{location.name}: '{name}' holds NaN or infinity.")
    return np.asarray(found).reshape(-1, width)


def _item(location: Location, row: dict[str, Any]) -> tuple[Source, Done]:
    """Return a row as an item, and what is known of its original."""
    key, label, stamp = row["key"], row["label"], row["stamp"]
    path, address = row["path"], row["source"]
    sizes = row["bytes"], row["width"], row["height"]
    try:
        metadata = strict_loads(row["metadata"] or "{}")
    except (ValueError, RecursionError, TypeError):
        metadata = None
    typed = (
        isinstance(key, str) and isinstance(label, str | None) and isinstance(stamp, str) and isinstance(metadata, dict)
        and isinstance(path, bytes | None) and isinstance(address, bytes | None)
        and all(one is None or (type(one) is int and one >= 0) for one in sizes)
    )  # fmt: skip
    if not typed or b"\0" in (path or b"") + (address or b""):
        raise DataError(f"{location.name} holds a row that is no embedded item.")
    if fault := text_problem(key, label, metadata):
        raise DataError(f"{location.name}: {shown(key[:100])}: {fault}.")
    origin = None if address is None else Origin.recorded(os.fsdecode(address), stamp)
    where = None if path is None else Path(os.fsdecode(path))
    return Source(key, label, where, metadata, None, origin, stamp), Done(stamp, None, *sizes)


class Wanting(Sink, Protocol):
    """A sink that says which items it wants.

    Attributes:
        items: in order.
    """

    items: Sequence[Source]


class Vectors:
    """What an index takes from folders of embeddings, in the place of what it would encode.

    Args:
        folders: what `retrieval embed` wrote.
        bundle: whose vectors they must be.
        arrays: the columns of numbers that are needed: "vector", perhaps "code" and "features".

    Raises:
        DataError: another bundle's, not complete, or without a column that is needed.

    Attributes:
        sources: the items.
    """

    def __init__(self, folders: Sequence[Path], bundle: Bundle, arrays: Sequence[str]) -> None:
        self._folders = [(folder, Plan.read(folder)) for folder in folders]
        self._arrays = arrays
        for folder, plan in self._folders:
            _refuse(folder, plan, bundle, arrays)
        self.sources = Sources([item for some, _ in self._rows(()) for item, _ in some])

    @classmethod
    def of(cls, named: Sequence[object], index: Index, keep: Keep) -> Vectors:
        """Return the embeddings that are named as sources of an index, one at least.

        Raises:
            DataError: see the class; or other sources are named too, or originals are to be kept.
        """
        if not all(map(is_embedding, named)):
            raise DataError(
                "Folders of embeddings and other sources are added one after the other: name one kind at a time."
            )
        if keep in ("copy", "thumbnail"):
            raise DataError(
                f"A folder of embeddings holds no originals: an index of it keeps 'reference' or 'nothing', not '{keep}'."
            )
        return cls(
            [Path(str(one)) for one in dict.fromkeys(named)], index.bundle, list(index.generation.widths)
        )

    def encode(self, sink: Wanting) -> None:
        """Give a sink its items, in order, and their numbers."""
        wanted = deque(item.key for item in sink.items)
        with Meter("adding", len(wanted), "items") as meter:
            for some, numbers in self._rows(self._arrays):
                taken = [
                    at
                    for at, (item, _) in enumerate(some)
                    if wanted and item.key == wanted[0] and wanted.popleft()
                ]
                if taken:
                    sink.append(
                        [some[at][1] for at in taken],
                        {name: values[taken] for name, values in numbers.items()},
                    )
                    meter.update(len(taken))
        if wanted:
            raise DataError(f"{self._folders[0][0]} was changed while it was read. Run the command again.")
        sink.sync()

    def _rows(
        self, arrays: Sequence[str]
    ) -> Iterator[tuple[list[tuple[Source, Done]], dict[str, NDArray[np.float32]]]]:
        for folder, plan in self._folders:
            yield from rows(folder, plan, arrays)


def unfinished(folder: Path) -> DataError:
    """Return what to say of a folder that is not complete."""
    return DataError(f"{folder} is not complete. Run the 'retrieval embed' that began it again first.")


def _refuse(folder: Path, plan: Plan, bundle: Bundle, arrays: Sequence[str]) -> None:
    """Refuse a folder that does not fit.

    Raises:
        DataError: saying why.
    """
    if not plan.complete:
        raise unfinished(folder)
    if (plan.bundle, plan.variant) != (bundle.sha256, bundle.variant):
        ours = f"{bundle.sha256[:12]}…" + (f" (variant {bundle.variant})" if bundle.variant else "")
        theirs = f"{plan.bundle[:12]}…" + (f" (variant {plan.variant})" if plan.variant else "")
        raise DataError(
            f"{folder} holds vectors of the bundle {theirs}; this index is of {ours}. Embed with the index's bundle."
        )
    if lacking := [name for name in arrays if name not in plan.widths]:
        option = " with --features" if lacking == ["features"] else ""
        raise DataError(
            f"{folder} holds no {lacking[0]}, which this index keeps of each item. Embed again{option}."
        )


def in_memory(folder: Path, column: str | None = None) -> tuple[list[Source], NDArray[np.float32]]:
    """Return the items of a complete folder and one of their columns (N, width).

    Args:
        folder: what `retrieval embed` wrote.
        column: "vector", "code" or "features"; None: the features where there are any, else the vector.

    Raises:
        DataError: it is not complete, has no such column, or is damaged.
    """
    plan = Plan.read(folder)
    if not plan.complete:
        raise unfinished(folder)
    name = column or ("features" if "features" in plan.widths else "vector")
    if name not in plan.widths:
        raise DataError(
            f"{folder} has no column '{name}'. Embed again with --features, for a bundle that has them."
        )
    items: list[Source] = []
    parts: list[NDArray[np.float32]] = []
    for some, numbers in rows(folder, plan, [name]):
        items += [item for item, _ in some]
        parts.append(numbers[ARRAYS[name]])
    return items, np.concatenate(parts)


class VectorRows:
    """The vectors of a complete folder of embeddings, read as they are needed: the folder may be larger than the memory.

    Args:
        folder: what `retrieval embed` wrote.

    Raises:
        DataError: it is not complete, or damaged.

    Attributes:
        width: numbers of a vector.
        bundle: whose vectors they are: SHA-256, and the variant.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._plan = Plan.read(folder)
        if not self._plan.complete:
            raise unfinished(folder)
        self.width = self._plan.widths["vector"]
        self.bundle = self._plan.bundle, self._plan.variant
        self._groups: list[tuple[int, int]] = []  # of each row group: its part, its number in it
        self._starts = [0]
        for number in range(self._plan.parts):
            with self._table(number) as table:
                ends = table.starts()[1:]
            self._groups += [(number, group) for group in range(len(ends))]
            before = self._starts[-1]
            self._starts += [before + end for end in ends]

    def __len__(self) -> int:
        return self._starts[-1]

    def labels(self) -> list[str]:
        """Return the labels, in order.

        Raises:
            DataError: an item has none.
        """
        found: list[str] = []
        for some, _ in rows(self._folder, self._plan, ()):
            found += [item.label for item, _ in some if item.label is not None]
        if len(found) < len(self):
            raise DataError(
                f"{len(self) - len(found):,} items of {self._folder} have no label: figures compare labels."
            )
        return found

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return some vectors (stop − start, P)."""
        out = np.empty((stop - start, self.width), np.float32)
        at = bisect.bisect_right(self._starts, start) - 1
        while at < len(self._groups) and self._starts[at] < stop:
            number, group = self._groups[at]
            first = self._starts[at]
            with self._table(number) as table:
                for batch in table.batches(["vector"], ROWS, group):
                    low, high = max(first, start), min(first + batch.num_rows, stop)
                    if low < high:
                        values = numbers_of(table.location, batch, "vector", self._plan)
                        out[low - start : high - start] = values[low - first : high - first]
                    first += batch.num_rows
            at += 1
        return out

    def _table(self, number: int) -> Table:
        return Table(Location(os.fspath(part_file(self._folder, number))), "features")
