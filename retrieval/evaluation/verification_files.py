"""What a verification leaves in its run: figures, curves and pairs; and what of it stands for the next one."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.data.pairs import LabelledPairs
from retrieval.errors import DataError
from retrieval.evaluation.verification import Roc, Verification
from retrieval.host.files import whole_file
from retrieval.run.folder import write_json
from retrieval.run.open import Run

Floats = NDArray[np.float64]

_PAIR = ("first", "second", "same", "fold")
_ROUNDING = 1e-9


def standing(run: Run, side: str, pairs: LabelledPairs, rows: Sequence[str]) -> dict[str, Verification]:
    """Return what an earlier verification of the same pairs, in the same folds, found.

    Args:
        run: whose folder holds it.
        side: "test" or "validation".
        pairs: with folds.
        rows: the contestants that no training changes; those that were not measured are left out.
    """
    try:
        with (run.path / f"verification-{side}-pairs.csv").open(encoding="utf-8", newline="") as file:
            before = ([row[name] for name in _PAIR] for row in csv.DictReader(file, strict=True))
            if not all(a == b for a, b in zip(before, _pairs(run, pairs), strict=True)):
                return {}
        results = json.loads((run.path / f"verification-{side}.json").read_text(encoding="utf-8"))
        curves = _curves(run.path / f"verification-{side}-roc.csv", rows)
        found = {
            row: Verification(
                {str(name): float(value) for name, value in results["figures"][row].items()},
                curves[row],
                *(
                    np.array([float(results["folds"][row][what][name]) for name in pairs.folds])
                    for what in ("accuracy", "threshold")
                ),
            )
            for row in rows
            if row in results["figures"]
        }
        return {row: each for row, each in found.items() if _whole(each)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, csv.Error):
        return {}  # none, or not one of ours


def _curves(path: Path, rows: Sequence[str]) -> dict[str, Roc]:
    points: dict[str, list[tuple[float, float, float]]] = {row: [] for row in rows}
    with path.open(encoding="utf-8", newline="") as file:
        for point in csv.DictReader(file, strict=True):
            if point["contestant"] in points:
                points[point["contestant"]].append(
                    (float(point["threshold"]), float(point["far"]), float(point["tar"]))
                )
    return {row: Roc(*np.array(each).reshape(-1, 3).T) for row, each in points.items()}


def _whole(found: Verification) -> bool:
    """Return whether figures and curve belong together: a process that was killed leaves files of two verifications."""
    numbers = [*found.values.values(), *found.accuracy, *found.roc.far, *found.roc.tar]
    area = float(np.trapezoid(found.roc.tar, found.roc.far))
    return all(map(math.isfinite, numbers)) and abs(area - found.values["auc"]) < _ROUNDING


def _pairs(run: Run, pairs: LabelledPairs) -> Iterator[list[str]]:
    """Return pairs as they are written: keys, 1 or 0, the fold's name."""
    keys, fold = run.dataset.keys, pairs.fold
    assert fold is not None
    for a, b, same, k in zip(pairs.first, pairs.second, pairs.same, fold, strict=True):
        yield [keys[a], keys[b], str(int(same)), pairs.folds[k]]


def write(
    run: Run,
    side: str,
    pairs: LabelledPairs,
    found: dict[str, Verification],
    trained: Floats,
    results: Mapping[str, Any],
) -> None:
    """Write the curves, the pairs and the figures: the figures last, all of them or none."""
    from retrieval.evaluation.roc import draw_roc

    counts = int(pairs.same.sum()), int((~pairs.same).sum())
    curves = {row: each.roc.corners(*counts) for row, each in found.items()}
    points = _csv(
        ("contestant", "threshold", "far", "tar"),
        (
            (row, *map(repr, map(float, point)))
            for row, roc in curves.items()
            for point in zip(roc.threshold, roc.far, roc.tar, strict=True)
        ),
    )
    used = _csv(
        (*_PAIR, "distance"),
        ((*pair, repr(float(d))) for pair, d in zip(_pairs(run, pairs), trained, strict=True)),
    )
    picture = draw_roc({row: (curves[row], found[row].values["auc"]) for row in found})
    contents = {"roc.csv": points.encode(), "roc.svg": picture, "pairs.csv": used.encode()}
    try:
        with contextlib.ExitStack() as stack:  # no file takes its place before all of them are written
            for name, content in contents.items():
                path = run.path / results["files"][name]
                stack.enter_context(whole_file(path)).write_bytes(content)
    except OSError as error:
        raise DataError(
            f"{run.path} cannot be written into: {error.strerror or error}. Free some space or make it writable."
        ) from error
    write_json(run.path / f"verification-{side}.json", results)


def _csv(header: tuple[str, ...], rows: Any) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
