"""`retrieval search`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrieval.base.display_tables import text_table
from retrieval.cli import say, say_json
from retrieval.cli.common import DEVICE, FILTER, JSON, PATH, IndexArgument, command
from retrieval.cli.plugins import PLUGIN_OPTION
from retrieval.errors import one_line

if TYPE_CHECKING:
    from retrieval.index.queries_and_hits import Hit
    from retrieval.store.address import IndexPlace


@command(
    "search",
    "retrieval search photos.index query.png",
    "retrieval search photos.index a.png b.png -k 5 --json",
)
@click.argument("index", type=IndexArgument())
@click.argument("queries", nargs=-1, required=True, type=PATH)
@click.option("-k", default=10, type=click.IntRange(1), help="Results per query.")
@click.option("--candidates", type=click.IntRange(1), help="Number of candidates for the rescorer.")
@FILTER
@JSON
@PLUGIN_OPTION
@DEVICE
def search_command(
    index: IndexPlace,
    queries: tuple[Path, ...],
    k: int,
    candidates: int | None,
    filter: str | None,
    as_json: bool,
    extra: tuple[str, ...],
    device: Any,
) -> None:
    """Print the items of INDEX, a folder or an address, nearest to images or .npz features."""
    from retrieval.index.index import open_index
    from retrieval.index.queries_and_hits import encode_files

    _refuse_swapped(index, queries)
    with open_index(index, device=device, plugins=extra) as opened:
        names, encoded = encode_files(opened.bundle, queries)
        answers = opened.search(encoded, k, candidates=candidates, filter=filter)
    pairs = list(zip(names, answers, strict=True))
    if as_json:
        say_json([{"query": name, "results": list(map(_plain, hits))} for name, hits in pairs])
    else:
        say("\n\n".join(_table(name, hits) for name, hits in pairs))


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


def _plain(hit: Hit) -> dict[str, Any]:
    return {
        "id": hit.id,
        "label": hit.label,
        "distance": hit.distance,
        "metadata": dict(hit.metadata),
    }


def _table(name: str, hits: list[Hit]) -> str:
    """Return one query's hits as aligned columns."""
    head, *rows = text_table(hits).splitlines()
    ranked = [f"{rank:>4}  {row}" for rank, row in enumerate(rows, 1)]
    return "\n".join([f"Nearest to {one_line(name)}:", f"rank  {head}" if rows else head, *ranked])
