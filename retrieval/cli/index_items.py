"""`retrieval index add`, `delete`, `list` and `show`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrieval.cli import say, say_json
from retrieval.cli.index_common import INDEX, JSON, WHERE, embedding, opened_index, say_tuned, tell
from retrieval.cli.types import Place
from retrieval.errors import StoreError

if TYPE_CHECKING:
    from retrieval.serving.store.address import IndexPlace
    from retrieval.serving.store.contract import Item

_PAGE = 1000


@click.command(
    "add",
    epilog="""\b
Examples:
  retrieval index add photos.index new/
  retrieval index add photos.index photos/ --sync
  retrieval index add photos.index items.parquet --keep copy
""",
)
@INDEX
@click.argument("images", nargs=-1, required=True, type=Place())
@click.option(
    "--sync", is_flag=True, help="Make the index equal to IMAGES: what they do not name is deleted."
)
@JSON
@embedding
def add(
    path: IndexPlace,
    images: tuple[Path | str, ...],
    sync: bool,
    as_json: bool,
    max_pixels: int,
    max_bytes: int,
    **given: Any,
) -> None:
    """Embed IMAGES and add them to INDEX; what is there and has not changed is passed over.

    Searches go on meanwhile. What was added is on the disk from second to second: after an interruption or a kill the same
    command goes on where it stopped.
    """
    from retrieval.serving.images import Limits

    with opened_index(path) as opened:
        added = opened.add(list(images), sync=sync, limits=Limits(max_pixels, max_bytes), **given)
    for note in added.left_out:
        say(note, err=True)
    parts = [f"{added.added:,} added"]
    for name in ("changed", "unchanged", "removed", "repeated"):
        if count := getattr(added, name):
            parts.append(f"{count:,} {name}")
    if added.skipped:
        parts.append(f"{len(added.skipped):,} skipped")
    tell(path, as_json, f"{path}: {', '.join(parts)} in {added.seconds:.1f} s.", **vars(added))


@click.command(
    "delete",
    epilog="""\b
Examples:
  retrieval index delete photos.index "dogs/7.jpg"
  retrieval index delete photos.index --where "price > 100"
""",
)
@INDEX
@click.argument("ids", nargs=-1)
@WHERE
@JSON
def delete(path: IndexPlace, ids: tuple[str, ...], where: str | None, as_json: bool) -> None:
    """Delete items of INDEX by id, or all that match a filter."""
    if bool(ids) == (where is not None):
        raise click.UsageError("Name what to delete: either ids or --where FILTER.")
    with opened_index(path) as opened:
        count = opened.delete(ids, where=where)
    tell(path, as_json, f"{path}: {count:,} deleted.", deleted=count)


@click.command(
    "list",
    epilog="""\b
Example:
  retrieval index list photos.index --where "label = 'dogs'" --limit 20
""",
)
@INDEX
@WHERE
@click.option("--after", metavar="ID", help="Begin behind this id.")
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1), help="How many at most.")
@JSON
def list_items(path: IndexPlace, where: str | None, after: str | None, limit: int, as_json: bool) -> None:
    """List items of INDEX in the order of their ids."""
    with opened_index(path) as opened:
        items: list[Item] = []
        while len(items) < limit:
            page = opened.scan(where, after=after, limit=min(_PAGE, limit - len(items)))
            if not page:
                break
            items += page
            after = page[-1].id
        total = opened.count(where)
    if as_json:
        say_json({"index": str(path), "count": total, "items": [_plain(item) for item in items]})
        return
    for item in items:
        details = f"  {json.dumps(dict(item.metadata), ensure_ascii=False)}" if item.metadata else ""
        say(f"{item.id}  {item.label or ''}{details}".rstrip())
    if len(items) < total:
        say(f"{len(items):,} of {total:,} items.", err=True)


@click.command(
    "show",
    epilog="""\b
Examples:
  retrieval index show photos.index
  retrieval index show photos.index "dogs/7.jpg" --json
""",
)
@INDEX
@click.argument("id", required=False)
@JSON
def show(path: IndexPlace, id: str | None, as_json: bool) -> None:
    """Show what INDEX holds, or one of its items."""
    with opened_index(path) as opened:
        if id is not None:
            item = opened.get(id, arrays=True).get(id)
            if item is None:
                raise StoreError(f"{path} has no item '{id}'.")
            found: dict[str, Any] = _plain(item) | {"vector": item.vector.tolist() if item.arrays else None}
        else:
            stats = opened.stats()
            found = {
                "items": stats.count,
                "bytes": stats.bytes,
                "generations": [
                    {
                        "number": one.number,
                        "state": one.state,
                        "bundle": one.bundle,
                        "variant": one.variant,
                        "numbers": dict(one.widths),
                    }
                    for one in stats.generations
                ],
                **stats.details,
            }
    if as_json:
        say_json({"index": str(path), **found})
        return
    measured = found.pop("tuned", None)
    for name, value in found.items():
        if name == "bytes" and value is None:  # only the store's engine knows
            continue
        if isinstance(value, list) and name != "vector":
            say(f"{name}:")
            for one in value:
                parts = (f"{key} {_shown(part)}" for key, part in one.items() if part is not None)
                say(f"  {', '.join(parts)}")
        else:
            text = f"{len(value)} numbers" if name == "vector" and value is not None else value
            say(f"{name}: {_shown(text)}")
    if measured is not None:
        from retrieval.serving.index.tuning import Tuned

        tuned = Tuned.of(measured)
        memory = "" if tuned.memory is None else f" and {tuned.memory / 1e6:,.1f} MB at most"
        say(f"tuned {tuned.when} over {tuned.count:,} vectors, for a recall of {tuned.recall}{memory}:")
        say_tuned(tuned)


def _shown(value: Any) -> str:
    """Return a value for people: thousands with a comma, an object as JSON."""
    if value is None:
        return "none"
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _plain(item: Item) -> dict[str, Any]:
    return {
        "id": item.id,
        "label": item.label,
        "metadata": dict(item.metadata),
        "path": None if item.path is None else str(item.path),
        "source": item.source,
        "keep": item.keep,
        "bytes": item.bytes,
        "width": item.width,
        "height": item.height,
    }
