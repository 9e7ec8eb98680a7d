"""`retrieval embed`, which writes folders for an index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from retrieval.cli import say, say_json
from retrieval.cli.common import DEVICE, JSON, PATH, VARIANT, command, limited, this_command
from retrieval.cli.index import count_texts
from retrieval.errors import quantity


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
    "--features", is_flag=True, help="Also keep the backbone's features (see export --split)."
)
@click.option("--batch-size", type=click.IntRange(1), help="Items encoded at once; 32 by default.")
@limited
@DEVICE
@click.option(
    "--ray",
    metavar="ADDRESS",
    help="Embed on a Ray cluster: HOST:PORT of its head, or auto on one of its nodes. All nodes"
    " must share BUNDLE, SOURCES and --output.",
)
@JSON
def embed_command(
    bundle: Path,
    sources: tuple[Path, ...],
    output: Path,
    as_json: bool,
    **settings: Any,
) -> None:
    """Embed SOURCES with BUNDLE into a folder of Parquet files.

    SOURCES are as the IMAGES of 'retrieval index create'. Each item is in the folder once, with
    key, label, metadata, vector, code, and features on request. 'retrieval index create' and 'add'
    take the folder in place of images. bad.jsonl lists items that cannot be used. To resume after
    an interruption or a kill, run the same command again: finished files are kept.
    """
    from retrieval.index.write_embeddings import EmbeddingOptions, embed_sources

    try:
        written = embed_sources(bundle, list(sources), output, EmbeddingOptions(**settings))
    except KeyboardInterrupt:
        say(f"Finished files are kept in {output}. Go on with: {this_command()}", err=True)
        raise
    say(*written.left_out, err=True)
    if as_json:
        say_json(vars(written) | {"output": str(output)})
        return
    notes = [quantity(written.parts, "file"), f"batches of {written.batch_size:,}"]
    notes += count_texts(
        {"done before": written.resumed, "named twice and taken once": written.repeated}
    )
    items = quantity(written.items, "item")
    say(f"Embedded {items} in {written.seconds:.1f} s ({', '.join(notes)}): {output}")
    if written.bad:
        bad = quantity(written.bad, "item")
        say(f"{bad} could not be used; {output / 'bad.jsonl'} says why.", err=True)
