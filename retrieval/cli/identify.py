"""`retrieval calibrate` and `retrieval identify`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrieval.base.display_tables import text_table
from retrieval.cli import say
from retrieval.cli.audit import audited
from retrieval.cli.common import DEVICE, JSON, PATH, Number, command
from retrieval.cli.index import INDEX, opened_index, tell
from retrieval.cli.search import as_facts, require_calibration
from retrieval.errors import one_line

if TYPE_CHECKING:
    from retrieval.store.address import IndexPlace

_RATES = (0.001, 0.01, 0.05, 0.1, 0.2)


@command(
    "calibrate",
    "retrieval calibrate photos.index",
    "retrieval calibrate photos.index --label person --distinct event",
)
@INDEX
@click.option(
    "--label", metavar="FIELD", help="Metadata field of an item's class; by default its label."
)
@click.option(
    "--distinct",
    metavar="FIELD",
    help="Metadata field that items of one burst or event share: these are not compared.",
)
@click.option("--draws", default=11, type=click.IntRange(1), help="Draws of classes; odd.")
@click.option("--seed", default=0, type=click.IntRange(0), help="Seed of the draws.")
@JSON
@audited
def calibrate_command(path: IndexPlace, as_json: bool, **settings: Any) -> None:
    """Measure how near strangers come to INDEX, so that 'retrieval identify' can say "unknown".

    Each class of the index stands for a stranger to all others. Run it again after many items were
    added or deleted.
    """
    with opened_index(path) as opened:
        calibration = opened.calibrate(**settings)
    rows = []
    lines = [
        f"{path}: calibrated on {calibration.classes:,} classes of {calibration.items:,} items; the"
        f" smallest rate of false alarms is {calibration.least_rate:.2g}."
    ]
    for rate in sorted({calibration.least_rate, *_RATES}):
        if rate >= calibration.least_rate:
            shares = calibration.known(rate)
            rows.append({"far": rate, **shares._asdict()})
            lines.append(
                f"At {rate:.2g}, {shares.unknown:.1%} of known photos are called unknown, and"
                f" {shares.wrong:.1%} get a wrong label."
            )
    names = ("classes", "items", "least_rate", "created")
    facts = {name: getattr(calibration, name) for name in names}
    tell(path, as_json, *lines, **facts, **settings, rates=rows)


@command(
    "identify",
    "retrieval identify photos.index query.png",
    "retrieval identify photos.index front.jpg side.jpg --far 0.001 --json",
)
@INDEX
@click.argument("queries", nargs=-1, required=True, type=PATH)
@click.option(
    "--far", default=0.01, type=Number(0, 1), help="Accepted share of strangers that get a label."
)
@JSON
@DEVICE
def identify_command(
    path: IndexPlace, queries: tuple[Path, ...], far: float, as_json: bool, device: Any
) -> None:
    """Say what QUERIES, photos of one thing, show: a class of INDEX, or unknown.

    First run 'retrieval calibrate INDEX', which measures how near strangers come.
    """
    from retrieval.index.queries_and_hits import encode_files

    with opened_index(path, device=device) as opened:
        require_calibration(opened)
        _, encoded = encode_files(opened.bundle, queries)
        verdict = opened.identify(encoded, far)
    if verdict.stale:
        say(
            "Note: over 10 % of the items were added or deleted since the calibration. Run: "
            + shlex.join(["retrieval", "calibrate", str(path)]),
            err=True,
        )
    line = f"{one_line(verdict.label or 'unknown')}: {verdict.rate:.2g} of strangers are as near"
    if verdict.second is not None:
        line += f"; {one_line(verdict.second)} is also nearer than strangers are"
    facts = {**vars(verdict), "hits": list(map(as_facts, verdict.hits))}
    tell(path, as_json, f"{line}.", text_table(verdict.hits), **facts)
