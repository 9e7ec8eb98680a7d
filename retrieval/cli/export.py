"""`retrieval export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from retrieval.cli import say
from retrieval.cli.plugins import TRUST_OPTION
from retrieval.cli.types import Choice, Number


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), help="Folder to write; by default RUN/bundle."
)
@click.option(
    "--variant",
    "variants",
    multiple=True,
    type=Choice(["fp16", "int8"]),
    help="Also the encoder in this precision, with its measured drift; repeatable.",
)
@click.option(
    "--allow-drift",
    is_flag=True,
    help="Write a variant even if its vectors' cosine to the encoder's is below 0.99 on average or 0.9 at worst.",
)
@click.option(
    "--tolerance",
    default=1e-4,
    show_default=True,
    type=Number(0, min_open=True),
    help="Largest difference between torch and ONNX Runtime, on vectors of length 1.",
)
@click.option("--opset", default=18, show_default=True, type=int, help="Version of ONNX's operators.")
@click.option(
    "--exporter",
    default="auto",
    show_default=True,
    type=Choice(["auto", "dynamo", "torchscript"]),
    help="torch's exporter: the present one, the older one, or the first that works.",
)
@click.option("--replace", is_flag=True, help="Put the new bundle in the place of an older one.")
@TRUST_OPTION
def export_command(
    run: Path,
    output: Path | None,
    variants: tuple[Any, ...],
    allow_drift: bool,
    tolerance: float,
    opset: int,
    exporter: Any,
    replace: bool,
) -> None:
    """Turn a run's best weights into a bundle that needs no torch: ONNX graphs, compared with torch, and a manifest.

    Example:  retrieval export runs/digits --output digits.bundle --variant int8
    """
    from retrieval.serving.runtime import quiet_threads

    quiet_threads()
    from retrieval.data.kept import KeptInputs
    from retrieval.export.export_run import export_run
    from retrieval.run.open import load_run

    loaded = load_run(run, or_kept=True)
    if isinstance(loaded.dataset, KeptInputs):
        say(f"note: {loaded.splits.notes[0]}")
        say("note: The bundle is verified on the held-out inputs that the run keeps.")
    bundle = export_run(
        loaded,
        output,
        variants=variants,
        allow_drift=allow_drift,
        tolerance=tolerance,
        opset=opset,
        exporter=exporter,
        replace=replace,
    )
    manifest = bundle.manifest
    size = sum(record.bytes for record in manifest.files.values()) / 1e6
    seen = manifest.verified
    say(
        f"Wrote {bundle.path} ({size:.1f} MB). torch and ONNX Runtime differ by {seen.largest_difference:.1g} at most "
        f"on {seen.items:,} held-out items (tolerance {seen.tolerance:g})."
    )
    for name, variant in manifest.variants.items():
        recall = variant.recall_at_1
        change = "" if recall is None else f"; Recall@1 {recall.before:.3f} → {recall.after:.3f}"
        say(
            f"{name}: {manifest.files[variant.file].bytes / 1e6:.1f} MB, cosine to the encoder's vectors "
            f"{variant.cosine.mean:.4f} on average, {variant.cosine.min:.4f} at worst{change}."
        )
