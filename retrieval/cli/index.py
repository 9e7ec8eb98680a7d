"""`retrieval index` and its commands."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from retrieval.base.photo_files import address_of
from retrieval.cli import say, say_json
from retrieval.cli.audit import audited
from retrieval.cli.common import (
    DEVICE,
    FILTER,
    JSON,
    PATH,
    VARIANT,
    Choice,
    Group,
    IndexArgument,
    backbone_parameters,
    bundle_or_model,
    command,
    limited,
    options,
    refuse_options,
    this_command,
)
from retrieval.cli.plugins import PLUGIN_OPTION, plugin_option
from retrieval.errors import DataError, StoreError, listed, one_line, quantity

if TYPE_CHECKING:
    from retrieval.base.runtime import Device
    from retrieval.index.adding import Summary
    from retrieval.index.index import Index
    from retrieval.index.migrating import Migrated
    from retrieval.store.address import IndexPlace
    from retrieval.store.contract import Item, Stats

_PLUGINS = "retrieval.plugins"
VECTORS_LEAVE_OUT = {"skip_bad", "keep", "keep_features", "variant", "max_pixels", "max_bytes"}
"""Options of `create` that concern images and encoders, not vectors."""
_LOW_RECALL = 0.9  # recall@10 below which a note suggests other parameters
_REVIEWED_BYTES = 100_000_000


@click.group(
    cls=Group,
    epilog="""\b
Examples:
  retrieval index create photos.index photos/ --bundle demo/bundle
  retrieval index add photos.index photos/ --sync
  retrieval index migrate photos.index better.bundle
""",
)
def index() -> None:
    """Create an index, and change, inspect, copy and repair it while it is searched."""


verb = partial(command, group=index)  # decorates a command of the group
PLACE = click.argument("path", metavar="INDEX", type=IndexArgument())


def _keep_plugins(ctx: click.Context, param: click.Parameter, items: tuple[str, ...]) -> None:
    ctx.meta[_PLUGINS] = items


INDEX = options(PLACE, plugin_option(callback=_keep_plugins, expose_value=False))
"""Adds the argument INDEX, a folder or an address, and the option for its store's plugin."""


def _plugins() -> tuple[str, ...]:
    """Return the values of the option `--plugin` that `INDEX` added."""
    plugins: tuple[str, ...] = click.get_current_context().meta.get(_PLUGINS, ())
    return plugins


def opened_index(path: IndexPlace, device: Device = "auto") -> Index:
    """Open an index with the plugins of the command line."""
    from retrieval.index.index import open_index

    return open_index(path, plugins=_plugins(), device=device)


embedding = options(
    click.option("--skip-bad", is_flag=True, help="Skip and report images that cannot be used."),
    click.option("--batch-size", default=32, type=click.IntRange(1), help="Items encoded at once."),
    limited,
    click.option(
        "--keep",
        default="reference",
        type=Choice(["reference", "copy", "thumbnail", "nothing"]),
        help="What the index keeps of each original image.",
    ),
)
"""Adds the options of commands that embed images into an index."""


def tell(path: IndexPlace, as_json: bool, /, *lines: str, **facts: Any) -> None:
    """Print a command's result as lines, or as a JSON object that starts with the index."""
    if as_json:
        say_json({"index": str(path), **facts})
    else:
        say(*lines)


def count_texts(counts: Mapping[str, int]) -> list[str]:
    """Return "3 skipped" and the like for each count that is not 0."""
    return [f"{count:,} {description}" for description, count in counts.items() if count]


@verb(
    "create",
    "retrieval index create photos.index photos/ --bundle demo/bundle",
    "retrieval index create photos.index photos/ --model core.efficientnet_lite0",
    "retrieval index create items.index items.csv --bundle demo/bundle --backend hnsw --set m=48"
    " --skip-bad",
)
@PLACE
@click.argument("images", nargs=-1, type=PATH)
@click.option(
    "--bundle", type=PATH, help="The bundle that embeds the images, a folder of 'retrieval export'."
)
@click.option(
    "--model",
    metavar="ADDRESS",
    help="Instead of a bundle: its address, such as hf://OWNER/NAME; a pretrained backbone, such as"
    " core.efficientnet_lite0 or core.timm:resnet50.a1_in1k, which is exported; or any other model,"
    " whose vectors are indexed.",
)
@click.option(
    "--backend", default="auto", help="auto (by size), flat, hnsw, ivf, ivfpq, or PLUGIN.NAME."
)
@click.option(
    "--set",
    "parameters",
    multiple=True,
    metavar="KEY=VALUE",
    help="Back-end parameter, or with --model a parameter of the backbone, such as"
    " backbone.normalise=true; repeatable.",
)
@PLUGIN_OPTION
@VARIANT
@click.option(
    "--keep-features",
    is_flag=True,
    help="Also keep the backbone's features, so that 'index migrate' to another head takes seconds;"
    " for bundles of export --split.",
)
@click.option("--replace", is_flag=True, help="Replace an existing index.")
@DEVICE
@embedding
@JSON
@audited
def create_command(
    path: IndexPlace,
    images: tuple[Path, ...],
    bundle: Path | None,
    model: str | None,
    parameters: tuple[str, ...],
    extra: tuple[str, ...],
    as_json: bool,
    **settings: Any,
) -> int:
    """Create INDEX, a folder or an address, from IMAGES, with the vectors of a bundle or a
    pretrained model.

    IMAGES are files, folders (the folder's name is the label), or CSV files or Parquet tables with
    a column 'path' (and 'label', 'key', and any others, kept as metadata). For a bundle of features
    they are .npz files or Parquet tables with 'features'. Without IMAGES, the index is empty. To
    resume after an interruption, run the same command again; for an index at an address, run
    'retrieval index add'.
    """
    if (bundle is None) == (model is None):
        raise click.UsageError(
            "Name what embeds the images: either --bundle BUNDLE or --model ADDRESS."
        )
    bundle, model = bundle_or_model(bundle, model)
    if model is not None and not images:
        raise click.UsageError("Name IMAGES too: --model needs photos to verify its bundle.")
    # A backbone's name has a point; all other addresses give vectors.
    if model is not None and "." not in model.partition(":")[0]:
        refuse_options(f"with {model}, whose vectors are indexed", VECTORS_LEAVE_OUT)
    of_backbone = [text for text in parameters if text.startswith("backbone.")]
    if bundle is not None and of_backbone:
        raise click.UsageError(f"Leave --set {of_backbone[0]} out: it needs --model, not --bundle.")
    backend_options = _options([text for text in parameters if text not in of_backbone])
    from retrieval.index.index import create_index

    try:
        with TemporaryDirectory() as scratch:
            folder = bundle
            if model is not None:
                from retrieval.export.export_vectors import prepared

                values = backbone_parameters(of_backbone)
                folder, images = prepared(model, values, images, extra, Path(scratch))
            assert folder is not None
            summary = create_index(
                path, folder, images, options=backend_options, plugins=extra, **settings
            )
    except KeyboardInterrupt:
        # an address holds the index at once, a folder gets its name when the index is complete
        if not isinstance(path, Path):
            say(f"What was added is in {path}. Go on with: retrieval index add {path} …", err=True)
        elif (partial := path.with_name(f"{path.name}.partial")).exists():
            say(f"What was encoded is kept in {partial}. Go on with: {this_command()}", err=True)
        raise
    _tell_created(path, summary, settings["backend"].removeprefix("core."), as_json)
    return summary.count


def _tell_created(path: IndexPlace, summary: Summary, backend: str, as_json: bool) -> None:
    from retrieval.store.search_structure import MIN_ROWS

    notes = [f"back end {summary.backend}"]
    if backend not in ("auto", summary.backend):
        notes[0] += f"; {backend} only from {MIN_ROWS:,} items on"
    if summary.recall_at_10 is not None:
        notes.append(f"recall@10 {summary.recall_at_10:.3f} against exact search")
        if summary.recall_at_10 < _LOW_RECALL:
            say(
                f"Note: {summary.backend} misses more than a tenth of the nearest items. Raise its"
                " parameters with --set (ef_search of hnsw, probes of ivf), or use --backend flat,"
                " which is exact.",
                err=True,
            )
    notes += count_texts(
        {
            "done by an interrupted run": summary.resumed,
            "named twice and taken once": summary.repeated,
            "skipped": len(summary.skipped),
        }
    )
    say(*summary.left_out, err=True)
    facts = {name: value for name, value in vars(summary).items() if name != "path"}
    took = f"{summary.seconds:.1f} s ({', '.join(notes)})"
    tell(path, as_json, f"Indexed {quantity(summary.count, 'item')} in {took}: {path}", **facts)


def _options(pairs: Sequence[str]) -> dict[str, Any]:
    """Return `--set m=48` as {"m": 48}; values that are not JSON are text."""
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


@verb(
    "add",
    "retrieval index add photos.index new/",
    "retrieval index add photos.index photos/ --sync",
    "retrieval index add photos.index items.parquet --keep copy",
)
@INDEX
@click.argument("images", nargs=-1, required=True, type=PATH)
@click.option("--sync", is_flag=True, help="Also delete the items that are not in IMAGES.")
@JSON
@embedding
@audited
def add_command(
    path: IndexPlace,
    images: tuple[Path, ...],
    sync: bool,
    as_json: bool,
    **settings: Any,
) -> int:
    """Embed IMAGES and add them to INDEX, skipping those that have not changed.

    INDEX can be searched meanwhile. About every second, items are written to the disk. To resume
    after an interruption or a kill, run the same command again.
    """
    with opened_index(path) as opened:
        added = opened.add(list(images), sync=sync, **settings)
    say(*added.left_out, err=True)
    names = ("changed", "unchanged", "removed", "repeated")
    counts = {name: getattr(added, name) for name in names} | {"skipped": len(added.skipped)}
    parts = [f"{added.added:,} added", *count_texts(counts)]
    tell(path, as_json, f"{path}: {', '.join(parts)} in {added.seconds:.1f} s.", **vars(added))
    return added.added + added.changed + added.removed


@verb(
    "delete",
    'retrieval index delete photos.index "dogs/7.jpg"',
    'retrieval index delete photos.index --filter "price > 100"',
)
@INDEX
@click.argument("ids", nargs=-1)
@FILTER
@JSON
@audited
def delete_command(
    path: IndexPlace, ids: tuple[str, ...], filter: str | None, as_json: bool
) -> int:
    """Delete items of INDEX by id, or all that match a filter."""
    if bool(ids) == (filter is not None):
        raise click.UsageError("Name what to delete: either ids or --filter FILTER.")
    with opened_index(path) as opened:
        count = opened.delete(ids, filter=filter)
    tell(path, as_json, f"{path}: {count:,} deleted.", deleted=count)
    return count


@verb("list", "retrieval index list photos.index --filter \"label = 'dogs'\" --limit 20")
@INDEX
@FILTER
@click.option("--after", metavar="ID", help="Start after this id.")
@click.option("--limit", default=100, type=click.IntRange(1, 10**9), help="Most items to list.")
@JSON
def list_command(
    path: IndexPlace, filter: str | None, after: str | None, limit: int, as_json: bool
) -> None:
    """List items of INDEX in the order of their ids."""
    with opened_index(path) as opened:
        items = opened.scan(filter, after=after, limit=limit)
        total = opened.count(filter)
    tell(
        path, as_json, *map(_line, items), count=total, items=[_item_facts(item) for item in items]
    )
    if len(items) < total and not as_json:
        say(f"{len(items):,} of {total:,} items.", err=True)


@verb(
    "show",
    "retrieval index show photos.index",
    'retrieval index show photos.index "dogs/7.jpg" --json',
)
@INDEX
@click.argument("id", required=False)
@JSON
def show_command(path: IndexPlace, id: str | None, as_json: bool) -> None:
    """Show a summary of INDEX, or one of its items."""
    with opened_index(path) as opened:
        content = _summary(opened.stats()) if id is None else _item(opened, id)
    tell(path, as_json, *map(one_line, _content_lines(content)), **content)


def _line(item: Item) -> str:
    if item.metadata:
        details = json.dumps(dict(item.metadata), ensure_ascii=False)
    else:
        details = ""
    return one_line(f"{item.id}  {item.label or ''}  {details}".rstrip())


def _content_lines(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a summary or item, without its vector's numbers."""
    for name, value in content.items():
        if name == "vector" and value is not None:
            yield f"vector: {len(value)} numbers"
        elif isinstance(value, list):
            yield f"{name}:"
            for row in value:
                parts = (f"{key} {_shown(part)}" for key, part in row.items() if part is not None)
                yield f"  {', '.join(parts)}"
        elif name != "bytes" or value is not None:  # a remote store may not know its size
            yield f"{name}: {_shown(value)}"


def _summary(stats: Stats) -> dict[str, Any]:
    generations = []
    for generation in stats.generations:
        facts = {
            name: getattr(generation, name) for name in ("number", "state", "bundle", "variant")
        }
        generations.append({**facts, "numbers": dict(generation.widths)})
    return {"items": stats.count, "bytes": stats.bytes, "generations": generations, **stats.details}


def _item(opened: Index, id: str) -> dict[str, Any]:
    item = opened.get(id, arrays=True).get(id)
    if item is None:
        raise StoreError(f"{opened.path} has no item '{id}'.")
    return _item_facts(item) | {"vector": item.vector.tolist() if item.arrays else None}


def _shown(value: Any) -> str:
    """Return a value as text: whole numbers with thousands separators, tables as JSON."""
    if value is None:
        return "none"
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def _item_facts(item: Item) -> dict[str, Any]:
    return {
        "id": item.id,
        "label": item.label,
        "metadata": dict(item.metadata),
        "path": None if item.path is None else address_of(item.path) or str(item.path),
        **{name: getattr(item, name) for name in ("keep", "bytes", "width", "height")},
    }


@verb("check", "retrieval index check photos.index")
@INDEX
@JSON
def check_command(path: IndexPlace, as_json: bool) -> None:
    """Check every file of INDEX against its checksum, and all parts against each other.

    INDEX is a folder.
    """
    from retrieval.index.integrity import check_index

    if not isinstance(path, Path):
        raise StoreError(
            f"Only an index in a folder can be checked. Copy {path} with 'retrieval index"
            " snapshot', and check the copy."
        )
    damaged, rebuilt = check_index(path)
    if not as_json:
        say(*rebuilt, err=True)
        if damaged:
            raise StoreError(
                listed(f"{path} is damaged", damaged)
                + "\nRestore it from a snapshot: retrieval index restore SNAPSHOT INDEX"
            )
    tell(path, as_json, f"{path} is whole.", damaged=damaged, rebuilt=rebuilt)
    if damaged:  # with --json, the damage was printed as facts
        raise SystemExit(2)


@verb("compact", "retrieval index compact photos.index")
@INDEX
@JSON
def compact_command(path: IndexPlace, as_json: bool) -> None:
    """Free the disk space of deleted items of INDEX, and build its search structure."""
    from retrieval.base.progress import Meter
    from retrieval.index.index import open_store

    store = open_store(path, _plugins())
    # The store alone: compacting runs no model, so the bundle need not load.
    with store, Meter("compacting", store.count(), "items") as meter:
        before = store.stats().bytes
        store.compact(lambda done, total: meter.reach(done, total, "compacting"))
        after = store.stats().bytes
    sentence = "compacted."
    if before is not None and after is not None:  # a remote store may not know its size
        sentence = f"{before / 1e6:,.1f} MB before, {after / 1e6:,.1f} MB now."
    tell(path, as_json, f"{path}: {sentence}", bytes_before=before, bytes=after)


@verb("words", "retrieval index words photos.index")
@INDEX
@JSON
def words_command(path: IndexPlace, as_json: bool) -> None:
    """Keep the words of the items of INDEX from now on, for searches by text.

    The words of an item are those of its label, and of the texts and numbers in its metadata.
    Searches and writes continue meanwhile. To resume after an interruption or a kill, run the same
    command again.
    """
    with opened_index(path) as opened:
        opened.keep_words()
        count = len(opened)
    tell(path, as_json, f"{path} keeps the words of its {count:,} items.", items=count)


def _reviewed(path: Path, identity: str) -> list[list[str]]:
    """Return the sets of ids in a file of the page that reviews duplicates."""
    from retrieval.base.strict_json import strict_loads

    try:
        if path.stat().st_size > _REVIEWED_BYTES:
            raise DataError(f"{path} has more than {_REVIEWED_BYTES:,} bytes: it is no such file.")
        content = strict_loads(path.read_bytes())
        sets: list[list[str]] = content["reviewed"]
        usable = all(isinstance(id, str) for ids in sets for id in ids)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, TypeError, KeyError):
        usable = False
    if not usable:
        raise DataError(f"{path} is damaged: download it from the page /duplicates again.")
    if content.get("identity") != identity:
        raise DataError(f"{path} is of another index.")
    return sets


@verb(
    "duplicates",
    "retrieval index duplicates photos.index --within 0.05",
    "retrieval index duplicates photos.index --within 0.05 --output groups.json",
)
@INDEX
@click.option(
    "--within", required=True, type=click.FloatRange(0), help="Largest distance, as in searches."
)
@FILTER
@click.option(
    "--reviewed",
    multiple=True,
    type=PATH,
    metavar="FILE",
    help="What was kept: reviewed.json of the server's page /duplicates; repeatable.",
)
@click.option(
    "--output", type=PATH, metavar="FILE", help="Also write the groups, for the page /duplicates."
)
@JSON
def duplicates_command(
    path: IndexPlace,
    within: float,
    filter: str | None,
    reviewed: tuple[Path, ...],
    output: Path | None,
    as_json: bool,
) -> None:
    """List groups of items of INDEX that are near the first item of their group."""
    from retrieval.base.files import write_json

    with opened_index(path) as opened:
        identity = opened.identity
        sets = [ids for file in reviewed for ids in _reviewed(file, identity)]
        groups = opened.duplicates(within, filter=filter, reviewed=sets)
    rows = [asdict(group) for group in groups]
    if output is not None:
        write_json(output, {"index": str(path), "identity": identity, "groups": rows}, DataError)
    lines = []
    for group in groups:
        ids = "  ".join(map(one_line, group.ids))
        about = f"{len(group.ids)} items within {group.radius:.4f} of the first"
        lines.append(f"{about}, diameter {group.diameter:.4f}: {ids}")
    tell(path, as_json, *lines, groups=rows)
    if as_json:
        return
    extra = sum(len(group.ids) - 1 for group in groups)
    count = quantity(len(groups), "group")
    say(f"{count}; {quantity(extra, 'item')} beyond the first of their group.", err=True)


def _targets(
    ctx: click.Context, param: click.Parameter, items: tuple[str, ...]
) -> dict[str, float]:
    """Return `--at-least recall@10=.95` as {"recall@10": 0.95}."""
    targets = {}
    for item in items:
        name, _, value = item.partition("=")
        try:
            targets[name] = float(value)
        except ValueError:
            raise click.BadParameter(
                f"'{item}' is not METRIC=VALUE, such as recall@10=.95."
            ) from None
        if not 0 <= targets[name] <= 1:
            raise click.BadParameter(f"'{item}': a metric is from 0 to 1.")
    return targets


TARGETS = options(
    click.option(
        "--at-least",
        multiple=True,
        callback=_targets,
        metavar="METRIC=VALUE",
        help="Exit with code 1 if the mean of a metric is smaller; repeatable.",
    ),
    click.option(
        "--skip-missing",
        is_flag=True,
        help="Leave out ids of golden queries that INDEX lacks, such as those of deleted items.",
    ),
)
"""Adds the options of commands that measure golden queries."""


@verb(
    "evaluate",
    "retrieval index evaluate photos.index golden.jsonl --at-least recall@10=.95",
    "retrieval index evaluate photos.index golden.jsonl --metric recall@1 --output scores.jsonl",
    "retrieval index evaluate --qrels judged.qrels --run other.run",
)
@click.argument("path", metavar="INDEX", required=False, type=IndexArgument())
@click.argument("golden", metavar="GOLDEN", required=False, type=PATH)
@plugin_option(callback=_keep_plugins, expose_value=False)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    help="recall@K, precision@K, ndcg@K, mrr, map or exact; repeatable. By default all, with K 10.",
)
@TARGETS
@click.option(
    "--qrels",
    type=PATH,
    metavar="FILE",
    help="Instead of GOLDEN: judgements of queries by the id of an item, in TREC's format.",
)
@click.option(
    "--run", type=PATH, metavar="FILE", help="Measure these hits, in TREC's format; search nothing."
)
@click.option("--run-out", type=PATH, metavar="FILE", help="Write the hits in TREC's format.")
@click.option(
    "--output", type=PATH, metavar="FILE", help="Write a JSON line per query: what it misses."
)
@JSON
@DEVICE
def golden_command(
    path: IndexPlace | None,
    golden: Path | None,
    metrics: tuple[str, ...],
    at_least: dict[str, float],
    skip_missing: bool,
    qrels: Path | None,
    run: Path | None,
    run_out: Path | None,
    output: Path | None,
    as_json: bool,
    device: Any,
) -> None:
    """Measure how well INDEX finds the right items of the queries in GOLDEN.

    A line of GOLDEN is {"query": "shoe.png", "relevant": ["id", …]}; instead of "query", an image
    beside GOLDEN, it may have the "id" of an item or a "vector", and "relevant" may be {"id":
    grade}.
    """
    from retrieval.base.files import write_text
    from retrieval.base.trec import read_run
    from retrieval.index.golden import DEFAULT_METRICS, evaluate_trec_run, read_judged

    has_index = path is not None and (golden is None) != (qrels is None) and run is None
    if not has_index and (path or golden or not (qrels and run)):
        raise click.UsageError("Name INDEX and either GOLDEN or --qrels; or --qrels and --run.")
    names = list(dict.fromkeys((*(metrics or DEFAULT_METRICS), *at_least)))
    judged: Any = golden if qrels is None else read_judged(qrels)
    if path is None:
        assert run is not None
        report = evaluate_trec_run(judged, read_run(run), names)
    else:
        with opened_index(path, device) as opened:
            report = opened.evaluate(judged, names, skip_missing=skip_missing)
    if output is not None:
        rows = (
            {"query": score.query, **score.values, "missed": score.missed}
            for score in report.queries
        )
        write_text(output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    if run_out is not None:
        write_text(run_out, report.run_text())
    facts = {"queries": len(report.queries), "missing": report.missing, "values": report.values}
    if as_json:
        say_json({"index": path and str(path), **facts})
    else:
        say(repr(report))
    report.require(at_least)


@verb(
    "migrate",
    "retrieval index migrate photos.index better.bundle",
    "retrieval index migrate photos.index better.bundle --golden golden.jsonl --at-least"
    " recall@10=.95",
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
    help="Delete the generations that are not served. Without BUNDLE, do nothing else.",
)
@click.option(
    "--golden",
    type=PATH,
    metavar="FILE",
    help="Measure these queries before the switch; see 'retrieval index evaluate'.",
)
@TARGETS
@JSON
@audited
def migrate_command(
    path: IndexPlace,
    bundle: Path | None,
    drop_old: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Embed the items of INDEX with another BUNDLE, then serve the new vectors.

    If the index was created with --keep-features and only the head differs, or if BUNDLE is an
    adapter over the bundle that is served, this needs no originals and takes seconds.

    Searches use the old vectors until the new ones are complete; the two never mix. The old vectors
    are kept as an older generation for 'retrieval index rollback', until --drop-old deletes it. To
    resume after an interruption or a kill, run the same command again.
    """
    if bundle is None and not drop_old:
        raise click.UsageError("Name the bundle to migrate to.")
    if settings["golden"] is None:
        refuse_options("without --golden", {"at_least", "skip_missing"})
    facts: dict[str, Any] = {}
    sentences = []
    with opened_index(path) as opened:
        if bundle is not None:
            migrated = opened.migrate(bundle, **settings)
            facts = _report_migration(migrated)
            by_head = ""
            if migrated.from_features:
                by_head = f", {migrated.from_features:,} from kept features"
            elif migrated.from_vectors:
                by_head = f", {migrated.from_vectors:,} from stored vectors"
            sentences.append(
                f"{path}: {quantity(migrated.embedded, 'item')} embedded{by_head}; generation"
                f" {migrated.generation.number} is served."
            )
            if migrated.golden is not None:
                sentences.append(repr(migrated.golden))
        if drop_old:
            facts["dropped"] = opened.drop_old()
            sentences.append(f"{path}: {quantity(facts['dropped'], 'older generation')} deleted.")
    tell(path, as_json, *sentences, **facts)


@verb("rollback", "retrieval index rollback photos.index")
@INDEX
@JSON
@audited
def rollback_command(path: IndexPlace, as_json: bool) -> None:
    """Undo the last migration of INDEX: serve the previous vectors again.

    Items that were added since are first embedded with the previous bundle.
    """
    with opened_index(path) as opened:
        migrated = opened.rollback()
    number = migrated.generation.number
    count = migrated.embedded
    sentence = f"generation {number} is served again; {count:,} items were embedded for it."
    tell(path, as_json, f"{path}: {sentence}", **_report_migration(migrated))


def _report_migration(migrated: Migrated) -> dict[str, Any]:
    """Say which items a migration skipped, and return its facts."""
    say(*(f"skipped: {fault}" for fault in migrated.skipped), err=True)
    facts = vars(migrated) | {"generation": migrated.generation.number}
    report = facts.pop("golden")
    if report is not None:
        facts["golden"] = report.values
    return facts


@verb("snapshot", "retrieval index snapshot photos.index monday.index")
@INDEX
@click.argument("target", type=PATH)
@JSON
@audited
def snapshot_command(path: IndexPlace, target: Path, as_json: bool) -> None:
    """Copy a consistent state of INDEX to the new folder TARGET, which is an index itself.

    Searches and writes continue meanwhile.
    """
    with opened_index(path) as opened:
        opened.snapshot(target)
    tell(path, as_json, f"Wrote {target}", snapshot=str(target))


@verb("restore", "retrieval index restore monday.index photos.index")
@click.argument("source", metavar="SNAPSHOT", type=PATH)
@INDEX
@JSON
@audited
def restore_command(source: Path, path: IndexPlace, as_json: bool) -> None:
    """Check SNAPSHOT and copy it to INDEX, a new folder or an address without an index."""
    from retrieval.index.integrity import restore_snapshot

    facts: dict[str, Any] = {"snapshot": str(source)}
    if notes := restore_snapshot(source, path, plugins=_plugins()):
        facts["left_behind"] = notes
    say(*notes, err=True)
    tell(path, as_json, f"Restored {path}", **facts)
