"""Parts as Parquet files: written whole, and known again by whoever goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrieval.errors import DataError, MissingDependency
from retrieval.host.files import whole_file
from retrieval.serving.embedding.work import Made
from retrieval.serving.filters import metadata_text
from retrieval.serving.index.embedded import Plan, part_file
from retrieval.serving.index.locations import shown
from retrieval.serving.index.origins import Source

_GROUP_ROWS = 1024
_FAULT = 500
"""Characters of a sentence on a bad item."""
_NOTE = b"retrieval"


def arrow() -> Any:
    """Return pyarrow.

    Raises:
        MissingDependency: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingDependency(
            "Embeddings are written as Parquet, which needs pyarrow. Install it with: pip install 'embedding-retrieval[parquet]'"
        ) from None
    return pyarrow


def _identity(plan: Plan) -> str:
    """Return what names a plan, whether it is complete or not."""
    said = json.loads(plan.text())
    said |= {"complete": False, "bad": None}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def write_part(folder: Path, plan: Plan, items: Sequence[Source], made: Made) -> int:
    """Write a part, whole or not at all; return how many of its items are bad.

    Raises:
        DataError: the disk refuses.
    """
    bad = [
        {"key": item.key, "source": item.name[:2000], "fault": entry.fault[:_FAULT]}
        for item, entry in zip(items, made.entries, strict=True)
        if entry.fault is not None
    ]
    pa = arrow()
    table = _table(pa, plan, items, made)
    note = {"plan": _identity(plan), "part": made.number, "bad": bad}
    table = table.replace_schema_metadata({_NOTE: json.dumps(note).encode()})
    with whole_file(part_file(folder, made.number), DataError) as path:
        # numbers that look random do not compress; texts do
        columns = [name for name in table.schema.names if name not in plan.widths]
        pa.parquet.write_table(
            table, path, row_group_size=_GROUP_ROWS, compression=dict.fromkeys(columns, "zstd"),
            use_dictionary=["label", "bundle"], write_page_checksum=True, write_statistics=["key", "label"],
        )  # fmt: skip
    return len(bad)


def _table(pa: Any, plan: Plan, items: Sequence[Source], made: Made) -> Any:
    good = [(item, entry) for item, entry in zip(items, made.entries, strict=True) if entry.fault is None]
    files = [item.row is None for item, _ in good]
    columns: dict[str, Any] = {
        "key": pa.array([item.key for item, _ in good], pa.string()),
        "label": pa.array([item.label for item, _ in good], pa.string()),
        "metadata": pa.array([metadata_text(item.metadata) for item, _ in good], pa.string()),
        "path": pa.array(
            [
                os.fsencode(item.path) if item.path and file else None
                for (item, _), file in zip(good, files, strict=True)
            ],
            pa.binary(),
        ),
        "source": pa.array(
            [
                os.fsencode(item.origin.address) if item.origin and file else None
                for (item, _), file in zip(good, files, strict=True)
            ],
            pa.binary(),
        ),
        "stamp": pa.array(
            [entry.stamp if item.row is None else item.stamp() for item, entry in good], pa.string()
        ),
    }
    for name in ("bytes", "width", "height"):
        columns[name] = pa.array([getattr(entry, name) for _, entry in good], pa.int64())
    for name, width in plan.widths.items():
        values = made.arrays.get({"vector": "vectors", "code": "codes"}.get(name, name))
        flat = pa.array([] if values is None else values.reshape(-1), pa.float32())
        columns[name] = pa.FixedSizeListArray.from_arrays(flat, width)
    columns["bundle"] = pa.array([plan.bundle] * len(good), pa.string()).dictionary_encode()
    return pa.table(columns)


def finished_part(folder: Path, plan: Plan, number: int) -> list[dict[str, str]] | None:
    """Return the bad items of a part that is there; None where it is not, or is of another plan, or is damaged."""
    pa = arrow()
    try:
        with pa.parquet.ParquetFile(part_file(folder, number)) as file:
            note = json.loads((file.schema_arrow.metadata or {})[_NOTE])
            bad: list[dict[str, str]] = note["bad"]
            whole = file.metadata.num_rows + len(bad) == len(plan.rows(number))
            return bad if whole and (note["plan"], note["part"]) == (_identity(plan), number) else None
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError):
        return None


def bad_line(bad: dict[str, str]) -> str:
    """Return a bad item as a line of the file of bad items."""
    return json.dumps({name: shown(value) for name, value in bad.items()}, ensure_ascii=False)
