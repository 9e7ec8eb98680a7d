"""`retrieval export-items`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from retrieval.cli import say
from retrieval.cli.common import FILTER, PATH, Choice, IndexArgument, command, refuse_options
from retrieval.errors import quantity


@command(
    "export-items",
    "retrieval export-items photos.index photos.parquet",
    "retrieval export-items photos.index atlas.parquet --to atlas",
    "retrieval export-items photos.index fiftyone --to fiftyone",
)
@click.argument("index", type=IndexArgument())
@click.argument("output", type=PATH)
@click.option(
    "--to",
    type=Choice(["parquet", "atlas", "fiftyone"]),
    default="parquet",
    help="Program to open it with: any reader of Parquet, such as DuckDB; Embedding Atlas, with"
    " small pictures and nearest neighbours; FiftyOne, with the images.",
)
@click.option(
    "--neighbors", type=click.IntRange(1, 100), default=15, help="Neighbours of an item for atlas."
)
@FILTER
@click.option("--replace", is_flag=True, help="Replace an existing output.")
def export_items(index: Any, output: Path, to: str, neighbors: int, **options: Any) -> None:
    """Write the items of INDEX and their vectors to OUTPUT, a file or, for FiftyOne, a folder.

    Each file of vectors carries the name of their embedding.
    """
    if to != "atlas":
        refuse_options("without --to atlas", {"neighbors"})
    from retrieval.index.index import open_index

    from retrieval_exports.layouts import write_fiftyone, write_parquet

    with open_index(index) as opened:
        if to == "fiftyone":
            exported = write_fiftyone(opened, output, **options)
        else:
            count = neighbors if to == "atlas" else 0
            exported = write_parquet(opened, output, neighbors=count, **options)
    say(f"Exported {quantity(exported.items, 'item')}: {output}")
    if exported.without_vector:
        say(f"{exported.without_vector:,} items have no vector and were left out.", err=True)
    if exported.without_picture:
        say(f"{exported.without_picture:,} items have no image that can be read.", err=True)
