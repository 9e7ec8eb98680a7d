"""`retrieval embed`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from retrieval.cli import say, say_json
from retrieval.cli.common import (
    DEVICE,
    JSON,
    MAX_BYTES,
    MAX_PIXELS,
    PATH,
    VARIANT,
    command,
    this_command,
)


@command(
    "embed",
    "retrieval embed demo/bundle photos/ --output vectors/",
    "retrieval index create photos.index vectors/ --bundle demo/bundle",
)
@click.argument("bundle", type=PATH)
@click.argument("sources", nargs=-1, required=True, type=PATH)
@click.option("--output", "-o", required=True, type=PATH, help="Folder of the Parquet files.")
@VARIANT
@click.option(
    "--features",
    is_flag=True,
    help="Also keep the backbone's features, for bundles of export --split.",
)
@click.option("--batch", type=click.IntRange(1), help="Items encoded at once; 32 by default.")
@MAX_PIXELS
@MAX_BYTES
@DEVICE
@JSON
def embed_command(
    bundle: Path,
    sources: tuple[Path, ...],
    output: Path,
    max_pixels: int,
    max_bytes: int,
    as_json: bool,
    **settings: Any,
) -> None:
    """Embed SOURCES with BUNDLE into a folder of Parquet files.

    SOURCES are the same as for 'retrieval index create'. Each item appears exactly once, with key,
    label, metadata, vector, code, and features on request. 'retrieval index create' and 'add'
    accept the folder in place of images. bad.jsonl lists unusable items. After an interruption or a
    kill, run the same command again: finished files are kept.
    """
    from retrieval.serving.embedding.embedding import embed_sources
    from retrieval.serving.images import Limits

    limits = Limits(max_pixels, max_bytes)
    try:
        done = embed_sources(bundle, list(sources), output=output, limits=limits, **settings)
    except KeyboardInterrupt:
        say(f"Finished parts are kept in {output}. Go on with: {this_command()}", err=True)
        raise
    for note in done.left_out:
        say(note, err=True)
    if as_json:
        say_json(vars(done) | {"output": str(output)})
        return
    notes = [f"{done.parts:,} {'file' if done.parts == 1 else 'files'}"]
    notes.append(f"batches of {done.batch:,}")
    notes += [f"{done.resumed:,} done before"] if done.resumed else []
    notes += [f"{done.repeated:,} named twice and taken once"] if done.repeated else []
    say(f"Embedded {done.items:,} items in {done.seconds:.1f} s ({', '.join(notes)}): {output}")
    if done.bad:
        what = "item" if done.bad == 1 else "items"
        bad = f"{done.bad:,} {what} could not be used; {output / 'bad.jsonl'} says why."
        say(bad, err=True)
