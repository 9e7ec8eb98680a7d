"""Model → bundle: ONNX graphs and a manifest, compared with torch on real items before the folder appears."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from retrieval.errors import BundleError
from retrieval.export.checks import candidate_overlap, check_widths, checked_items, input_of, is_normalized
from retrieval.export.graph import (
    OPSET,
    Encoder,
    Exporter,
    Rescorer,
    Signature,
    check_size,
    ready,
    session,
    to_onnx,
)
from retrieval.export.output import refuse_existing, whole_folder
from retrieval.export.variants import (
    VariantName,
    check_drift,
    make_variant,
    measure,
)
from retrieval.export.verify import (
    Difference,
    Floats,
    check_order,
    check_repeatable,
    compare_encoder,
    compare_rescorer,
    likely_cause,
    onnx_outputs,
    torch_outputs,
)
from retrieval.model.contracts import Combiner
from retrieval.model.model import Model
from retrieval.serving.bundle import Bundle
from retrieval.serving.files.strict_json import problems_of
from retrieval.serving.manifest import (
    DistanceEntry,
    Manifest,
    RescorerEntry,
    SubspaceEntry,
    Verified,
    write_manifest,
)

TOLERANCE = 1e-4
"""Largest difference between torch and ONNX Runtime that a bundle may have, on vectors of length 1."""

Told = Callable[[str, int, int], None]
"""Called before each step with what it does, its number from 0, and how many there are."""

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
    allow_drift: bool = False,
    tolerance: float = TOLERANCE,
    evaluation: Mapping[str, float] | None = None,
    opset: int = OPSET,
    exporter: Literal["auto"] | Exporter = "auto",
    replace: bool = False,
    progress: Told | None = None,
) -> Manifest:
    """Write a bundle, and return its manifest.

    The graph is run in ONNX Runtime on the items, one alone, an odd number and all in batches, and so is the rescorer.
    The largest absolute difference from torch, divided by the mean length of the vectors (so 1e-4 means 1e-4 on unit
    vectors), must be within `tolerance`; distances are divided by the mean distance. A combiner that says `exact` is held to it. The model
    is exported in evaluation mode on the CPU, and is left as it was.

    Args:
        model: backbone, head and combiner.
        items: real raw inputs, not used in training: uint8 (N, C, H, W) from the backbone's preprocessing, or float (N, F).
        output: folder to make; it appears once it is complete.
        name: what the manifest calls the model.
        labels: one label per item (N,), for Recall@1 of the variants.
        calibration: raw inputs from the training side, needed by "int8".
        codes: codes (N, C) of more real items, by which the number of candidates is chosen and their overlap with the exhaustive
            ranking measured; by default those of `items`. Of no use with an `exact` combiner.
        variants: further precisions of the encoder: "fp16", "int8".
        allow_drift: write a variant even if its vectors are further from the encoder's than `variants.DRIFT`.
        tolerance: see above.
        evaluation: figures for the manifest.
        opset: version of ONNX's operators.
        exporter: "auto" takes torch's present exporter ("dynamo"), and the older one ("torchscript") where that fails.
        replace: whether a bundle at `output` may be replaced.
        progress: told of each step.

    Raises:
        BundleError: something is in the way, the items don't fit, torch cannot export the model, the graph disagrees with
            torch (with the largest difference, where, and the likely cause), a variant cannot be made, or the disk
            refuses. Nothing is left behind.
        MissingDependency: no ONNX Runtime.
    """
    items, calibration = _checked(model, items, calibration, labels, variants)
    refuse_existing(Path(output), replace)
    check_size(model)
    exact = model.combiner is None or model.combiner.exact
    steps = _Steps(progress, 2 + (not exact) + len(set(variants)))
    with ready(model), whole_folder(Path(output), replace=replace) as folder:
        export = _Export(model, items, tolerance, opset, exporter, steps)
        encoder = export.encoder()
        (folder / "encoder.onnx").write_bytes(encoder)
        rescore, entry = None, None
        largest = export.worst.value
        if model.combiner is not None and not exact:
            rescore, entry = _write_rescorer(folder, export, model.combiner, codes)
            largest = max(largest, export.worst.value)
        subspaces = () if model.combiner is None else model.combiner.subspaces
        merge = "min" if model.combiner is None else model.combiner.merge
        made = {}
        for variant in dict.fromkeys(variants):
            steps.next(f"making the {variant} variant")
            content, graphs = make_variant(variant, encoder, calibration, folder)
            before, *afters = (
                onnx_outputs(session(graph), list(export.outputs), items)
                for graph in (encoder, content, *graphs)
            )
            file = f"encoder_{variant}.onnx"
            made[variant] = measure(file, before, afters, labels, rescore, subspaces, merge)
            if not allow_drift:
                check_drift(variant, made[variant])
            (folder / file).write_bytes(content)
        steps.next("opening the bundle")
        return _seal(
            folder,
            {
                "name": name,
                "opset": opset,
                **_description(model, items, export.outputs),
                "rescorer": entry,
                "variants": made,
                "verified": Verified(tolerance=tolerance, largest_difference=largest, items=len(items)),
                "evaluation": None if evaluation is None else dict(evaluation),
            },
        )


def _checked(
    model: Model,
    items: NDArray[Any],
    calibration: NDArray[Any] | None,
    labels: NDArray[Any] | None,
    variants: Sequence[VariantName],
) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Return items and calibration items as the model takes them.

    Raises:
        BundleError: they do not fit the model, the labels or the variants.
    """
    for variant in variants:
        if variant not in _VARIANTS:
            raise BundleError(f"There is no variant '{variant}'; there are {' and '.join(_VARIANTS)}.")
    items = checked_items(model, items, "items")
    if calibration is not None:
        calibration = checked_items(model, calibration, "calibration items")
    if "int8" in variants and calibration is None:
        raise BundleError(
            "The int8 variant cannot be made: it needs calibration items, from the training side."
        )
    if labels is not None and len(labels) != len(items):
        raise BundleError(f"There are {len(labels)} labels for {len(items)} items.")
    return items, calibration


def _write_rescorer(
    folder: Path, export: _Export, combiner: Combiner, codes: Tensor | None
) -> tuple[Callable[[Floats, Floats], Floats], RescorerEntry]:
    """Write the rescorer's graph; return a function that runs it, and what the manifest says of it."""
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


def _description(model: Model, items: NDArray[Any], outputs: Mapping[str, Floats]) -> dict[str, Any]:
    """Return what a manifest says of a model's input, outputs and distance."""
    combiner, code = model.combiner, outputs.get("code")
    distance = DistanceEntry(name="Euclidean", exact=True, measure="euclidean")
    if combiner is not None:
        distance = DistanceEntry(name=type(combiner).__name__, exact=combiner.exact, measure=combiner.measure)
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


def _seal(folder: Path, said: Mapping[str, Any]) -> Manifest:
    """Write the manifest of a filled folder, and open the bundle as the serving side will: what it refuses must not appear.

    Raises:
        BundleError: what the manifest would say, or the bundle, is not valid.
    """
    try:
        manifest = Manifest(
            created=datetime.now(UTC).isoformat(timespec="seconds"), versions=bundle_versions(), **said
        )
    except ValidationError as fault:
        raise BundleError(f"The bundle's manifest cannot be written:\n{problems_of(fault)}") from None
    manifest = write_manifest(folder, manifest)
    for variant in (None, *manifest.variants):
        Bundle.open(folder, variant=variant, threads=1, device="cpu")
    return manifest


class _Steps:
    """Counts the steps for whoever shows a bar."""

    def __init__(self, progress: Told | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def next(self, step: str) -> None:
        """Say what comes now."""
        if self._progress is not None:
            self._progress(step, self._done, self._total)
        self._done += 1


class _Export:
    """One model's graphs, each compared with torch.

    Attributes:
        outputs: torch's, for all items.
        worst: the largest difference of the graph that was made last.
    """

    def __init__(
        self,
        model: Model,
        items: NDArray[Any],
        tolerance: float,
        opset: int,
        exporter: Literal["auto"] | Exporter,
        steps: _Steps,
    ) -> None:
        self._module = Encoder(model).eval()
        self._items = items
        self._tolerance = tolerance
        self._opset = opset
        self._exporters: Sequence[Exporter] = ("dynamo", "torchscript") if exporter == "auto" else (exporter,)
        self._steps = steps
        self.outputs = torch_outputs(self._module, items)
        self.worst = Difference(0.0, "", 0, 0)

    def encoder(self) -> bytes:
        """Return the encoder's graph."""
        check_repeatable(self._module, self._items, self.outputs, self._tolerance)
        vector = self.outputs["vector"]
        combiner = self._module.model.combiner
        if combiner is not None:
            check_widths(combiner, self.outputs)
            if combiner.exact and combiner.merge == "min":
                codes = self._codes()
                check_order(combiner, codes, self.outputs.get("query", vector), vector)
        signature = Signature(
            inputs={"input": ("N", *self._items.shape[1:])},
            outputs={name: ("N", values.shape[1]) for name, values in self.outputs.items()},
        )
        example = torch.from_numpy(np.resize(self._items[:2], (2, *self._items.shape[1:])))

        def compare(graph: bytes) -> Difference:
            return compare_encoder(self.outputs, session(graph), self._items)

        return self._agreed(self._module, (example,), signature, "encoder", compare)

    def rescorer(self, combiner: Combiner) -> tuple[bytes, Callable[[Floats, Floats], Floats]]:
        """Return the rescorer's graph, and a function that runs it."""
        codes = self.outputs["code"]
        module = Rescorer(combiner).eval()
        width = codes.shape[1]
        signature = Signature(
            inputs={"query": ("Q", width), "items": ("N", width)}, outputs={"distance": ("Q", "N")}
        )
        example = tuple(torch.from_numpy(np.resize(codes, (rows, width))) for rows in (3, 5))

        def compare(graph: bytes) -> Difference:
            return compare_rescorer(module, session(graph), codes)

        graph = self._agreed(module, example, signature, "rescorer", compare)
        opened = session(graph)

        def rescore(query: Floats, items: Floats) -> Floats:
            distances: Floats = opened.run(["distance"], {"query": query, "items": items})[0]
            return distances

        return graph, rescore

    def _codes(self) -> Floats:
        if "code" in self.outputs:
            return self.outputs["code"]
        parts = [
            self._module.model(torch.from_numpy(np.ascontiguousarray(self._items[start : start + 64])))[
                1
            ].float()
            for start in range(0, len(self._items), 64)
        ]
        return torch.cat(parts).numpy()

    def _agreed(
        self,
        module: torch.nn.Module,
        example: tuple[torch.Tensor, ...],
        signature: Signature,
        what: str,
        compare: Callable[[bytes], Difference],
    ) -> bytes:
        """Return the graph of the first exporter that agrees with torch; the first one's complaint when none does."""
        complaints: list[BundleError] = []
        self._steps.next(f"exporting the {what} and comparing it with torch")
        for exporter in self._exporters:
            try:
                proto = to_onnx(module, example, signature, opset=self._opset, exporter=exporter)
                graph: bytes = proto.SerializeToString()
                self.worst = compare(graph)
            except BundleError as fault:
                complaints.append(fault)
                continue
            if self.worst.value <= self._tolerance:
                return graph
            complaints.append(BundleError(self._disagreement(what)))
        raise BundleError(f"The {what} cannot be exported. {complaints[0]}") from complaints[0]

    def _disagreement(self, what: str) -> str:
        worst = self.worst
        if what == "encoder":
            where = f"in '{worst.output}' of item {worst.item}, in a batch of {worst.batch}"
            cause = likely_cause(self._module)
        else:
            where = f"in the distance to item {worst.item}, with {worst.batch} queries at once"
            cause = "compute_mat may depend on how many queries or items it is given."
        return f"torch and ONNX Runtime disagree by {worst.value:.2g} {where}; the tolerance is {self._tolerance:g}. {cause}"


def bundle_versions() -> dict[str, str]:
    """Return versions of what makes a bundle."""
    found = {"python": platform.python_version()}
    for package in (
        "embedding-retrieval",
        "torch",
        "onnx",
        "onnxscript",
        "onnxruntime",
        "onnxruntime-gpu",
        "numpy",
    ):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
