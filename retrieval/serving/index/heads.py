"""Heads for features that an index keeps: whose features they are, and a head put behind their backbone."""

from __future__ import annotations

from pathlib import Path

from retrieval.errors import BundleError
from retrieval.serving.bundle import Bundle
from retrieval.serving.manifest import SplitEntry, write_manifest

_BACKBONE, _HEAD, _RESCORER = "backbone.onnx", "head.onnx", "rescorer.onnx"


def features_of(bundle: Bundle) -> int:
    """Return F, how many features of an item an index keeps under a bundle.

    Raises:
        BundleError: there are none to be had.
    """
    said = bundle.manifest
    if said.input.kind == "features":
        return said.input.shape[0]
    if bundle.backbone_sha256 is None or said.split is None:
        why = f"runs its variant '{bundle.variant}'" if said.split else "has an encoder of one graph"
        advice = (
            "Leave the variant out."
            if said.split
            else "Export it with its backbone apart: retrieval export … --split"
        )
        raise BundleError(f"The bundle {bundle.path} {why}, so there are no features to keep. {advice}")
    return said.split.features


def gives_features(bundle: Bundle) -> bool:
    """Return whether an index can keep features under a bundle."""
    return bundle.manifest.input.kind == "features" or bundle.backbone_sha256 is not None


def applies(head: Bundle, kept: Bundle) -> bool:
    """Return whether a bundle's head may be applied to features that were kept under another: their backbone is one, or both take features."""
    if kept.manifest.input.kind == "features":
        return head.manifest.input == kept.manifest.input
    return head.backbone_sha256 is not None and head.backbone_sha256 == kept.backbone_sha256


def behind(backbone: Bundle, head: Bundle, folder: Path) -> Path:
    """Write a bundle that is the backbone of one and, as its head, a bundle of features as a whole; return its folder.

    What it is depends on the two alone: the same two give the same bundle. Its manifest is the head's but for the input and the split;
    `verified` is the head's comparison with torch.

    Args:
        backbone: split, of images.
        head: takes as many features as the backbone gives.
        folder: an empty one.

    Raises:
        BundleError: the widths differ, or a bundle was changed since it was opened.
    """
    split, said = backbone.manifest.split, head.manifest
    width = features_of(backbone)
    assert split is not None
    if said.input.shape != (width,):
        raise BundleError(
            f"The bundle {head.path} takes {said.input.shape[0]:,} features, and the index keeps {width:,} of each item: its head is not for them."
        )
    backbone.copy(folder / "backbone")
    head.copy(folder / "head")
    target = folder / "bundle"
    target.mkdir()
    (folder / "backbone" / split.backbone).rename(target / _BACKBONE)
    encoder = said.variants[head.variant].file if head.variant else said.encoder
    assert encoder is not None  # a split is of images
    (folder / "head" / encoder).rename(target / _HEAD)
    rescorer = said.rescorer
    if rescorer is not None:
        (folder / "head" / rescorer.file).rename(target / _RESCORER)
        rescorer = rescorer.model_copy(update={"file": _RESCORER})
    write_manifest(
        target,
        said.model_copy(
            update={
                "input": backbone.manifest.input,
                "encoder": None,
                "split": SplitEntry(backbone=_BACKBONE, head=_HEAD, features=width),
                "rescorer": rescorer,
                "opset": max(said.opset, backbone.manifest.opset),
                "variants": {},
                "probe": None,
            }
        ),
    )
    return target
