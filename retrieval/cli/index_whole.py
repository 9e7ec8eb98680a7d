"""`retrieval index check`, `compact`, `duplicates`, `migrate`, `rollback`, `snapshot`, `restore`.

These commands work on an index as a whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrieval.cli import say, say_json
from retrieval.cli.common import JSON, PATH, command
from retrieval.cli.index_common import INDEX, WHERE, opened_index, opened_store, plugins_given, tell
from retrieval.errors import StoreError, listed

if TYPE_CHECKING:
    from retrieval.serving.index.migrating import Migrated
    from retrieval.serving.store.address import IndexPlace


@command("check", "retrieval index check photos.index")
@INDEX
@JSON
def check(path: IndexPlace, as_json: bool) -> None:
    """Check every file of INDEX against its checksum, and all parts against each other. At an
    address, read every item and bundle.
    """
    from retrieval.serving.index.checking import check_index, check_store

    if isinstance(path, Path):
        damaged, rebuilt = check_index(path)
    else:
        with opened_store(path) as store:
            damaged, rebuilt = check_store(store), []
    if as_json:
        say_json({"index": str(path), "damaged": damaged, "rebuilt": rebuilt})
        if damaged:
            raise SystemExit(2)
        return
    for note in rebuilt:
        say(note, err=True)
    if damaged:
        raise StoreError(
            listed(f"{path} is damaged", damaged)
            + "\nRestore it from a snapshot: retrieval index restore SNAPSHOT INDEX"
        )
    say(f"{path} is whole.")


@command("compact", "retrieval index compact photos.index")
@INDEX
@JSON
def compact(path: IndexPlace, as_json: bool) -> None:
    """Merge the segments of INDEX, remove deleted items, and free their disk space."""
    from retrieval.serving.progress import Meter

    with opened_store(path) as store, Meter("compacting", store.count(), "items") as meter:
        before = store.stats().bytes
        store.compact(lambda done, total: meter.reach(done, total, "compacting"))
        after = store.stats().bytes
    if before is None or after is None:  # the store does not know its size
        sentence = "compacted."
    else:
        sentence = f"{before / 1e6:,.1f} MB before, {after / 1e6:,.1f} MB now."
    tell(path, as_json, f"{path}: {sentence}", bytes_before=before, bytes=after)


@command("duplicates", "retrieval index duplicates photos.index --within 0.05")
@INDEX
@click.option(
    "--within", required=True, type=click.FloatRange(0), help="Largest distance, as in searches."
)
@WHERE
@JSON
def duplicates(path: IndexPlace, within: float, where: str | None, as_json: bool) -> None:
    """List groups of items of INDEX that are near one another, directly or through others."""
    with opened_index(path) as opened:
        groups = opened.duplicates(within, where=where)
    if as_json:
        group_rows = [{"ids": list(group.ids), "largest": group.largest} for group in groups]
        say_json({"index": str(path), "groups": group_rows})
        return
    for group in groups:
        say(f"{len(group.ids)} items within {group.largest:.4f}: {'  '.join(group.ids)}")
    extra = sum(len(group.ids) - 1 for group in groups)
    say(f"{len(groups):,} groups with {extra:,} items more than one each.", err=True)


@command(
    "migrate",
    "retrieval index migrate photos.index better.bundle",
    "retrieval index migrate photos.index --drop-old",
)
@INDEX
@click.argument("bundle", required=False, type=PATH)
@click.option(
    "--skip-bad", is_flag=True, help="Skip items whose original is missing or cannot be used."
)
@click.option(
    "--drop-old",
    is_flag=True,
    help="Delete generations that are not served. Without BUNDLE, do nothing else.",
)
@JSON
def migrate(
    path: IndexPlace, bundle: Path | None, skip_bad: bool, drop_old: bool, as_json: bool
) -> None:
    """Embed the items of INDEX with another BUNDLE, then serve the new vectors.

    If the index was created with --keep-features and only the head differs, this needs no originals
    and takes seconds.

    Searches use the old vectors until all new ones are complete; old and new never mix. The old
    generation is kept for 'retrieval index rollback' until --drop-old. To resume after an
    interruption or a kill, run the same command again.
    """
    with opened_index(path) as opened:
        if bundle is None and not drop_old:
            raise click.UsageError("Name the bundle to migrate to.")
        done = None if bundle is None else opened.migrate(bundle, skip_bad=skip_bad)
        metrics: dict[str, Any] = {}
        sentences = []
        if done is not None:
            for fault in done.skipped:
                say(f"skipped: {fault}", err=True)
            kept = (
                f", {done.from_features:,} from features that were kept"
                if done.from_features
                else ""
            )
            sentences.append(
                f"{path}: {done.embedded:,} items embedded{kept}; generation"
                f" {done.generation.number} is served."
            )
            metrics = _plain(done)
        if drop_old:
            metrics["dropped"] = count = opened.drop_old()
            sentences.append(
                f"{path}: {count:,} older generation{'' if count == 1 else 's'} deleted."
            )
    tell(path, as_json, "\n".join(sentences), **metrics)


@command("rollback", "retrieval index rollback photos.index")
@INDEX
@JSON
def rollback(path: IndexPlace, as_json: bool) -> None:
    """Serve the generation of INDEX before the last migration again. Items that were added since
    are first embedded for it.
    """
    with opened_index(path) as opened:
        done = opened.rollback()
    tell(
        path,
        as_json,
        f"{path}: generation {done.generation.number} is served again; {done.embedded:,} items were"
        " embedded for it.",
        **_plain(done),
    )


def _plain(done: Migrated) -> dict[str, Any]:
    return vars(done) | {"generation": done.generation.number}


@command("snapshot", "retrieval index snapshot photos.index monday.index")
@INDEX
@click.argument("target", type=PATH)
@JSON
def snapshot(path: IndexPlace, target: Path, as_json: bool) -> None:
    """Copy a consistent state of INDEX to the new folder TARGET, which opens as an index. Searches
    and writes continue meanwhile.
    """
    with opened_index(path) as opened:
        opened.snapshot(target)
    tell(path, as_json, f"Wrote {target}", snapshot=str(target))


@command("restore", "retrieval index restore monday.index photos.index")
@click.argument("source", metavar="SNAPSHOT", type=PATH)
@INDEX
@JSON
def restore(source: Path, path: IndexPlace, as_json: bool) -> None:
    """Check SNAPSHOT and copy it to INDEX, a new folder or an address without an index."""
    from retrieval.serving.index.checking import restore as copy

    notes = copy(source, path, plugins=plugins_given())
    for note in notes:
        say(note, err=True)
    tell(
        path,
        as_json,
        f"Restored {path}",
        snapshot=str(source),
        **({"left_behind": notes} if notes else {}),
    )
