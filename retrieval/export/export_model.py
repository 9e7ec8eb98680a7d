"""Export a model as a bundle: ONNX graphs, compared with torch, and a manifest."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from retrieval.errors import BundleError
from retrieval.export.variants import VariantName, check_drift, make_variant, measure
from retrieval.export.verify import (
    Floats,
    Graphs,
    candidate_overlap,
    checked_items,
    input_of,
    is_normalized,
    onnx_outputs,
)
from retrieval.host import files
from retrieval.model.contracts import Combiner
from retrieval.model.graph import OPSET, TOLERANCE, check_size, ready, session
from retrieval.model.model import Model
from retrieval.serving.bundle import Bundle
from retrieval.serving.files.locks import hold
from retrieval.serving.files.strict_json import problems_of
from retrieval.serving.manifest import (
    FILE,
    DistanceEntry,
    Manifest,
    RescorerEntry,
    SplitEntry,
    SubspaceEntry,
    Variant,
    Verified,
    write_manifest,
)
from retrieval.serving.probe import WIDEST, probe_of


@contextlib.contextmanager
def whole_folder(output: Path, *, replace: bool) -> Iterator[Path]:
    """Context manager that yields a hidden folder and renames it to `output` at the end.

    On an error the hidden folder is removed. A process that is killed leaves it behind as
    `.NAME.XXXXXXXX.part`, which can be deleted.

    Raises:
        BundleError: `output` exists and may not be replaced, another process is exporting to it, or
            the disk is full or refuses.
    """
    output = Path(os.path.realpath(output))
    refuse_existing(output, replace)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with hold(output, "exporting this bundle", BundleError):
            refuse_existing(output, replace)  # again: the last holder of the lock may have made it
            with files.whole_folder(
                output, replace=replace, exists_error=_exists_already(output)
            ) as temporary:
                yield temporary
                # again: a program without our lock may have made it
                refuse_existing(output, replace)
    except OSError as fault:
        raise BundleError(
            f"The bundle {output} cannot be written: {fault.strerror or fault}. Nothing was left"
            " behind."
        ) from fault


def refuse_existing(output: Path, replace: bool) -> None:
    """Refuse an existing `output`, unless it is an empty folder or a bundle to replace.

    Raises:
        BundleError: `output` exists.
    """
    if not output.exists():
        return
    if not output.is_dir():
        raise BundleError(f"{output} is a file, and a bundle is a folder. Choose another output.")
    if not any(output.iterdir()):
        return
    if not (output / FILE).is_file():
        raise BundleError(f"{output} exists and is not a bundle: name another output.")
    if not replace:
        raise _exists_already(output)


def _exists_already(output: Path) -> BundleError:
    return BundleError(
        f"The bundle {output} exists. Say replace (--replace, in Python replace=True), or name"
        " another output."
    )


_VARIANTS = ("fp16", "int8")


def export_model(
    model: Model,
    items: NDArray[Any],
    output: Path,
    *,
    name: str,
    labels: NDArray[Any] | None = None,
    calibration: NDArray[Any] | None = None,
    codes: Tensor | None = None,
    variants: Sequence[VariantName] = (),
    split: bool = False,
    allow_drift: bool = False,
    tolerance: float = TOLERANCE,
    evaluation: Mapping[str, float] | None = None,
    replace: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Manifest:
    """Write a bundle, and return its manifest.

    The graphs of encoder and rescorer run in ONNX Runtime on one item, an odd number of items, and
    batches of all items. The largest absolute difference from torch must not exceed `tolerance`. It
    is divided by the mean length of the vectors, so that 1e-4 means 1e-4 for unit vectors, or by
    the mean distance. If a combiner declares itself `exact`, the order of its distances is checked.
    The model is exported in evaluation mode on the CPU; the object itself does not change.

    Args:
        model: backbone, head and combiner.
        items: raw inputs that were not used in training: uint8 (N, C, H, W) from the backbone's
            preprocessing, or float (N, F).
        output: the folder to create; it appears once it is complete.
        name: the model's name in the manifest.
        labels: (N,), one label per item, for Recall@1 of the variants.
        calibration: raw inputs from the training side, required for "int8".
        codes: (N, C), codes of more real items, which decide the number of candidates; by default
            the codes of `items`.
        evaluation: metrics for the manifest.
        progress: called with each step's name, its number from 0, and the number of steps.
        variants, split, allow_drift, tolerance, replace: see `Run.export`.

    Raises:
        BundleError: `output` exists, the items do not fit the model, torch cannot export it, the
            graph disagrees with torch (the message has the largest difference, its place and the
            likely cause), a variant cannot be made, or the disk refuses. Nothing is left behind.
        MissingDependency: ONNX Runtime is not installed.
    """
    items, calibration = _checked(model, items, calibration, labels, variants, split)
    exact = model.combiner is None or model.combiner.exact
    single = not split or bool(variants)
    step = _counted(progress, 1 + single + 2 * split + (not exact) + len(set(variants)))
    with ready(model), whole_folder(Path(output), replace=replace) as folder:
        export = Graphs(model, items, tolerance, step)
        export.check()
        halves = _write_split(folder, export) if split else None
        largest = export.worst.value
        encoder = export.encoder() if single else b""
        if not split:
            (folder / "encoder.onnx").write_bytes(encoder)
            largest = export.worst.value
        rescore, entry = None, None
        if model.combiner is not None and not exact:
            rescore, entry = _write_rescorer(folder, export, model.combiner, codes)
            largest = max(largest, export.worst.value)
        written: dict[str, Variant] = {}
        for variant in dict.fromkeys(variants):
            step(f"making the {variant} variant")
            content, graphs = make_variant(variant, encoder, calibration, folder)
            written[variant] = _measured(
                export, variant, (encoder, content, *graphs), labels, rescore
            )
            if not allow_drift:
                check_drift(variant, written[variant])
            (folder / written[variant].file).write_bytes(content)
        step("opening the bundle")
        return _seal(
            folder,
            {
                "name": name,
                "opset": OPSET,
                **_description(model, items, export.outputs),
                "encoder": None if split else "encoder.onnx",
                "split": halves,
                "rescorer": entry,
                "variants": written,
                "verified": Verified(
                    tolerance=tolerance, largest_difference=largest, items=len(items)
                ),
                "evaluation": evaluation,
            },
            items,
        )


def _checked(
    model: Model,
    items: NDArray[Any],
    calibration: NDArray[Any] | None,
    labels: NDArray[Any] | None,
    variants: Sequence[VariantName],
    split: bool,
) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Return items and calibration items in the form that the model takes.

    Raises:
        BundleError: the items do not fit the model, the labels or the variants, or the model cannot
            be split.
    """
    for variant in variants:
        if variant not in _VARIANTS:
            raise BundleError(
                f"There is no variant '{variant}'; there are {' and '.join(_VARIANTS)}."
            )
    items = checked_items(model, items, "items")
    if calibration is not None:
        calibration = checked_items(model, calibration, "calibration items")
    if "int8" in variants and calibration is None:
        raise BundleError(
            "The int8 variant cannot be made: it needs calibration items, from the training side."
        )
    if labels is not None and len(labels) != len(items):
        raise BundleError(f"There are {len(labels)} labels for {len(items)} items.")
    if split and model.preprocessing is None:
        raise BundleError(
            "A model of features has no backbone to be split off: its bundle is a head as it is."
        )
    check_size(model)
    return items, calibration


def _measured(
    export: Graphs,
    variant: VariantName,
    graphs: Sequence[bytes],
    labels: NDArray[Any] | None,
    rescore: Callable[[Floats, Floats], Floats] | None,
) -> Variant:
    """Return the manifest's entry for a variant."""
    names = list(export.outputs)
    before, *afters = (onnx_outputs(session(graph).run, names, export.items) for graph in graphs)
    combiner = export.combiner
    subspaces = () if combiner is None else combiner.subspaces
    merge = "min" if combiner is None else combiner.merge
    return measure(f"encoder_{variant}.onnx", before, afters, labels, rescore, subspaces, merge)


def _counted(progress: Callable[[str, int, int], None] | None, total: int) -> Callable[[str], None]:
    """Return a function that calls `progress` with each step and its number."""
    number = itertools.count()

    def step(what: str) -> None:
        if progress is not None:
            progress(what, next(number), total)

    return step


def _write_split(folder: Path, export: Graphs) -> SplitEntry:
    """Write the graphs of backbone and head, and return their manifest entry."""
    backbone, head, features = export.split()
    entry = SplitEntry(backbone="backbone.onnx", head="head.onnx", features=features)
    (folder / entry.backbone).write_bytes(backbone)
    (folder / entry.head).write_bytes(head)
    return entry


def _write_rescorer(
    folder: Path, export: Graphs, combiner: Combiner, codes: Tensor | None
) -> tuple[Callable[[Floats, Floats], Floats], RescorerEntry]:
    """Write the rescorer's graph, and return a function that runs it and its manifest entry."""
    graph, rescore = export.rescorer(combiner)
    (folder / "rescorer.onnx").write_bytes(graph)
    known = torch.from_numpy(export.outputs["code"]) if codes is None else codes
    entry = RescorerEntry(
        file="rescorer.onnx",
        candidates=combiner.choose_candidates(known),
        overlap=candidate_overlap(combiner, known),
        items=len(known),
    )
    return rescore, entry


def _description(
    model: Model, items: NDArray[Any], outputs: Mapping[str, Floats]
) -> dict[str, Any]:
    """Return the manifest's entries for a model's input, outputs and distance."""
    combiner, code = model.combiner, outputs.get("code")
    distance = DistanceEntry(name="Euclidean", exact=True, measure="euclidean")
    if combiner is not None:
        distance = DistanceEntry(
            name=type(combiner).__name__, exact=combiner.exact, measure=combiner.measure
        )
    return {
        "input": input_of(model, items),
        "vector": outputs["vector"].shape[1],
        "code": None if code is None else code.shape[1],
        "query_vectors": "query" in outputs,
        "normalized": is_normalized(outputs["vector"]),
        "distance": distance,
        "subspaces": tuple(
            SubspaceEntry(name=s.name, start=s.start, stop=s.stop, weight=s.weight)
            for s in (combiner.subspaces if combiner is not None else ())
        ),
        "merge": combiner.merge if combiner is not None else "min",
    }


def _seal(folder: Path, content: Mapping[str, Any], items: NDArray[Any]) -> Manifest:
    """Write the manifest of a bundle, and check it by opening the bundle.

    Raises:
        BundleError: the manifest or the bundle is not valid.
    """
    try:
        manifest = Manifest(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=bundle_versions(),
            **content,
        )
    except ValidationError as fault:
        raise BundleError(
            f"The bundle's manifest cannot be written:\n{problems_of(fault)}"
        ) from None
    manifest = write_manifest(folder, manifest)
    opened: dict[str | None, Bundle] = {
        variant: Bundle.open(folder, variant=variant, threads=1, device="cpu")
        for variant in (None, *manifest.variants)
    }
    if manifest.vector > WIDEST:
        return manifest
    probed = manifest.model_copy(
        update={"probe": probe_of(opened, (float(items.mean()), float(items.std())))}
    )
    return write_manifest(folder, probed)


def bundle_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that make a bundle."""
    packages = (
        "embedding-retrieval",
        "torch",
        "onnx",
        "onnxscript",
        "onnxruntime",
        "onnxruntime-gpu",
        "numpy",
    )
    versions = {"python": platform.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
