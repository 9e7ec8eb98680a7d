"""`retrieval embed`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from retrieval.cli import say, say_json
from retrieval.cli.common import Place, this_command
from retrieval.cli.index_common import (
    DEVICE,
    JSON,
    MAX_BYTES,
    MAX_PIXELS,
    VARIANT,
    command,
    quiet_threads,
)


@command(
    "embed",
    "retrieval embed demo/bundle photos/ --output vectors/",
    "retrieval embed demo/bundle tables/*.parquet --output vectors/ --ray 10.0.0.1:6379",
    "retrieval index create photos.index vectors/ --bundle demo/bundle",
)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("sources", nargs=-1, required=True, type=Place())
@click.option(
    "--output",
    "-o",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder of the Parquet files.",
)
@click.option(
    "--ray",
    metavar="ADDRESS",
    help="A Ray cluster: HOST:PORT of its head, or auto on one of its nodes.",
)
@VARIANT
@click.option(
    "--features",
    is_flag=True,
    help="Also keep the backbone's features, for bundles of export --split.",
)
@click.option("--batch", type=click.IntRange(1), help="Items encoded at once; 32 by default.")
@click.option(
    "--part",
    type=click.IntRange(1),
    help="Items per file. By default some thousand files, of 256 to 8192 items.",
)
@click.option(
    "--max-bad",
    "most_bad",
    default=10_000,
    show_default=True,
    type=click.IntRange(0),
    help="Stop if more items than this are unusable.",
)
@click.option("--retry-bad", is_flag=True, help="Redo the files that lack unusable items.")
@click.option(
    "--cpus",
    type=click.IntRange(1),
    help="With --ray: cores per worker. By default 4, or the smallest node's if fewer.",
)
@MAX_PIXELS
@MAX_BYTES
@DEVICE
@JSON
def embed_command(
    bundle: Path,
    sources: tuple[Path | str, ...],
    max_pixels: int,
    max_bytes: int,
    as_json: bool,
    **settings: Any,
) -> None:
    """Embed SOURCES with BUNDLE into a folder of Parquet files, on this machine or on a Ray
    cluster.

    SOURCES are the same as for 'retrieval index create'. Each item appears exactly once, with key,
    label, metadata, vector, code, and features on request. 'retrieval index create' and 'add'
    accept the folder in place of images. bad.jsonl lists unusable items. After an interruption or a
    kill, run the same command again: finished files are kept.
    """
    if settings["cpus"] is not None and settings["ray"] is None:
        raise click.UsageError("--cpus are of a cluster's workers: name the cluster with --ray.")
    quiet_threads()
    from retrieval.serving.embedding.embedding import embed_sources
    from retrieval.serving.images import Limits

    try:
        done = embed_sources(
            bundle, list(sources), limits=Limits(max_pixels, max_bytes), **settings
        )
    except KeyboardInterrupt:
        say(
            f"Finished parts are kept in {settings['output']}. Go on with: {this_command()}",
            err=True,
        )
        raise
    for note in done.left_out:
        say(note, err=True)
    if as_json:
        say_json(
            {name: str(value) if name == "output" else value for name, value in vars(done).items()}
        )
        return
    notes = [
        f"{done.parts:,} {'file' if done.parts == 1 else 'files'}",
        f"batches of {done.batch:,}",
    ]
    for count, what in (
        (done.resumed, "done before"),
        (done.repeated, "named twice and taken once"),
    ):
        if count:
            notes.append(f"{count:,} {what}")
    say(
        f"Embedded {done.items:,} items in {done.seconds:.1f} s ({', '.join(notes)}):"
        f" {settings['output']}"
    )
    if done.bad:
        what = "item" if done.bad == 1 else "items"
        say(
            f"{done.bad:,} {what} could not be used; {settings['output'] / 'bad.jsonl'} says why.",
            err=True,
        )
