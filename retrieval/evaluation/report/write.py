"""`retrieval report`: runs → one HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from retrieval.errors import DataError, PluginError, RetrievalError, listed
from retrieval.evaluation.plot import curves
from retrieval.evaluation.report.measured import measure
from retrieval.evaluation.report.page import Section, page
from retrieval.evaluation.report.pictures import Thumbnails, require_umap, svg
from retrieval.host.files import write_text
from retrieval.run.open import Run, load_run
from retrieval.serving.files.places import StrPath
from retrieval.serving.progress import Meter, Progress, shown

MOST_RUNS = 10
LARGEST_PANEL = 4 << 20
METHODS = ("tsne", "umap", "pca", "none")


@shown
def report(
    runs: Sequence[StrPath],
    output: StrPath = "report.html",
    *,
    queries: int = 2000,
    sample: int = 600,
    thumbnails: int = 800,
    map: str = "tsne",
    progress: Progress = True,
) -> Path:
    """Write one HTML file on what runs can and cannot do; it needs no server and loads nothing.

    What is looked at is bounded, so that a large test set takes little more memory than its codes,
    and the file stays small.

    Args:
        runs: folders of finished runs, at most `MOST_RUNS`.
        output: the file; one that is there gives way.
        queries: test items that are searched for, at most; all are searched.
        sample: test items whose pairs are measured and that are on the map, at most.
        thumbnails: pictures of items, at most, over all runs.
        map: "tsne", "umap", "pca" or "none".
        progress: True shows a bar, False nothing; a function is told (what, done, total).

    Returns:
        The file.

    Raises:
        DataError: with every folder that is no run; a run has no test items; the file cannot be
            written.
        PluginError: a plugin's panels are not what they must be.
    """
    if not 1 <= len(runs) <= MOST_RUNS:
        raise DataError(f"A report is of 1 to {MOST_RUNS} runs, not of {len(runs)}.")
    for name, value, least, most in (
        ("--queries", queries, 1, 100_000),
        ("--sample", sample, 10, 3000),
        ("--thumbnails", thumbnails, 0, 5000),
    ):
        if not least <= value <= most:
            raise DataError(f"{name} is a number from {least:,} to {most:,}, not {value:,}.")
    if map not in METHODS:
        raise DataError(f"A map is one of {', '.join(METHODS)}, not {map!r}.")
    if map == "umap":
        require_umap()
    target = Path(output)
    if target.is_dir():
        raise DataError(
            f"{target} is a folder, and a report is a file: give --output a name such as"
            f" {target / 'report.html'}."
        )
    opened = _opened(runs)
    method = None if map == "none" else map
    sections: list[Section] = []
    with Meter("reporting", len(opened), "runs") as meter:
        for run, name in zip(opened, _names(runs), strict=True):
            pictures = Thumbnails(run.dataset, thumbnails // len(opened))
            sections.append(
                Section(name, measure(run, queries, sample), pictures, method, panels(run))
            )
            meter.update()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, page(sections), DataError)
    return target


def _opened(runs: Sequence[StrPath]) -> list[Run]:
    """Return the runs, opened.

    Raises:
        DataError: with every one that cannot be.
    """
    opened, problems = [], []
    for path in runs:
        try:
            opened.append(load_run(path))
        except RetrievalError as error:
            problems.append(str(error))
    if problems:
        raise DataError(listed("The report", problems) if len(problems) > 1 else problems[0])
    return opened


def _names(runs: Sequence[StrPath]) -> list[str]:
    """Return each folder's name, or the whole path where two have one name."""
    short = [Path(run).resolve().name for run in runs]
    return [
        str(run) if short.count(name) > 1 else name for run, name in zip(runs, short, strict=True)
    ]


def panels(run: Run) -> dict[str, bytes]:
    """Return the drawings of how a run was trained, and those of plugins, by title.

    Raises:
        PluginError: a plugin failed, or gave something else than drawings.
    """
    found: dict[str, bytes] = {}
    if run.recipe.learner is None and run.metrics_file.is_file():
        found["Curves of training"] = svg(curves(run))
    try:
        given = run.plugins.hook.retrieval_report_panels(run=run)
    except RetrievalError:
        raise
    except Exception as error:
        raise PluginError(
            f"A plugin failed in retrieval_report_panels: {type(error).__name__}: {error}."
        ) from error
    for each in given:
        if not isinstance(each, Mapping):
            raise PluginError(
                f"A plugin's retrieval_report_panels gave {type(each).__name__}, not drawings by"
                " title."
            )
        for name, picture in each.items():
            drawn = isinstance(picture, bytes) and picture.startswith(
                (b"<svg", b"<?xml", b"\x89PNG")
            )
            if not drawn or len(picture) > LARGEST_PANEL:
                raise PluginError(
                    f"A plugin's panel '{name}' is no SVG or PNG of at most {LARGEST_PANEL >> 20}"
                    " MB, as bytes."
                )
            found[str(name)] = picture
    return found
