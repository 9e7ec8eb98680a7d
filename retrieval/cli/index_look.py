"""`retrieval index tune`, `duplicates` and `clusters`: what the vectors of an index say."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from retrieval.cli import say, say_json
from retrieval.cli.index_common import INDEX, JSON, WHERE, opened_index, say_tuned
from retrieval.cli.types import Bytes
from retrieval.errors import DataError

if TYPE_CHECKING:
    from retrieval.serving.store.address import IndexPlace


@click.command(
    "tune",
    epilog="""\b
Example:
  retrieval index tune photos.index --recall 0.95 --memory 2GB
""",
)
@INDEX
@click.option(
    "--recall",
    default=0.95,
    show_default=True,
    type=float,
    help="Share of the ten nearest that must be found.",
)
@click.option("--memory", type=Bytes(), help="Of the vectors and the structure together, such as 2GB.")
@click.option(
    "--most", default=200_000, show_default=True, type=click.IntRange(2000), help="Vectors that are tried."
)
@click.option("--dry-run", is_flag=True, help="Measure only; leave the index as it is.")
@JSON
def tune(
    path: IndexPlace, recall: float, memory: int | None, most: int, dry_run: bool, as_json: bool
) -> None:
    """Measure which structure finds fastest what it must, on the vectors of INDEX itself, and take it.

    Flat, HNSW, inverted lists, product codes and one byte a number are built and searched with 200 held-out vectors. The index keeps
    the table: 'retrieval index show INDEX' shows it again.
    """
    with opened_index(path) as opened:
        tuned = opened.tune(recall=recall, memory=memory, most=most, apply=not dry_run)
    if as_json:
        say_json({"index": str(path), **tuned.as_dict()})
        return
    say_tuned(tuned)
    if tuned.chosen is None:
        raise DataError(
            "No structure meets both limits; the one that the index has stays. Ask for less recall, or allow more memory."
        )
    options = f" {json.dumps(dict(tuned.chosen.options))}" if tuned.chosen.options else ""
    done = "would be taken" if dry_run else "is taken"
    say(
        f"Measured over {tuned.count:,} vectors. The fastest that meets what was asked {done}: {tuned.chosen.backend}{options}."
    )


@click.command(
    "duplicates",
    epilog="""\b
Example:
  retrieval index duplicates photos.index --within 0.05
""",
)
@INDEX
@click.option("--within", required=True, type=click.FloatRange(0), help="The distance, as searches give it.")
@WHERE
@JSON
def duplicates(path: IndexPlace, within: float, where: str | None, as_json: bool) -> None:
    """List groups of items of INDEX within a distance of one another, directly or through others."""
    with opened_index(path) as opened:
        groups = opened.duplicates(within, where=where)
    if as_json:
        found = [{"ids": list(group.ids), "largest": group.largest} for group in groups]
        say_json({"index": str(path), "groups": found})
        return
    for group in groups:
        say(f"{len(group.ids)} items within {group.largest:.4f}: {'  '.join(group.ids)}")
    extra = sum(len(group.ids) - 1 for group in groups)
    say(f"{len(groups):,} groups; {extra:,} items would go if one of each stayed.", err=True)


@click.command(
    "clusters",
    epilog="""\b
Example:
  retrieval index clusters photos.index --count 20
""",
)
@INDEX
@click.option("--count", default=20, show_default=True, type=click.IntRange(1), help="How many.")
@WHERE
@JSON
def clusters(path: IndexPlace, count: int, where: str | None, as_json: bool) -> None:
    """Group the items of INDEX by their vectors, and show what each group holds."""
    with opened_index(path) as opened:
        found = opened.clusters(count, where=where)
    if as_json:
        plain = [
            {
                "count": one.count,
                "typical": list(one.typical),
                "labels": [{"label": label, "count": number} for label, number in one.labels],
            }
            for one in found
        ]
        say_json({"index": str(path), "clusters": plain})
        return
    for one in found:
        labels = ", ".join(
            f"{'no label' if label is None else label} {number:,}" for label, number in one.labels
        )
        say(f"{one.count:,} items ({labels}): {'  '.join(one.typical)}")
