"""`retrieval index create`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrieval.cli import say
from retrieval.cli.again import this_command
from retrieval.cli.index_common import JSON, PLACE, creating, embedding, quiet_threads, tell
from retrieval.cli.types import Place

if TYPE_CHECKING:
    from retrieval.serving.index.index import Summary
    from retrieval.serving.store.address import IndexPlace

_LOW_RECALL = 0.9


@click.command(
    "create",
    epilog="""\b
Examples:
  retrieval index create photos.index photos/ --bundle demo/bundle
  retrieval index create photos.index photos/ --model core.efficientnet_lite0
  retrieval index create items.index items.csv --bundle demo/bundle --backend hnsw --set m=48 --skip-bad
""",
)
@PLACE
@click.argument("images", nargs=-1, type=Place())
@click.option(
    "--bundle",
    type=click.Path(path_type=Path),
    help="What embeds the images: a folder that retrieval export wrote.",
)
@click.option(
    "--model",
    metavar="NAME",
    help="Instead of a bundle: a pretrained backbone, such as core.efficientnet_lite0.",
)
@click.option(
    "--whiten/--no-whiten", default=False, help="With --model: whiten its features by the photos themselves."
)
@creating
@embedding
@JSON
def create(
    path: IndexPlace,
    images: tuple[Path | str, ...],
    bundle: Path | None,
    model: str | None,
    whiten: bool,
    **given: Any,
) -> None:
    """Create INDEX, a folder or an address, from IMAGES, with the vectors that a bundle or a pretrained model gives.

    IMAGES are files, folders (the folder's name is the label), CSV files with a column 'path' (and 'label', 'key', and
    any others, kept as metadata), Parquet tables with a column 'path' or 'image' (likewise), or tar shards (a.jpg, a.json, a.cls
    make one item), or addresses of
    these (s3://…, hf://…), with fsspec. For a bundle of features they
    are .npz files or Parquet tables with 'features'. Without any, the index is empty. An interrupted run goes on where it
    stopped when the command is repeated.
    """
    if (bundle is None) == (model is None):
        raise click.UsageError("Name what embeds the images: either --bundle BUNDLE or --model NAME.")
    if model is not None and not images:
        raise click.UsageError("A model is verified on photos: name some.")
    if model is None:
        assert bundle is not None
        _create(path, images, bundle, **given)
        return
    # beside the index, so that an interrupted run need not make it again; of an address in this folder
    made = Path(path if isinstance(path, Path) else path.name or "index").absolute()
    made = made.with_name(f".{made.name}.bundle")
    if not made.is_dir():
        from retrieval.export.export_backbone import export_backbone
        from retrieval.serving.index.locations import is_shard, is_table

        # others are verified, and whitened, on no photos: the backbone's export reads files only
        photos = [
            one for one in images if isinstance(one, Path) and not (is_table(one.name) or is_shard(one.name))
        ]
        if whiten and not photos:
            raise click.UsageError(
                "Whitening takes image files and folders: name some, or leave out --whiten."
            )

        export_backbone(
            model,
            made,
            whiten=photos if whiten else (),
            photos=() if whiten else photos,
            plugins=given["extra"],
        )
    _create(path, images, made, **given)
    shutil.rmtree(made, ignore_errors=True)  # the index has its own copy


def _create(
    path: IndexPlace,
    images: tuple[Path | str, ...],
    bundle: Path,
    *,
    options: tuple[str, ...],
    extra: tuple[str, ...],
    max_pixels: int,
    max_bytes: int,
    as_json: bool,
    **given: Any,
) -> None:
    quiet_threads()
    from retrieval.serving.images import Limits
    from retrieval.serving.index.creating import create_index

    given |= {
        "options": options_of(options),
        "plugins": extra,
        "limits": Limits(max_pixels, max_bytes),
    }
    try:
        summary = create_index(path, bundle, images, **given)
    except KeyboardInterrupt:
        if not isinstance(path, Path):
            say(f"What was added is in {path}. Go on with: retrieval index add {path} …", err=True)
            raise
        kept = path.with_name(f"{path.name}.partial")
        if kept.exists():
            say(f"What was encoded is kept in {kept}. Go on with: {this_command()}", err=True)
        raise
    _tell(path, summary, given["backend"].removeprefix("core."), as_json)


def _tell(path: IndexPlace, summary: Summary, asked: str, as_json: bool) -> None:
    from retrieval.serving.store.structure import LEAST

    notes = [f"back end {summary.backend}"]
    if asked not in ("auto", summary.backend):
        notes[0] += f"; {asked} from {LEAST:,} items in a segment on"
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
        notes.append(f"{len(summary.skipped):,} skipped")
    tell(
        path,
        as_json,
        f"Indexed {summary.count:,} items in {summary.seconds:.1f} s ({', '.join(notes)}): {path}",
        **{name: value for name, value in vars(summary).items() if name != "path"},
    )


def options_of(pairs: tuple[str, ...]) -> dict[str, Any]:
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
