"""Folders of embeddings, which `retrieval embed` writes and an index reads.

A folder has `embedding.json`, which records the items and the bundle, and one Parquet file per part
of the items. A part is written atomically and named by its number.
"""

from __future__ import annotations

import bisect
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field, PositiveInt, ValidationError
from pydantic.dataclasses import dataclass

from retrieval.errors import DataError
from retrieval.serving.files.strict_json import parse_json, problems_of, strict_loads
from retrieval.serving.index.locations import PLAN, Origin, Source, Sources, is_embedding, shown
from retrieval.serving.index.parquet import Table, sentences, text_problem, vectors_of
from retrieval.serving.store.items import CODE, FEATURES, VECTOR, Floats, Item, Keep

if TYPE_CHECKING:
    from retrieval.serving.index.index import Index

BAD = "bad.jsonl"
FORMAT = 1
_PLAN_BYTES = 1_000_000
ROWS = 512
SIZES = ("bytes", "width", "height")
_TEXTS = ("key", "label", "metadata", "stamp", "path", "source", *SIZES)

Sizes = tuple[int | None, int | None, int | None]
"""Bytes, width and height of an original."""
Rows = Iterator[tuple[list[tuple[Source, Sizes]], dict[str, Floats]]]
"""Batches of items, each with the sizes of its original, and their arrays by name."""


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Plan:
    """What a folder of embeddings holds.

    Attributes:
        bundle: SHA-256 of the bundle's manifest.
        variant: variant of its encoder. `None` for the encoder itself.
        sources: SHA-256 over keys, labels, metadata and file stamps of all items.
        items: number of items.
        part: items per part; the last part has the rest.
        batch: number of items per batch.
        widths: width of each column: "vector" and, if present, "code" and "features".
        limits: most pixels, then most bytes, of an image that is decoded.
        complete: whether every part exists.
        bad: number of items that could not be used. `None` until the folder is complete.
    """

    bundle: str
    variant: str | None
    sources: str
    items: PositiveInt
    part: PositiveInt
    batch: PositiveInt
    widths: dict[str, PositiveInt]
    limits: Annotated[list[int], Field(min_length=2, max_length=2)]
    complete: bool = False
    bad: int | None = None

    def __post_init__(self) -> None:
        if VECTOR not in self.widths or not self.widths.keys() <= {VECTOR, CODE, FEATURES}:
            raise ValueError("'widths' has no 'vector', or a name of no array")

    @property
    def parts(self) -> int:
        """Number of parts."""
        return math.ceil(self.items / self.part)

    def rows(self, number: int) -> range:
        """Return the row numbers of a part's items."""
        return range(number * self.part, min((number + 1) * self.part, self.items))

    def text(self) -> str:
        """Return the content of `embedding.json`."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """Return a folder's plan; raise a `DataError` if it cannot be read or is invalid."""
        where = folder / PLAN
        try:
            with where.open("rb") as file:
                text = file.read(_PLAN_BYTES + 1)
        except OSError as fault:
            raise DataError(f"{where} cannot be read: {fault.strerror or fault}.") from None
        if len(text) > _PLAN_BYTES:
            raise DataError(f"{where} is larger than any that 'retrieval embed' writes.")
        content = parse_json(text, where, "embedding", DataError, frozenset({FORMAT}))
        del content["format"]
        try:
            return cls(**content)
        except ValidationError as fault:
            raise DataError(
                f"{where} is damaged:\n{problems_of(fault)}\nEmbed again into another folder."
            ) from None

    @classmethod
    def complete_in(cls, folder: Path) -> Plan:
        """Return the plan of a complete folder; see `read`."""
        plan = cls.read(folder)
        if not plan.complete:
            raise DataError(
                f"{folder} is not complete. Run the 'retrieval embed' that began it again first."
            )
        return plan


def part_file(folder: Path, number: int) -> Path:
    """Return the path of a part."""
    return folder / f"part-{number:06}.parquet"


def _part_table(folder: Path, number: int) -> Table:
    return Table(part_file(folder, number), "features")


def rows(folder: Path, plan: Plan, arrays: Sequence[str]) -> Rows:
    """Yield the items of a complete folder in batches, with their arrays by name."""
    columns = [*_TEXTS, *arrays, "bundle"]
    for number in range(plan.parts):
        with _part_table(folder, number) as table:
            if lacking := [name for name in columns if name not in table.columns]:
                raise DataError(
                    f"{table.name} is no part of an embedding: it has no column '{lacking[0]}'."
                )
            for group, first in enumerate(table.starts[:-1]):
                for batch in table.batches(columns, ROWS, group):
                    numbers = {name: _numbers(table, batch, name, plan, first) for name in arrays}
                    with sentences(table.path):
                        texts = batch.select([*_TEXTS, "bundle"]).to_pylist()
                    if {row["bundle"] for row in texts} - {plan.bundle}:
                        raise DataError(
                            f"{table.name} holds vectors of another bundle than {folder / PLAN}"
                            " names."
                        )
                    yield [_item(table.name, row) for row in texts], numbers
                    first += batch.num_rows


def _numbers(table: Table, batch: Any, name: str, plan: Plan, first: int) -> Floats:
    """Return a column of numbers (n, width), all finite."""
    values = vectors_of(table.path, batch.column(name), first, plan.widths[name])
    if not np.isfinite(values).all():
        raise DataError(f"{table.name}: '{name}' holds NaN or infinity.")
    return values


def _item(table: str, row: dict[str, Any]) -> tuple[Source, Sizes]:
    """Return a row as an item and the sizes of its original."""
    key, label, stamp, path, address = (
        row[name] for name in ("key", "label", "stamp", "path", "source")
    )
    sizes = row["bytes"], row["width"], row["height"]
    try:
        metadata = strict_loads(row["metadata"] or "{}")
    except (ValueError, RecursionError, TypeError):
        metadata = None
    typed = (
        isinstance(key, str)
        and isinstance(label, str | None)
        and isinstance(stamp, str)
        and isinstance(metadata, dict)
        and isinstance(path, bytes | None)
        and isinstance(address, bytes | None)
        and all(size is None or (type(size) is int and size >= 0) for size in sizes)
    )
    if not typed or b"\0" in (path or b"") + (address or b""):
        raise DataError(f"{table} holds a row that is not an embedded item.")
    if problem := text_problem(key, label, metadata):
        raise DataError(f"{table}: {shown(key[:100])}: {problem}.")
    origin = None if address is None else Origin.recorded(os.fsdecode(address), stamp)
    where = None if path is None else Path(os.fsdecode(path))
    return Source(key, label, where, metadata, None, origin, stamp), sizes


class Vectors:
    """Items and vectors of folders of embeddings, for an index.

    Raises:
        DataError: a folder is incomplete, of another bundle, or lacks an array that the index
            stores; other sources are named too; or `keep` asks for originals.
    """

    def __init__(self, named: Sequence[object], index: Index, keep: Keep) -> None:
        if not all(map(is_embedding, named)):
            raise DataError(
                "Folders of embeddings and other sources are added one after the other: name one"
                " kind at a time."
            )
        if keep in ("copy", "thumbnail"):
            raise DataError(
                "A folder of embeddings holds no originals: an index of it keeps 'reference' or"
                f" 'nothing', not '{keep}'."
            )
        self._index, self._keep = index, keep
        self._plans = {
            folder: Plan.complete_in(folder)
            for folder in (Path(str(name)) for name in dict.fromkeys(named))
        }
        self.sources = Sources([item for batch, _ in self._rows(()) for item, _ in batch])

    def embedded(self, sources: Sequence[Source]) -> Iterator[list[tuple[Item, str | None]]]:
        """Yield some of the items in batches, with their arrays and no fault."""
        missing = {source.key for source in sources}
        for batch, arrays in self._rows(list(self._index.generation.widths)):
            part: list[tuple[Item, str | None]] = []
            for row, (source, (size, width, height)) in enumerate(batch):
                if source.key in missing:
                    missing.remove(source.key)
                    own = {name: values[row] for name, values in arrays.items()}
                    item = source.item(self._keep)
                    item = replace(item, bytes=size, width=width, height=height, arrays=own)
                    part.append((item, None))
            yield part
        if missing:
            raise DataError(
                f"{next(iter(self._plans))} was changed while it was read. Run the command again."
            )

    def _rows(self, arrays: Sequence[str]) -> Rows:
        for folder, plan in self._plans.items():
            _refuse_unfit(folder, plan, self._index)
        for folder, plan in self._plans.items():
            yield from rows(folder, plan, arrays)


def _refuse_unfit(folder: Path, plan: Plan, index: Index) -> None:
    """Check that a folder has the index's bundle and every array that the index stores."""
    bundle = index.bundle
    if (plan.bundle, plan.variant) != (bundle.sha256, bundle.variant):
        ours = f"{bundle.sha256[:12]}…" + (f" (variant {bundle.variant})" if bundle.variant else "")
        theirs = f"{plan.bundle[:12]}…" + (f" (variant {plan.variant})" if plan.variant else "")
        raise DataError(
            f"{folder} holds vectors of the bundle {theirs}; this index is of {ours}. Embed with"
            " the index's bundle."
        )
    if lacking := [name for name in index.generation.widths if name not in plan.widths]:
        option = " with --features" if lacking == [FEATURES] else ""
        raise DataError(
            f"{folder} holds no {lacking[0]}, which this index keeps of each item. Embed"
            f" again{option}."
        )


def in_memory(folder: Path, column: str | None = None) -> tuple[list[Source], Floats]:
    """Return the items of a complete folder and one of their columns (N, width).

    `column` None is "features" if present, else "vector".
    """
    plan = Plan.complete_in(folder)
    name = column or (FEATURES if FEATURES in plan.widths else VECTOR)
    if name not in plan.widths:
        raise DataError(
            f"{folder} has no column '{name}'. Embed again with --features, for a bundle that has"
            " them."
        )
    batches = list(rows(folder, plan, [name]))
    items = [item for batch, _ in batches for item, _ in batch]
    return items, np.concatenate([arrays[name] for _, arrays in batches])


class VectorRows:
    """The vectors of a complete folder of embeddings, read on demand.

    Raises:
        DataError: the folder is incomplete or damaged.

    Attributes:
        width: numbers per vector.
        bundle: SHA-256 and variant of the bundle that encoded them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._plan = Plan.complete_in(folder)
        self.width = self._plan.widths["vector"]
        self.bundle = self._plan.bundle, self._plan.variant
        self._groups: list[tuple[int, int]] = []  # part and row group within that part
        self._starts = [0]
        for number in range(self._plan.parts):
            with _part_table(self._folder, number) as table:
                ends = table.starts[1:]
            self._groups += [(number, group) for group in range(len(ends))]
            before = self._starts[-1]
            self._starts += [before + end for end in ends]

    def __len__(self) -> int:
        return self._starts[-1]

    def labels(self) -> list[str]:
        """Return the labels in the order of the rows; raise a `DataError` if an item has none."""
        labels = [
            item.label for batch, _ in rows(self._folder, self._plan, ()) for item, _ in batch
        ]
        if missing := labels.count(None):
            raise DataError(
                f"{missing:,} items of {self._folder} have no label: metrics compare labels."
            )
        return [label for label in labels if label is not None]

    def read(self, start: int, stop: int) -> Floats:
        """Return the vectors from `start` to `stop`, (stop − start, P)."""
        out = np.empty((stop - start, self.width), np.float32)
        position = bisect.bisect_right(self._starts, start) - 1
        while position < len(self._groups) and self._starts[position] < stop:
            number, group = self._groups[position]
            row = self._starts[position]
            with _part_table(self._folder, number) as table:
                for batch in table.batches(["vector"], ROWS, group):
                    low, high = max(row, start), min(row + batch.num_rows, stop)
                    if low < high:
                        values = _numbers(table, batch, "vector", self._plan, row)
                        out[low - start : high - start] = values[low - row : high - row]
                    row += batch.num_rows
            position += 1
        return out
