"""The files that a verification writes into its run: curves, pairs and metrics."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.data.pairs import LabelledPairs
from retrieval.errors import DataError
from retrieval.evaluation.verification import Roc, Verification
from retrieval.host.files import whole_file
from retrieval.run.folder import write_json
from retrieval.run.open import Run


def write(
    run: Run,
    side: str,
    pairs: LabelledPairs,
    measured: Mapping[str, Verification],
    trained: NDArray[np.float64],
    results: Mapping[str, Any],
) -> None:
    """Write the curves, the pairs and the metrics of a verification: all files or none, the metrics
    last.

    Args:
        run: whose folder takes the files.
        side: "test" or "validation".
        pairs: (P,) pairs with folds.
        measured: by contestant.
        trained: (P,) distances of the trained model.
        results: what the JSON file holds.
    """
    counts = int(pairs.same.sum()), int((~pairs.same).sum())
    curves = {row: verified.roc.corners(*counts) for row, verified in measured.items()}
    points = _csv(
        ("contestant", "threshold", "far", "tar"),
        (
            (row, *map(repr, map(float, point)))
            for row, roc in curves.items()
            for point in zip(roc.threshold, roc.far, roc.tar, strict=True)
        ),
    )
    used = _csv(("first", "second", "same", "fold", "distance"), _pairs(run, pairs, trained))
    picture = draw_roc({row: (curves[row], measured[row].values["auc"]) for row in measured})
    contents = {"roc.csv": points.encode(), "roc.svg": picture, "pairs.csv": used.encode()}
    try:
        with (
            contextlib.ExitStack() as stack
        ):  # no file takes its place before all of them are written
            for name, content in contents.items():
                path = run.path / results["files"][name]
                stack.enter_context(whole_file(path)).write_bytes(content)
    except OSError as error:
        raise DataError(
            f"{run.path} cannot be written into: {error.strerror or error}. Free some space or make"
            " it writable."
        ) from error
    write_json(run.path / f"verification-{side}.json", results)


def _pairs(run: Run, pairs: LabelledPairs, distances: NDArray[np.float64]) -> Iterator[list[str]]:
    keys, fold = run.dataset.keys, pairs.fold
    assert fold is not None
    for a, b, same, k, d in zip(
        pairs.first, pairs.second, pairs.same, fold, distances, strict=True
    ):
        yield [keys[a], keys[b], str(int(same)), pairs.folds[k], repr(float(d))]


def _csv(header: tuple[str, ...], rows: Any) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def draw_roc(curves: Mapping[str, tuple[Roc, float]]) -> bytes:
    """Return ROC curves as SVG, the same bytes for the same curves.

    Args:
        curves: by contestant: the curve, and its AUC for the legend.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "retrieval", "svg.fonttype": "none"}):
        figure = Figure(figsize=(5.2, 5.0), layout="constrained")
        FigureCanvasSVG(figure)
        axis = figure.subplots()
        styles = ("-", "--", ":", "-.")  # told apart without colours, too
        for i, (name, (roc, auc)) in enumerate(curves.items()):
            axis.plot(
                roc.far, roc.tar, linestyle=styles[i % len(styles)], label=f"{name} (AUC {auc:.4f})"
            )
        axis.plot(
            [0, 1], [1, 0], color="0.8", linewidth=0.8, zorder=0
        )  # crosses each curve at its equal error rate
        axis.set(
            xlabel="false accept rate (FAR)",
            ylabel="true accept rate (TAR)",
            xlim=(-0.01, 1.01),
            ylim=(-0.01, 1.01),
        )
        axis.set_aspect("equal")
        axis.legend(loc="lower right", frameon=False)
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
