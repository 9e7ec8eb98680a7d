"""`retrieval export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrieval.cli import say
from retrieval.cli.common import PATH, Choice, Number, backbone_parameters, refuse_options
from retrieval.cli.plugins import ALLOW_OPTION, PLUGIN_OPTION

if TYPE_CHECKING:
    from retrieval.bundle.bundle import Bundle

OF_BACKBONES = {"overrides", "whiten", "photos", "random_weights", "extra"}
"""Options that go with `--model`."""


@click.command("export")
@click.argument("run", type=PATH, required=False)
@click.option(
    "--model", metavar="NAME", help="Instead of a run: the name of a pretrained backbone."
)
@click.option("--output", "-o", type=PATH, help="Folder to write; by default RUN/bundle.")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="With --model: a parameter of the backbone, such as size=160; repeatable.",
)
@click.option(
    "--whiten",
    multiple=True,
    type=PATH,
    metavar="PHOTOS",
    help="With --model: fit PCA whitening on this photo or folder of photos, which need no labels;"
    " repeatable.",
)
@click.option(
    "--dimensions",
    type=click.IntRange(1),
    help="Dimension of the vectors. A run's vectors are cut to this many numbers, which suits"
    " runs trained with core.matryoshka; by default they stay whole. Whitened vectors have 128 by"
    " default, or the backbone's number of features if that is smaller.",
)
@click.option(
    "--photos",
    multiple=True,
    type=PATH,
    metavar="PHOTOS",
    help="With --model: photos to verify the bundle and to calibrate int8; repeatable. By default"
    " those of --whiten.",
)
@click.option(
    "--random-weights", is_flag=True, help="With --model: allow random weights, as a baseline."
)
@click.option(
    "--variant",
    "variants",
    multiple=True,
    type=Choice(["fp16", "int8"]),
    help="Also write the encoder in this precision, and report how far its vectors differ;"
    " repeatable.",
)
@click.option(
    "--split",
    is_flag=True,
    help="Write the encoder as two graphs, backbone and head. An index that keeps the backbone's"
    " features can then change heads in seconds.",
)
@click.option(
    "--allow-drift",
    is_flag=True,
    help="Write a variant even if the cosine of its vectors to the encoder's is below 0.99 on"
    " average or 0.9 at worst.",
)
@click.option(
    "--tolerance",
    default=1e-4,
    type=Number(0, min_open=True),
    help="Largest difference to allow between torch and ONNX Runtime, on vectors of length 1.",
)
@click.option("--replace", is_flag=True, help="Replace an existing bundle.")
@PLUGIN_OPTION
@ALLOW_OPTION
def export_command(
    run: Path | None,
    model: str | None,
    output: Path | None,
    overrides: tuple[str, ...],
    whiten: tuple[Path, ...],
    photos: tuple[Path, ...],
    random_weights: bool,
    extra: tuple[str, ...],
    **options: Any,
) -> None:
    """Export a run's best weights, or a pretrained backbone, as a bundle, which runs without torch.

    A bundle is a manifest and ONNX graphs. The command checks that the graphs agree with torch.

    \b
    Example:  retrieval export runs/digits --output digits.bundle --variant int8
    Without labels or training:
        retrieval export --model core.efficientnet_lite0 --whiten photos --output photos.bundle
    """
    if (run is None) == (model is None):
        raise click.UsageError("Name either a run or, with --model, a backbone.")
    if run is not None:
        refuse_options("without --model", OF_BACKBONES)
        from retrieval.data.stored_inputs import StoredInputs
        from retrieval.export import export_run
        from retrieval.run.open import Run

        loaded = Run.open(run, or_kept=True)
        if isinstance(loaded.dataset, StoredInputs):
            say(f"note: {loaded.splits.notes[0]}")
            say("note: The bundle is verified on the held-out inputs that the run keeps.")
        bundle = export_run.export(loaded, output, **options).bundle
        _report(bundle, "held-out items")
        return
    if output is None:
        raise click.UsageError("--model needs --output, the folder to write.")
    from retrieval.export.export_backbone import BackboneEncoder

    backbone = BackboneEncoder(str(model), backbone_parameters(overrides), extra, random_weights)
    bundle = backbone.export(output, whiten=whiten, photos=photos, **options).bundle
    _report(bundle, "photos" if whiten or photos else "crops of two example photographs")


def _report(bundle: Bundle, inputs: str) -> None:
    """Print sizes, and how far ONNX Runtime differs from torch and each variant from the encoder.

    `inputs` names the items on which torch and ONNX Runtime were compared.
    """
    manifest = bundle.manifest
    size = sum(record.bytes for record in manifest.files.values()) / 1e6
    verified = manifest.verified
    say(
        f"Wrote {bundle.path} ({size:.1f} MB). torch and ONNX Runtime differ by"
        f" {verified.largest_difference:.1g} at most on {verified.items:,} {inputs} (tolerance"
        f" {verified.tolerance:g})."
    )
    for name, variant in manifest.variants.items():
        recall = variant.recall_at_1
        if recall is None:
            change = ""
        else:
            change = f"; Recall@1 {recall.before:.3f} → {recall.after:.3f}"
        say(
            f"{name}: {manifest.files[variant.file].bytes / 1e6:.1f} MB, cosine to the encoder's"
            f" vectors {variant.cosine.mean:.4f} on average, {variant.cosine.min:.4f} at"
            f" worst{change}."
        )
