"""`retrieval demo`: train, evaluate, export, index and search scikit-learn's digits."""

from __future__ import annotations

import shutil
import textwrap
import time
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING

import click

from retrieval.base.files import whole_file
from retrieval.cli import say
from retrieval.cli.common import PATH
from retrieval.errors import DataError

if TYPE_CHECKING:
    from retrieval.run.open import Run

NEIGHBOURS = 10
CONTENT = {"run", "bundle", "index", "images", "queries", "neighbours.png", "second-run"}
"""What a demo and the commands that it suggests write to its folder."""


def run_demo(output: Path, say: Callable[[str], None]) -> None:
    """Create a run, a bundle, an index and a picture of search results in a new folder.

    Raises:
        DataError: the folder exists.
    """
    from retrieval.evaluation.evaluate_run import evaluate
    from retrieval.evaluation.plot import neighbours
    from retrieval.export.export_run import export
    from retrieval.index.index import Index
    from retrieval.recipe.read import read_recipe
    from retrieval.training.trainer import train_run

    if output.exists() and not output.is_dir():
        raise DataError(f"{output} is a file, and a demo is a folder. Choose another --output.")
    if output.exists():
        raise DataError(
            f"{output} exists already. Remove it with --replace, or choose another --output."
        )
    output.mkdir(parents=True)
    began = time.monotonic()

    say("1. Training on scikit-learn's handwritten digits …")
    with as_file(files("retrieval.cli") / "demo.toml") as path:
        recipe = read_recipe(path)
    run = train_run(output / "run", recipe, report=lambda line: say(f"   {line}"))

    say("\n2. Evaluating on held-out digits, beside the raw pixels …")
    results = evaluate(run, baseline=True)
    say(textwrap.indent(results.table(), "   "))

    say("\n3. Exporting to ONNX …")
    verified = export(run, output / "bundle").bundle.manifest.verified
    say(
        f"   torch and ONNX Runtime differ by {verified.largest_difference:.1g} at most on"
        f" {verified.items} held-out digits"
    )

    say("\n4. Indexing …")
    query_files = _write_images(run, output)
    labels = [file.parent.name for file in query_files]
    with Index.create(
        output / "index", output / "images", model=output / "bundle", progress=False
    ) as index:
        say(f"   {len(index):,} images")
        say("\n5. Searching …")
        answers = index.search(query_files, k=NEIGHBOURS)
        figure = neighbours(index, query_files, NEIGHBOURS, labels=labels)
    right = 0
    for label, hits in zip(labels, answers, strict=True):
        right += sum(hit.label == label for hit in hits)
        say(f"   a {label} finds {' '.join(str(hit.label) for hit in hits)}")
    say(f"   {right} of {len(query_files) * NEIGHBOURS} right")
    with whole_file(output / "neighbours.png", DataError) as picture:
        figure.savefig(picture, dpi=110, format="png")

    say(
        f"\nDone in {time.monotonic() - began:.0f} s. {output} holds run, bundle, index, images,"
        " queries and neighbours.png.\nNext:"
    )
    say(f"  retrieval serve {output}/index --images {output}/images")
    say(f"  retrieval search {output}/index {query_files[0]}")
    say(
        f"  retrieval train {output}/run/recipe.toml --set loss.alpha=4 --output"
        f" {output}/second-run"
    )


def _write_images(run: Run, output: Path) -> list[Path]:
    """Write the test digits as PNG files; return the paths of the queries.

    The first digit of each class is a query, in `queries/CLASS`; the others lie in `images/CLASS`.
    """
    import numpy as np

    from retrieval.images.preprocessing import from_array

    splits = run.splits
    _, first = np.unique(splits.labels[splits.query], return_index=True)
    queries = set(splits.query[first].tolist())
    query_files = []
    for item in splits.query.tolist():
        if item in queries:
            side = "queries"
        else:
            side = "images"
        name = splits.classes[splits.labels[item]]
        file = output / side / name / f"{item:04d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        image = run.dataset[item]
        if isinstance(image, np.ndarray):
            image = from_array(image)
        image.save(file)
        if item in queries:
            query_files.append(file)
    return sorted(query_files)


@click.command()
@click.option("--output", type=PATH, default=Path("demo"), help="Folder to create.")
@click.option("--replace", is_flag=True, help="Remove an earlier demo in that folder first.")
def demo(output: Path, replace: bool) -> None:
    """Try everything on handwritten digits: train, evaluate, export, index, search.

    Nothing is downloaded.

    Example:  retrieval demo --output demo
    """
    if replace and output.exists():
        if not (output / "run" / "recipe.toml").is_file():
            raise DataError(f"{output} is not a demo's folder, so it is not removed.")
        names = {path.name for path in output.iterdir() if not path.name.startswith(".")}
        if foreign := sorted(names - CONTENT):
            raise DataError(
                f"{output} holds {foreign[0]}, which no demo wrote, so the folder is not removed."
                f" Move {foreign[0]} away, or choose another --output."
            )
        shutil.rmtree(output)
    run_demo(output, say)
