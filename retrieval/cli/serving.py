"""The commands `index`, `search` and `serve`. Nothing heavy is imported before one of them runs."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrieval.cli import say, say_json
from retrieval.cli.again import this_command
from retrieval.cli.plugins import PLUGIN_OPTION
from retrieval.cli.types import Bytes, Choice, Number, Pixels
from retrieval.serving.http.settings import Settings

if TYPE_CHECKING:
    from retrieval.serving.index.base import Hit

_LOW_RECALL = 0.9
_DAY = 86_400.0  # seconds: no time-out is longer
_DEVICE = Choice(["auto", "cpu", "cuda"])
_SIGNED = click.option(
    "--require-signature",
    "signed_by",
    type=click.Path(path_type=Path),
    metavar="PUBLIC_KEY",
    help="Refuse what the holder of this key did not sign (retrieval sign).",
)


@click.command(
    "index",
    epilog="""\b
Examples:
  retrieval index demo/bundle photos/ --output photos.index
  retrieval index demo/bundle items.csv --output items.index --backend hnsw --set m=48 --skip-bad
""",
)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--output", "-o", required=True, type=click.Path(path_type=Path), help="Folder to write; must not exist."
)
@click.option(
    "--backend", default="auto", show_default=True, help="auto (by size), flat, hnsw, ivf, or PLUGIN.name."
)
@click.option(
    "--set", "options", multiple=True, metavar="KEY=VALUE", help="A parameter of the back end; repeatable."
)
@PLUGIN_OPTION
@click.option("--variant", help="Encode with this variant of the bundle's encoder, such as int8.")
@click.option("--skip-bad", is_flag=True, help="Leave out images that cannot be used; each is reported.")
@click.option("--replace", is_flag=True, help="Put the new index in the place of an older one.")
@click.option("--batch", default=32, show_default=True, type=click.IntRange(1), help="Items encoded at once.")
@click.option("--max-pixels", default="25M", show_default=True, type=Pixels(), help="Largest image.")
@click.option("--max-bytes", default="20MB", show_default=True, type=Bytes(), help="Largest file.")
@_SIGNED
@click.option("--device", default="auto", show_default=True, type=_DEVICE, help="Where the encoder runs.")
def index_command(
    bundle: Path,
    images: tuple[Path, ...],
    output: Path,
    backend: str,
    options: tuple[str, ...],
    extra: tuple[str, ...],
    variant: str | None,
    skip_bad: bool,
    replace: bool,
    batch: int,
    max_pixels: int,
    max_bytes: int,
    device: Any,
    signed_by: Path | None,
) -> None:
    """Encode IMAGES with BUNDLE and write an index.

    IMAGES are files, folders (the folder's name is the label), CSV files with a column 'path' (and 'label', and
    any others, kept as metadata), or .npz files with 'features' for a bundle of features. An interrupted run goes on
    where it stopped when the command is repeated.
    """
    _quiet_threads()
    from retrieval.serving.images import Limits
    from retrieval.serving.index.build import write_index

    try:
        summary = write_index(
            bundle,
            images,
            output,
            backend=backend,
            options=_options(options),
            plugins=extra,
            variant=variant,
            skip_bad=skip_bad,
            replace=replace,
            batch=batch,
            limits=Limits(max_pixels, max_bytes),
            device=device,
            signed_by=signed_by,
        )
    except KeyboardInterrupt:
        kept = output.with_name(f"{output.name}.partial")
        if kept.exists():
            say(f"What was encoded is kept in {kept}. Go on with: {this_command()}", err=True)
        raise
    notes = [f"back end {summary.backend}"]
    if summary.recall_at_10 is not None:
        notes.append(f"recall@10 {summary.recall_at_10:.3f} against exact search")
        if summary.recall_at_10 < _LOW_RECALL:
            say(
                f"Note: {summary.backend} misses more than a tenth of the nearest items. Raise its parameters with --set "
                "(ef_search of hnsw, probes of ivf), or take --backend flat, which is exact.",
                err=True,
            )
    if summary.resumed:
        notes.append(f"{summary.resumed:,} done by an interrupted run")
    if summary.repeated:
        notes.append(f"{summary.repeated:,} named twice and taken once")
    for note in summary.left_out:
        say(note, err=True)
    if summary.skipped:
        notes.append(f"{summary.skipped:,} skipped")
    say(f"Indexed {summary.count:,} items in {summary.seconds:.1f} s ({', '.join(notes)}): {output}")


@click.command(
    "search",
    epilog="""\b
Examples:
  retrieval search photos.index query.png
  retrieval search photos.index a.png b.png -k 5 --json
""",
)
@click.argument("index", type=click.Path(path_type=Path))
@click.argument("queries", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-k", default=10, show_default=True, type=click.IntRange(1), help="How many answers per query.")
@click.option("--candidates", type=click.IntRange(1), help="How many candidates the rescorer is given.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@PLUGIN_OPTION
@_SIGNED
@click.option("--device", default="auto", show_default=True, type=_DEVICE, help="Where the encoder runs.")
def search_command(
    index: Path,
    queries: tuple[Path, ...],
    k: int,
    candidates: int | None,
    as_json: bool,
    extra: tuple[str, ...],
    device: Any,
    signed_by: Path | None,
) -> None:
    """Search INDEX with images (or .npz features) and print the nearest items, nearest first."""
    _quiet_threads()
    from retrieval.serving.index.open import open_index
    from retrieval.serving.queries import encode_files

    _refuse_swapped(index, queries)
    with open_index(index, device=device, plugins=extra, signed_by=signed_by) as opened:
        names, encoded = encode_files(opened.bundle, queries)
        answers = opened.search(encoded, k, candidates=candidates)
    if as_json:
        found = [
            {"query": name, "results": [_plain(hit) for hit in hits]}
            for name, hits in zip(names, answers, strict=True)
        ]
        say_json(found)
    else:
        say("\n\n".join(_table(name, hits) for name, hits in zip(names, answers, strict=True)))


_SIZES = {"max_pixels": Pixels, "max_bytes": Bytes, "body_memory": Bytes}


def _limits(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for each limit of the server's settings."""
    for each in reversed([each for each in fields(Settings) if each.metadata]):
        least = each.metadata["least"]
        kind = click.IntRange(least) if isinstance(each.default, int) else Number(least, _DAY)
        command = click.option(
            f"--{each.name.replace('_', '-')}",
            default=each.default,
            show_default=True,
            type=_SIZES[each.name](least) if each.name in _SIZES else kind,
            help=each.metadata["help"],
        )(command)
    return command


@click.command(
    "serve",
    epilog="""\b
Examples:
  retrieval serve photos.index
  retrieval serve photos.index --port 8080
  curl -F image=@query.png -F k=5 http://127.0.0.1:8000/v1/search
""",
)
@click.argument("index", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option(
    "--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 picks a free one."
)
@click.option(
    "--health-port",
    type=click.IntRange(0, 65535),
    help="Another port, for /v1/health/… only; 0 picks a free one.",
)
@click.option(
    "--allow-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="A name that requests may use for this server.",
)
@click.option(
    "--workers", type=click.IntRange(1), help="Searches at a time; as many as there are cores by default."
)
@click.option(
    "--images",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Show items' images from here; without it, of an index that you built on this machine. Repeatable.",
)
@_limits
@click.option("--debug", is_flag=True, help="Tracebacks in the log.")
@PLUGIN_OPTION
@_SIGNED
@click.option("--device", default="auto", show_default=True, type=_DEVICE, help="Where the encoder runs.")
def serve_command(
    index: Path,
    host: str,
    port: int,
    health_port: int | None,
    hosts: tuple[str, ...],
    workers: int | None,
    images: tuple[Path, ...],
    debug: bool,
    extra: tuple[str, ...],
    device: Any,
    signed_by: Path | None,
    **limits: Any,
) -> None:
    """Serve INDEX over HTTP: a page to search with an image, and the same as JSON at POST /v1/search."""
    _quiet_threads()
    from retrieval.serving.http.server import serve

    settings = Settings(
        workers=workers or os.cpu_count() or 1,
        hosts=tuple(name.lower() for name in hosts),
        health_port=health_port,
        images=images,
        debug=debug,
        **limits,
    )
    serve(index, host=host, port=port, settings=settings, plugins=extra, device=device, signed_by=signed_by)


def _quiet_threads() -> None:
    from retrieval.serving.runtime import quiet_threads

    quiet_threads()


def _refuse_swapped(index: Path, queries: tuple[Path, ...]) -> None:
    """Refuse an image where the index should be, when the index stands among the queries."""
    from retrieval.errors import StoreError
    from retrieval.serving.files.places import kind_of

    swapped = next((path for path in queries if kind_of(path) == "index"), None)
    if swapped is not None and kind_of(index) != "index":
        rest = [str(path) for path in (index, *queries) if path != swapped]
        raise StoreError(
            f"{index} is not an index, and {swapped} is: the index comes first. "
            f"Write: retrieval search {shlex.join([str(swapped), *rest])}"
        )


def _options(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Return `--set m=48` as {"m": 48}: values are JSON where they can be, text otherwise."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name:
            raise click.BadParameter(f"'{pair}' is not KEY=VALUE.", param_hint="--set")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def _plain(hit: Hit) -> dict[str, Any]:
    return {
        "id": hit.id,
        "key": hit.key,
        "label": hit.label,
        "distance": hit.distance,
        "metadata": dict(hit.metadata),
    }


def _table(name: str, hits: list[Hit]) -> str:
    """Return one query's answers as aligned columns."""
    head = ("rank", "distance", "label", "key")
    rows = [(str(rank), f"{hit.distance:.4f}", hit.label or "", hit.key) for rank, hit in enumerate(hits, 1)]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]

    def line(row: tuple[str, ...]) -> str:
        cells = [row[0].rjust(widths[0]), row[1].rjust(widths[1]), row[2].ljust(widths[2]), row[3]]
        return "  ".join(cells).rstrip()

    text = "\n".join([f"Nearest to {name}:", line(head), *map(line, rows)])
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)
