"""Folders of embeddings, which `retrieval embed` writes and an index reads.

A folder has `embedding.json` (the plan: number of items, bundle, settings) and Parquet files. Each
Parquet file holds a part of the items. It is named by the part's number, and written under a
temporary name first.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field, PositiveInt, ValidationError
from pydantic.dataclasses import dataclass

from retrieval.base.photo_files import path_text
from retrieval.base.regular_files import read_plain
from retrieval.base.strict_json import parse_json, problems_of, strict_loads
from retrieval.errors import DataError
from retrieval.index.parquet import Table, pyarrow, table_errors, vectors_of
from retrieval.index.sources import (
    PLAN,
    Batch,
    SourceColumns,
    Sources,
    is_embedding,
    rows_at,
    state_of,
    text_problem,
)
from retrieval.store.filters import flat_texts, metadata_texts
from retrieval.store.items import BASE, CODE, FEATURES, VECTOR, Floats, Keep, are_plain_texts

if TYPE_CHECKING:
    from retrieval.index.index import Index

BAD = "bad.jsonl"
"""File with a line of JSON for each item that cannot be used."""
EMBEDDING_FORMAT = 1
_PLAN_BYTES = 1_000_000
SIZES = ("bytes", "width", "height")
_FACTS = ("key", "label", "metadata", "stamp", "path", "bundle")

EmbeddedBatches = Iterator[tuple[SourceColumns, dict[str, Floats]]]
"""Batches: items, and their arrays by name."""


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class EmbeddingPlan:
    """Content of `embedding.json`, which describes a folder of embeddings.

    Attributes:
        bundle: SHA-256 of the manifest of the bundle that embeds the items.
        variant: variant of the bundle's encoder. `None` for the encoder itself.
        sources: SHA-256 over keys, labels, metadata, and features or states of files of all items.
        items: number of items.
        part: number of items per part; the last part has the rest.
        batch_size: number of items that the encoder embeds at a time.
        widths: width of each column: "vector" and, if present, "code", "base" and "features".
        limits: largest number of pixels and of bytes of an image that is decoded.
        complete: whether every part exists.
        bad: number of items that could not be used. `None` until the folder is complete.
    """

    bundle: str
    variant: str | None
    sources: str
    items: PositiveInt
    part: PositiveInt
    batch_size: PositiveInt
    widths: dict[str, PositiveInt]
    limits: Annotated[list[int], Field(min_length=2, max_length=2)]
    complete: bool = False
    bad: int | None = None

    def __post_init__(self) -> None:
        if VECTOR not in self.widths or not self.widths.keys() <= {VECTOR, CODE, BASE, FEATURES}:
            raise ValueError(
                "'widths' must have 'vector', may have 'code', 'base' and 'features', and nothing"
                " else"
            )

    @property
    def parts(self) -> int:
        """Number of parts."""
        return math.ceil(self.items / self.part)

    def rows(self, number: int) -> range:
        """Return the row numbers of a part's items."""
        return range(number * self.part, min((number + 1) * self.part, self.items))

    def text(self) -> str:
        """Return the content of `embedding.json`."""
        return json.dumps({"format": EMBEDDING_FORMAT, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def read(cls, folder: Path) -> EmbeddingPlan:
        """Return a folder's plan; raise a `DataError` if it cannot be read or is invalid."""
        file = folder / PLAN
        try:
            text = read_plain(file, _PLAN_BYTES)
        except OSError as fault:
            raise DataError(f"{file} cannot be read: {fault.strerror or fault}.") from None
        content = parse_json(text, file, "embedding", DataError, frozenset({EMBEDDING_FORMAT}))
        del content["format"]
        try:
            return cls(**content)
        except ValidationError as fault:
            raise DataError(
                f"{file} is damaged:\n{problems_of(fault)}\nEmbed the items again into another"
                " folder."
            ) from None

    @classmethod
    def complete_in(cls, folder: Path) -> EmbeddingPlan:
        """Return the plan of a complete folder; see `read`."""
        plan = cls.read(folder)
        if not plan.complete:
            raise DataError(
                f"{folder} is not complete. First repeat the 'retrieval embed' command that began"
                " it."
            )
        return plan


def part_file(folder: Path, number: int) -> Path:
    """Return the path of a part."""
    return folder / f"part-{number:06}.parquet"


def schema_of(plan: EmbeddingPlan) -> Any:
    """Return the pyarrow schema of a part."""
    pa = pyarrow()
    *facts, bundle = _FACTS
    kinds = dict.fromkeys(facts, pa.string())
    kinds |= {"path": pa.binary(), **dict.fromkeys(SIZES, pa.int64()), bundle: pa.string()}
    kinds |= {name: pa.list_(pa.float32(), width) for name, width in plan.widths.items()}
    return pa.schema(kinds.items())


def _part_table(folder: Path, plan: EmbeddingPlan, number: int) -> Table:
    """Open a part; raise a `DataError` if its columns differ from those of the plan."""
    table = Table(part_file(folder, number), "features")
    if not table.schema.equals(schema_of(plan)):
        table.close()
        raise DataError(
            f"{table.name} has other columns than {folder / PLAN} says. Embed the items again into"
            " another folder."
        )
    return table


def rows(folder: Path, plan: EmbeddingPlan, arrays: Sequence[str]) -> EmbeddedBatches:
    """Yield the items of a complete folder in batches, with their arrays by name."""
    for number in range(plan.parts):
        with _part_table(folder, plan, number) as table:
            for first, batch in table.batches([*_FACTS, *arrays]):
                numbers = {name: _numbers(table, batch, name, plan, first) for name in arrays}
                with table_errors(table.path):
                    columns = [table.values(batch[name], name) for name in _FACTS]
                yield _sources(table.name, columns, plan), numbers


def _numbers(table: Table, batch: Any, name: str, plan: EmbeddingPlan, first: int) -> Floats:
    """Return a column as an array (n, width); raise a `DataError` for NaN and infinity."""
    values = vectors_of(table.path, batch.column(name), first, plan.widths[name])
    if not np.isfinite(values).all():
        raise DataError(f"{table.name}: '{name}' holds NaN or infinity.")
    return values


def _sources(table: str, columns: Sequence[list[Any]], plan: EmbeddingPlan) -> SourceColumns:
    """Return the rows of `_FACTS` as items."""
    keys, labels, texts, stamps, paths, bundles = columns
    if set(bundles) - {plan.bundle}:
        raise DataError(f"{table} holds vectors of another bundle than the one that {PLAN} names.")
    damaged = DataError(f"{table} is damaged: a row of it does not describe an item.")
    try:
        # The column holds bytes, because a file's name need not be UTF-8.
        files = [None if path is None else Path(os.fsdecode(path)) for path in paths]
        metadata = json.loads(f"[{','.join(texts)}]")
        # If these values give the same texts again, then each text is sound by itself.
        plain = flat_texts(metadata) == texts
        if not plain:
            metadata = list(map(strict_loads, texts))
    except (ValueError, RecursionError, TypeError):
        raise damaged from None
    if None in keys or None in stamps or not set(map(type, metadata)) <= {dict}:
        raise damaged
    if not plain or not are_plain_texts(keys, labels, texts):
        for key, label, content in zip(keys, labels, metadata, strict=True):
            if problem := text_problem(key, label, content):
                raise DataError(f"{table}: {path_text(key[:100])}: {problem}.")
        texts = metadata_texts(metadata)
    count = len(keys)
    nothing = [None] * count
    fields = frozenset(chain.from_iterable(metadata))
    return SourceColumns(keys, labels, texts, files, nothing, stamps, [False] * count, fields)


class Vectors:
    """Items and arrays of folders of embeddings that are added to an index.

    Raises:
        DataError: a folder is incomplete, was embedded with another bundle, or lacks an array that
            the index stores; `named` has other sources too; or `keep` is "copy" or "thumbnail".
    """

    def __init__(self, named: Sequence[object], index: Index, keep: Keep) -> None:
        if not all(map(is_embedding, named)):
            raise DataError(
                "Folders of embeddings cannot be added together with other sources. Add the folders"
                " in one call, and the other sources in another."
            )
        if keep in ("copy", "thumbnail"):
            raise DataError(
                "A folder of embeddings holds no originals to store. Use keep='reference' or"
                f" keep='nothing' instead of '{keep}'."
            )
        self._index = index
        self._keep = keep
        self._plans = {
            folder: EmbeddingPlan.complete_in(folder)
            for folder in (Path(str(name)) for name in dict.fromkeys(named))
        }
        self._refuse_unfit()
        self._states = {
            path: state_of(path)
            for folder, plan in self._plans.items()
            for path in (part_file(folder, number) for number in range(plan.parts))
        }
        batches = (
            batch for folder, plan in self._plans.items() for batch, _ in rows(folder, plan, ())
        )
        self.sources = Sources(SourceColumns.joined(batches))

    def embedded(self, positions: Sequence[int]) -> Iterator[Batch]:
        """Yield the items of these rows of `sources`, ascending, in batches.

        No item has a fault.
        """
        self._refuse_unfit()
        numbers = np.asarray(positions, np.int64)
        first = 0
        for folder, plan in self._plans.items():
            for sizes, arrays in self._arrays(folder, plan):
                batch = range(first, first + len(sizes))
                first = batch.stop
                start, stop = np.searchsorted(numbers, [batch.start, batch.stop])
                chosen: Sequence[int] = (numbers[start:stop] - batch.start).tolist()
                if len(chosen) == len(batch):
                    chosen = range(len(batch))
                arrays = {name: rows_at(array, chosen) for name, array in arrays.items()}
                items = self.sources.items.take(batch).take(chosen)
                sizes = rows_at(sizes, chosen)
                stored = items.items(self._keep, items.recorded, arrays, sizes)
                yield Batch(stored, {}, len(chosen))

    def _arrays(
        self, folder: Path, plan: EmbeddingPlan
    ) -> Iterator[tuple[list[tuple[int | None, int | None, int | None]], dict[str, Floats]]]:
        """Yield batches: sizes of originals, and the arrays that the index stores."""
        names = list(self._index.generation.widths)
        for number in range(plan.parts):
            with _part_table(folder, plan, number) as table:
                for first, batch in table.batches([*SIZES, *names]):
                    arrays = {name: _numbers(table, batch, name, plan, first) for name in names}
                    with table_errors(table.path):
                        columns = [table.values(batch[name], name) for name in SIZES]
                    if state_of(table.path) != self._states[table.path]:
                        raise DataError(
                            f"{folder} was changed while it was read. Run the command again."
                        )
                    yield list(zip(*columns, strict=True)), arrays

    def _refuse_unfit(self) -> None:
        # Each time, because a migration may have changed the index's bundle since.
        for folder, plan in self._plans.items():
            _refuse_unfit(folder, plan, self._index)


def _refuse_unfit(folder: Path, plan: EmbeddingPlan, index: Index) -> None:
    """Check that a folder has the index's bundle and every array that the index stores."""
    bundle = index.bundle
    if (plan.bundle, plan.variant) != (bundle.sha256, bundle.variant):
        ours = f"{bundle.sha256[:12]}…" + (f" (variant {bundle.variant})" if bundle.variant else "")
        theirs = f"{plan.bundle[:12]}…" + (f" (variant {plan.variant})" if plan.variant else "")
        raise DataError(
            f"{folder} holds vectors of the bundle {theirs}; this index has the bundle {ours}."
            " Embed the items with the index's bundle."
        )
    lacking = [name for name in index.generation.widths if name not in plan.widths]
    if lacking:
        option = ""
        # A code comes with the bundle, features only if they are asked for.
        if lacking == [FEATURES]:
            option = " with --features"
        raise DataError(
            f"{folder} has no column '{lacking[0]}', which this index stores for each item. Embed"
            f" the items again{option}."
        )


def in_memory(folder: Path, column: str | None = None) -> tuple[SourceColumns, Floats]:
    """Return the items of a complete folder, and their vectors in a column (N, width).

    The default of `column` is "features" if the folder has such a column, else "vector".
    """
    plan = EmbeddingPlan.complete_in(folder)
    name = column or (FEATURES if FEATURES in plan.widths else VECTOR)
    if name not in plan.widths:
        raise DataError(
            f"{folder} has no column '{name}'. If the bundle is split, embed again with --features."
        )
    batches = list(rows(folder, plan, [name]))
    items = SourceColumns.joined([batch for batch, _ in batches])
    return items, np.concatenate([arrays[name] for _, arrays in batches])


class VectorRows:
    """The vectors (N, P) of a complete folder of embeddings, read on demand.

    Raises:
        DataError: the folder is incomplete or damaged.

    Attributes:
        width: numbers per vector.
        bundle: SHA-256 and variant of the bundle that encoded the vectors.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._plan = EmbeddingPlan.complete_in(folder)
        self.width = self._plan.widths[VECTOR]
        self.bundle = self._plan.bundle, self._plan.variant
        # Number of the first row of each part, followed by that of rows. A part's file lacks the
        # items that cannot be used, so only the files say where the parts begin.
        self._starts = [0]
        for number in range(self._plan.parts):
            with _part_table(self._folder, self._plan, number) as table:
                self._starts.append(self._starts[-1] + table.count)

    def __len__(self) -> int:
        return self._starts[-1]

    def labels(self) -> list[str]:
        """Return the labels in the order of the rows; raise a `DataError` if an item has none."""
        stored = [
            label for batch, _ in rows(self._folder, self._plan, ()) for label in batch.labels
        ]
        labels = [label for label in stored if label is not None]
        missing = len(stored) - len(labels)
        if missing:
            raise DataError(
                f"{missing:,} items of {self._folder} have no label, which the metrics compare."
            )
        return labels

    def read(self, start: int, stop: int) -> Floats:
        """Return the vectors (stop - start, P) of the rows `start` to `stop` - 1."""
        first = bisect_right(self._starts, start) - 1
        blocks = []
        for number in range(first, bisect_left(self._starts, stop)):
            with _part_table(self._folder, self._plan, number) as table:
                blocks += [
                    _numbers(table, batch, VECTOR, self._plan, row)
                    for row, batch in table.batches([VECTOR])
                ]
        skipped = start - self._starts[first]
        return np.concatenate(blocks)[skipped : skipped + stop - start]
