"""Export a model as a bundle: ONNX graphs, compared with torch, and a manifest."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict, Unpack, get_args

import torch
from pydantic import ValidationError
from torch import Tensor

from retrieval.base import files
from retrieval.base.arrays import Array, Floats32
from retrieval.base.progress import Meter
from retrieval.base.runtime import ONNXRUNTIME, installed_packages
from retrieval.base.strict_json import problems_of
from retrieval.bundle.bundle import Bundle
from retrieval.bundle.manifest import (
    FILE,
    DistanceEntry,
    Input,
    Manifest,
    RescorerEntry,
    SplitEntry,
    SubspaceEntry,
    TextEntry,
    Variant,
    Verified,
    write_manifest,
)
from retrieval.bundle.probe import WIDEST, probe_of, text_probe_of
from retrieval.errors import BundleError
from retrieval.export import agreement
from retrieval.export.variants import VariantName, check_drift, make_variant, measure
from retrieval.model.contracts import Combiner
from retrieval.model.graph import (
    OPSET,
    TOLERANCE,
    EncoderModule,
    FeatureEncoder,
    check_size,
    ready,
    session,
)
from retrieval.model.model import Model

_LIBRARIES = ("embedding-retrieval", "torch", "onnx", "onnxscript", *ONNXRUNTIME, "numpy")
"""Distributions whose versions the manifest records."""


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that decide what a bundle contains."""
    versions = {name: version(name) for name in installed_packages(_LIBRARIES)}
    return {"python": platform.python_version(), **versions}


@contextlib.contextmanager
def whole_bundle(output: Path, *, replace: bool) -> Iterator[Path]:
    """Context manager that yields a hidden folder and renames it to `output` at the end.

    Raises:
        BundleError: `output` exists and must not be replaced, or the folder cannot be written.
    """
    output = Path(os.path.realpath(output))
    refuse_existing(output, replace)
    exists = _exists_already(output)
    try:
        with files.whole_folder(output, replace=replace, exists_error=exists) as temporary:
            yield temporary
            refuse_existing(output, replace)  # another program may have created it
    except OSError as fault:
        raise BundleError(
            f"The bundle {output} cannot be written: {fault.strerror or fault}. Nothing was left"
            " behind."
        ) from fault


def refuse_existing(output: Path, replace: bool) -> None:
    """Refuse an existing `output`, unless it is an empty folder or a bundle to replace."""
    if not output.exists():
        return
    if not output.is_dir():
        raise BundleError(f"{output} is a file, and a bundle is a folder. Choose another output.")
    if not any(output.iterdir()):
        return
    if not (output / FILE).is_file():
        raise BundleError(f"{output} exists and is not a bundle. Choose another output.")
    if not replace:
        raise _exists_already(output)


def _exists_already(output: Path) -> BundleError:
    return BundleError(
        f"The bundle {output} exists. Replace it with --replace (in Python replace=True), or choose"
        " another output."
    )


class ExportOptions(TypedDict, total=False):
    """Keyword arguments of every export; `Run.export` explains them."""

    variants: VariantName | Sequence[VariantName]
    split: bool
    allow_drift: bool
    tolerance: float
    replace: bool


@dataclass(frozen=True)
class _Options:
    """`ExportOptions` with their defaults."""

    variants: VariantName | Sequence[VariantName] = ()
    split: bool = False
    allow_drift: bool = False
    tolerance: float = TOLERANCE
    replace: bool = False

    @property
    def names(self) -> tuple[VariantName, ...]:
        """The names of the variants, each once."""
        if isinstance(self.variants, str):
            return (self.variants,)
        return tuple(dict.fromkeys(self.variants))


class _Export:
    """A bundle that is being built: a model's ONNX graphs, each compared with torch.

    Attributes:
        outputs: torch's outputs for all items, by name.
        files: the content of the bundle's files, by name.
        differences: each graph's largest difference from torch, by the name of its file.
        rescore: the rescorer, from codes (Q, C) and (N, C) to distances (Q, N), if there is one.
    """

    def __init__(
        self, model: Model, items: Array, tolerance: float, step: Callable[[str], None]
    ) -> None:
        self.model = model
        self.items = items
        self.tolerance = tolerance
        self.step = step
        self._encoder = EncoderModule(model).eval()
        self.outputs = agreement.torch_outputs(self._encoder, items)
        # first: no graph of such a model could agree, and the exporter would be blamed
        agreement.check_repeatable(self._encoder, items, self.outputs, tolerance)
        agreement.check_combiner(model, items, self.outputs)
        self.files: dict[str, bytes] = {}
        self.differences: dict[str, float] = {}
        self.rescore: Callable[[Floats32, Floats32], Floats32] | None = None

    def encoder(self) -> bytes:
        """Return the encoder's graph."""
        return self._graph("encoder", self._encoder, self.items, self.outputs)

    def _graph(
        self, what: str, module: EncoderModule, items: Array, outputs: Mapping[str, Floats32]
    ) -> bytes:
        self.step(f"exporting the {what} and comparing it with torch")
        graph, difference = agreement.encoder_graph(module, items, outputs, self.tolerance, what)
        self.differences[f"{what}.onnx"] = difference
        return graph

    def split(self) -> SplitEntry:
        """Add the graphs of backbone and head.

        The bytes of the backbone's graph do not depend on the head.
        """
        backbone = FeatureEncoder(self.model).eval()
        features = agreement.torch_outputs(backbone, self.items)
        first = self._graph("backbone", backbone, self.items, features)
        head = EncoderModule(self.model, from_features=True).eval()
        second = self._graph("head", head, features["features"], self.outputs)
        run_backbone = session(first).run
        run_head = session(second).run

        def run(names: list[str], feeds: dict[str, Array]) -> list[Any]:
            (features,) = run_backbone(["features"], feeds)
            return list(run_head(names, {"input": features}))

        # each half agrees with torch, but the head's rounding adds to that of the backbone
        worst = agreement.compare_encoder(self.outputs, run, self.items)
        try:
            agreement.refuse_difference(worst, self._encoder, self.tolerance)
        except BundleError as fault:
            raise BundleError(f"The encoder cannot be split. {fault}") from fault
        self.differences["head.onnx"] = max(worst.value, self.differences["head.onnx"])
        entry = SplitEntry(
            backbone="backbone.onnx", head="head.onnx", features=features["features"].shape[1]
        )
        self.files |= {entry.backbone: first, entry.head: second}
        return entry

    def text(self, texts: Sequence[str]) -> TextEntry | None:
        """Add the graph and the tokenizer of the model's part for texts, if it has one."""
        part = self.model.text
        if part is None:
            return None
        self.step("exporting the text encoder and comparing it with torch")
        graph, difference = agreement.text_graph(part, texts, self.tolerance)
        verified = Verified(
            tolerance=self.tolerance,
            largest_difference=difference,
            items=len(texts) + len(agreement.ODD_TEXTS),
        )
        entry = TextEntry(length=part.encoder.length, verified=verified)
        self.files |= {entry.file: graph, entry.tokenizer: part.encoder.tokenizer}
        return entry

    def rescorer(self, codes: Tensor | None) -> RescorerEntry:
        """Add the rescorer's graph, and choose its number of candidates.

        The choice depends on `codes`, by default the codes of the items.
        """
        combiner = self.model.combiner
        assert combiner is not None
        self.step("exporting the rescorer and comparing it with torch")
        name = "rescorer.onnx"
        item_codes = self.outputs["code"]
        graph, self.differences[name] = agreement.rescorer_graph(
            combiner, item_codes, self.tolerance
        )
        self.files[name] = graph
        run = session(graph).run
        self.rescore = lambda query, items: run(["distance"], {"query": query, "items": items})[0]
        if codes is None:
            codes = torch.from_numpy(item_codes)
        return RescorerEntry(
            file=name,
            candidates=combiner.choose_candidates(codes),
            overlap=agreement.candidate_overlap(combiner, codes),
            items=len(codes),
        )

    def variant(
        self,
        name: VariantName,
        encoder: bytes,
        calibration: Array | None,
        labels: Array | None,
        scratch: Path,
    ) -> Variant:
        """Add a variant of the encoder, and measure its drift."""
        self.step(f"making the {name} variant")
        file = f"encoder_{name}.onnx"
        combiner = self.model.combiner
        graph, emulations = make_variant(name, encoder, calibration, scratch)
        self.files[file] = graph
        outputs = []
        for content in (encoder, graph, *emulations):
            run = session(content).run
            outputs.append(agreement.onnx_outputs(run, list(self.outputs), self.items))
        return measure(file, outputs[0], outputs[1:], labels, self.rescore, combiner)

    def description(self) -> dict[str, Any]:
        """Return the manifest's entries for input, outputs and distance."""
        combiner = self.model.combiner
        preprocessing = self.model.preprocessing
        code = self.outputs.get("code")
        vector = self.outputs["vector"]
        # a combiner's defaults describe the Euclidean distance
        settings = combiner or Combiner
        if combiner is None:
            name = "Euclidean"
        else:
            name = type(combiner).__name__
        return {
            "input": Input(
                kind="features" if preprocessing is None else "image",
                dtype="float32" if preprocessing is None else "uint8",
                shape=self.items.shape[1:],
                preprocessing=preprocessing,
            ),
            "vector": vector.shape[1],
            "code": None if code is None else code.shape[1],
            "query_vectors": "query" in self.outputs,
            "normalized": agreement.is_normalized(vector),
            "distance": DistanceEntry(name=name, exact=settings.exact, measure=settings.measure),
            "subspaces": tuple(SubspaceEntry(**vars(space)) for space in settings.subspaces),
            "merge": settings.merge,
        }


def export_model(
    model: Model,
    items: Array,
    output: Path,
    *,
    name: str,
    labels: Array | None = None,
    calibration: Array | None = None,
    codes: Tensor | None = None,
    evaluation: Mapping[str, float] | None = None,
    texts: Sequence[str] = (),
    **options: Unpack[ExportOptions],
) -> Manifest:
    """Write a bundle, and return its manifest.

    The graphs of encoder and rescorer run in ONNX Runtime on one item, on an odd number of items,
    and on all items in batches. The largest absolute difference from torch, divided by the mean
    length of the vectors (encoder) or by the mean distance (rescorer), must not exceed `tolerance`.
    If a combiner declares itself `exact`, its distances must order items as the Euclidean distances
    of their vectors do. The model is exported in evaluation mode on the CPU; the object itself does
    not change.

    Args:
        model: the model to export.
        items: inputs of the model that were not used in training: preprocessed images, uint8 (N,
            channels, H, W), or feature vectors, float (N, F).
        output: the folder to create; it appears only when the bundle is complete.
        name: the model's name in the manifest.
        labels: (N,), one label per item, for Recall@1 of the variants.
        calibration: inputs from the training set, required for "int8".
        codes: (N, C) codes of real items, from which the combiner chooses the rescorer's number of
            candidates; by default the codes of `items`.
        evaluation: metrics for the manifest.
        texts: texts on which a model's part for texts is compared with torch.
        options: variants, split, allow_drift, tolerance and replace; see `Run.export`.

    Raises:
        BundleError: `output` exists, the items do not fit the model, torch cannot export it, the
            graph disagrees with torch (the message names the largest difference, its place and the
            likely cause), a variant cannot be made, or the folder cannot be written. Nothing is
            left behind.
        MissingDependency: ONNX Runtime is not installed.
    """
    chosen = _Options(**options)
    names = chosen.names
    items, calibration = _checked(model, items, calibration, labels, chosen)
    # variants are made of the whole encoder, which a split bundle does not keep
    whole = not chosen.split or bool(names)
    rescored = model.combiner is not None and not model.combiner.exact
    total = 1 + whole + 2 * chosen.split + rescored + (model.text is not None) + len(names)
    number = itertools.count()

    def show(step: str) -> None:
        meter.reach(next(number), total, step)

    with (
        Meter("export", total, "steps") as meter,
        ready(model),
        whole_bundle(Path(output), replace=chosen.replace) as folder,
    ):
        export = _Export(model, items, chosen.tolerance, show)
        if chosen.split:
            halves = export.split()
        else:
            halves = None
        if whole:
            encoder = export.encoder()
        else:
            encoder = b""
        if not chosen.split:
            export.files["encoder.onnx"] = encoder
        if rescored:
            rescorer = export.rescorer(codes)
        else:
            rescorer = None
        text = export.text(texts)
        written: dict[str, Variant] = {}
        for variant in names:
            written[variant] = export.variant(variant, encoder, calibration, labels, folder)
            if not chosen.allow_drift:
                check_drift(variant, written[variant])
        for file, content in export.files.items():
            (folder / file).write_bytes(content)
        export.step("opening the bundle")
        # a variant has no difference from torch: it rounds on purpose, and has its drift instead
        largest = max(export.differences.get(file, 0.0) for file in export.files)
        content_of_manifest = {
            "name": name,
            "opset": OPSET,
            **export.description(),
            "encoder": None if chosen.split else "encoder.onnx",
            "split": halves,
            "rescorer": rescorer,
            "text": text,
            "variants": written,
            "verified": Verified(
                tolerance=chosen.tolerance, largest_difference=largest, items=len(items)
            ),
            "evaluation": evaluation,
        }
        return _seal(folder, content_of_manifest, items)


def _checked(
    model: Model,
    items: Array,
    calibration: Array | None,
    labels: Array | None,
    options: _Options,
) -> tuple[Array, Array | None]:
    """Check the arguments; return items and calibration items in the type that the model takes."""
    for variant in options.names:
        if variant not in get_args(VariantName):
            names = " and ".join(get_args(VariantName))
            raise BundleError(f"There is no variant '{variant}'; there are {names}.")
    items = agreement.checked_inputs(model, items, "items")
    if calibration is not None:
        calibration = agreement.checked_inputs(model, calibration, "calibration items")
    if "int8" in options.names and calibration is None:
        raise BundleError(
            "The int8 variant cannot be made without calibration items from the training set."
        )
    if labels is not None and len(labels) != len(items):
        raise BundleError(f"There are {len(labels)} labels for {len(items)} items.")
    if options.split and model.preprocessing is None:
        raise BundleError(
            "This model takes feature vectors and has no backbone to split off; export it unsplit."
        )
    check_size(model)
    return items, calibration


def _seal(folder: Path, content: Mapping[str, Any], items: Array) -> Manifest:
    """Write the manifest, open the bundle to check it, and add the vectors of a test input."""
    try:
        manifest = Manifest(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=library_versions(),
            **content,
        )
    except ValidationError as fault:
        raise BundleError(
            f"The bundle's manifest cannot be written:\n{problems_of(fault)}"
        ) from None
    manifest = write_manifest(folder, manifest)
    opened: dict[str | None, Bundle] = {}
    for variant in (None, *manifest.variants):
        opened[variant] = Bundle.open(folder, variant=variant, threads=1, device="cpu")
    if manifest.vector > WIDEST:
        return manifest
    probes: dict[str, Any] = {}
    probes["probe"] = probe_of(opened, (float(items.mean()), float(items.std())))
    if manifest.text is not None:
        probe = text_probe_of(opened[None])
        probes["text"] = manifest.text.model_copy(update={"probe": probe})
    return write_manifest(folder, manifest.model_copy(update=probes))
