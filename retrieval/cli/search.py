"""`retrieval search`."""

from __future__ import annotations

import json
import shlex
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrieval.base.display_tables import text_table
from retrieval.cli import say, say_json
from retrieval.cli.common import DEVICE, FILTER, JSON, PATH, IndexArgument, Number, command
from retrieval.cli.plugins import PLUGIN_OPTION
from retrieval.errors import DataError, one_line

if TYPE_CHECKING:
    from retrieval.index.index import Index
    from retrieval.index.queries_and_hits import Hit, Hits
    from retrieval.store.address import IndexPlace


@command(
    "search",
    "retrieval search photos.index query.png",
    'retrieval search photos.index --text "red mug"',
    "retrieval search photos.index a.png b.png -k 5 --json",
    "retrieval search photos.index --like one.png --like two.png --dislike three.png",
    "retrieval search photos.index query.png --group-by product --group-size 3",
)
@click.argument("index", type=IndexArgument())
@click.argument("queries", nargs=-1, type=PATH)
@click.option("--text", "texts", multiple=True, help="Search for a text, if the model takes texts.")
@click.option("--words", type=Number(0, 1), help="Weight of items' words beside their vectors.")
@click.option("-k", default=10, type=click.IntRange(1), help="Results (or groups) per query.")
@click.option("--like", multiple=True, metavar="ID|IMAGE", help="Search for more like this, too.")
@click.option("--dislike", multiple=True, metavar="ID|IMAGE", help="Search for less like this.")
@click.option("--group-by", metavar="FIELD", help="Group results by label or an entry of metadata.")
@click.option("--group-size", type=click.IntRange(1), help="Results per group; 1 by default.")
@click.option("--max-distance", type=Number(0), help="Largest distance of a result.")
@click.option("--offset", type=click.IntRange(0), help="Results (or groups) to skip.")
@click.option("--diversity", type=Number(0, 1), help="How much results differ from one another.")
@click.option("--facet", "facets", multiple=True, metavar="FIELD", help="Count a field's values.")
@click.option("--order-by", metavar="[-]FIELD", help="List results by a field; - from the largest.")
@click.option("--scores", is_flag=True, help="Tell the share of strangers that come less near.")
@click.option("--candidates", type=click.IntRange(1), help="Number of candidates for the rescorer.")
@FILTER
@JSON
@PLUGIN_OPTION
@DEVICE
def search_command(
    index: IndexPlace,
    queries: tuple[Path, ...],
    texts: tuple[str, ...],
    k: int,
    as_json: bool,
    extra: tuple[str, ...],
    device: Any,
    **options: Any,
) -> None:
    """Print the items of INDEX, a folder or an address, nearest to images, features or texts."""
    if not (queries or texts or options["like"]):
        raise click.UsageError(
            "Name an image to search for, a text with --text, or an item or image with --like."
        )
    if queries and texts:
        raise click.UsageError("Search for images or for texts, not for both at once.")
    from retrieval.index.index import open_index
    from retrieval.index.queries_and_hits import encode_files

    _refuse_swapped(index, queries)
    with open_index(index, device=device, plugins=extra) as opened:
        if options["scores"]:
            require_calibration(opened)
        chosen: Any = {name: value for name, value in options.items() if value not in (None, ())}
        if texts:
            names = list(texts)
            answers = opened.search(None, k, text=texts, **chosen)
        elif queries:
            names, encoded = encode_files(opened.bundle, queries)
            answers = opened.search(encoded, k, **chosen)
        else:
            names = [", ".join(options["like"])]
            answers = [opened.search(None, k, **chosen)]
    pairs = list(zip(names, answers, strict=True))
    if as_json:
        say_json([_answer(name, hits) for name, hits in pairs])
    else:
        say("\n\n".join(_table(name, hits) for name, hits in pairs))


def require_calibration(index: Index) -> None:
    """Raise a `DataError` that names the index unless it is calibrated."""
    if index.calibration() is None:
        # The index's own error, which a server sends to its clients, names no path.
        command = shlex.join(["retrieval", "calibrate", str(index.path)])
        raise DataError(f"{index.path} is not calibrated. First run: {command}")


def _refuse_swapped(index: IndexPlace, queries: tuple[Path, ...]) -> None:
    """Refuse an image as INDEX if the index is among the queries."""
    from retrieval.base.folder_kinds import kind_of
    from retrieval.errors import StoreError

    swapped = next((path for path in queries if kind_of(path) == "index"), None)
    if swapped is not None and isinstance(index, Path) and kind_of(index) != "index":
        rest = [str(path) for path in (index, *queries) if path != swapped]
        raise StoreError(
            f"{index} is not an index, but {swapped} is: the index comes first. "
            f"Write: retrieval search {shlex.join([str(swapped), *rest])}"
        )


def _answer(name: str, hits: Hits) -> dict[str, Any]:
    """Return one query's hits as JSON."""
    answer: dict[str, Any] = {"query": name, "results": list(map(as_facts, hits))}
    if hits.facets:
        answer["facets"] = {
            field: [{"value": value, "count": count} for value, count in counts]
            for field, counts in hits.facets.items()
        }
    return answer


def as_facts(hit: Hit) -> dict[str, Any]:
    """Return a hit as a JSON object."""
    return {
        "id": hit.id,
        "label": hit.label,
        "distance": None if isnan(hit.distance) else hit.distance,
        "score": hit.score,
        "metadata": dict(hit.metadata),
    }


def _table(name: str, hits: Hits) -> str:
    """Return one query's hits as aligned columns, and a line per facet."""
    head, *rows = text_table(hits).splitlines()
    ranked = [f"{rank:>4}  {row}" for rank, row in enumerate(rows, 1)]
    facets = [
        one_line(f"{field}: {', '.join(f'{_text(value)} ({count})' for value, count in counts)}")
        for field, counts in hits.facets.items()
    ]
    title = f"Nearest to {one_line(name)}:"
    return "\n".join([title, f"rank  {head}" if rows else head, *ranked, *facets])


def _text(value: Any) -> str:
    """Return a value of a facet, as a filter writes it but without quotes."""
    if isinstance(value, str):
        return value
    return json.dumps(value)
