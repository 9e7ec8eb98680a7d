"""Compare each ONNX graph with torch on real items."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrieval.errors import BundleError
from retrieval.model.contracts import Combiner, Subspace
from retrieval.model.graph import (
    Encoder,
    Exporter,
    FeatureEncoder,
    Rescorer,
    Signature,
    first_line,
    head_encoder,
    session,
    to_onnx,
)
from retrieval.model.model import Model
from retrieval.serving.manifest import Input
from retrieval.serving.merging import spans_of

Floats = NDArray[np.float32]
Run = Callable[[list[str], dict[str, NDArray[Any]]], Sequence[Any]]
"""Runs a graph on (names of its outputs, inputs by name), like an ONNX Runtime session."""

BATCH = 64
"""Default number of items per batch, which bounds the memory."""

ODD = 7
QUERIES = 16
NEAR = 0.01
"""Pairs nearer than this share of the mean distance are not compared."""

EXPORTERS: Sequence[Exporter] = ("dynamo", "torchscript")
"""torch's exporters; the first whose graph agrees with torch is used."""
_OVERLAP = (10, 20, 50, 100, 200, 500)
"""Numbers of candidates for which the manifest records the overlap."""

_QUERIES = 512
"""Most queries for measuring the overlap."""


@dataclass(frozen=True)
class Difference:
    """The largest difference, and where it occurred.

    Attributes:
        value: absolute difference, divided by the mean length of torch's rows (1 for unit vectors).
        output: the output of the graph.
        item: the row of the item.
        batch: number of items in the batch.
    """

    value: float
    output: str
    item: int
    batch: int


def torch_outputs(encoder: Encoder, items: NDArray[Any], batch: int = BATCH) -> dict[str, Floats]:
    """Return each output of the torch model for all items.

    Raises:
        BundleError: the model fails, or returns NaN or infinity.
    """
    try:
        parts = [encoder(torch.from_numpy(inputs)) for inputs in _batches(items, batch)]
    except Exception as fault:  # whatever the model's code raises
        raise BundleError(
            f"The model fails on items of shape {items.shape[1:]}: {first_line(fault)}"
        ) from fault
    columns = zip(encoder.names, zip(*parts, strict=True), strict=True)
    outputs = {name: torch.cat(column).numpy() for name, column in columns}
    for name, values in outputs.items():
        if values.ndim != 2:
            raise BundleError(
                f"The model's '{name}' has shape {values.shape}; it must be one vector per item."
            )
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
            raise BundleError(
                f"The model gives NaN or infinity in '{name}' for item {row}: there is nothing to"
                " export."
            )
    return outputs


def onnx_outputs(
    run: Run, names: Sequence[str], items: NDArray[Any], batch: int = BATCH
) -> dict[str, Floats]:
    """Return each output of the graph that `run` runs for all items.

    Raises:
        BundleError: ONNX Runtime fails, or the number of rows changes.
    """
    parts = []
    for inputs in _batches(items, batch):
        try:
            parts.append(run(list(names), {"input": inputs}))
        except Exception as fault:  # ONNX Runtime's errors share no public base class
            raise BundleError(
                f"The exported graph fails on a batch of {len(inputs)}: {first_line(fault)}. The"
                " model's code probably fixes the batch size: write x.flatten(1), not x.reshape(8,"
                " -1)."
            ) from fault
        for name, values in zip(names, parts[-1], strict=True):
            if len(values) != len(inputs):
                raise BundleError(
                    f"The exported graph gives {len(values)} rows of '{name}' for a batch of"
                    f" {len(inputs)}."
                )
    columns = zip(names, zip(*parts, strict=True), strict=True)
    return {name: np.concatenate(column) for name, column in columns}


def _batches(items: NDArray[Any], size: int) -> Iterator[NDArray[Any]]:
    for start in range(0, len(items), size):
        yield np.ascontiguousarray(items[start : start + size])


def length_scale(values: Floats) -> float:
    """Return the mean length of rows (1 for unit vectors), or 1 if all are zero."""
    return float(np.linalg.norm(values.astype(np.float64), axis=1).mean()) or 1.0


def compare_encoder(reference: Mapping[str, Floats], run: Run, items: NDArray[Any]) -> Difference:
    """Return the largest difference between torch's outputs and the graph's, at three batch sizes.

    They are one item, an odd number, and all items in batches of up to `BATCH`. A batch size that
    the exporter fixed in the graph shows as a difference or a failure.

    Raises:
        BundleError: the graph fails.
    """
    worst = Difference(-1.0, "", 0, 0)
    for batch, start in ((1, 0), (ODD, max(0, len(items) - ODD)), (BATCH, 0)):
        part = items[start : start + batch] if batch < BATCH else items
        outputs = onnx_outputs(run, list(reference), part, batch)
        for name, values in outputs.items():
            expected = reference[name][start : start + len(part)]
            gap = np.abs(values.astype(np.float64) - expected).max(axis=1) / length_scale(
                reference[name]
            )
            gap = np.where(np.isnan(gap), np.inf, gap)
            row = int(gap.argmax())
            if gap[row] > worst.value:
                worst = Difference(float(gap[row]), name, start + row, min(batch, len(part)))
    return worst


def compare_rescorer(rescorer: Rescorer, session: Any, codes: Floats) -> Difference:
    """Return the largest difference between torch's distances and the graph's, over their mean.

    Pairs that are nearer than `NEAR` of the mean in both are left out, because the square root
    turns rounding of 1e-7 into 3e-4 there.

    Raises:
        BundleError: the graph fails, or its output has another shape.
    """
    worst = Difference(-1.0, "distance", 0, 0)
    for queries, items in ((codes[:1], codes), (codes[:3], codes[-ODD:]), (codes[:QUERIES], codes)):
        expected = (
            rescorer(torch.from_numpy(queries), torch.from_numpy(items)).numpy().astype(np.float64)
        )
        try:
            (distances,) = session.run(["distance"], {"query": queries, "items": items})
        except Exception as fault:  # ONNX Runtime's errors share no public base class
            raise BundleError(
                f"The exported rescorer fails on {len(queries)} queries and {len(items)} items:"
                f" {first_line(fault)}"
            ) from fault
        if distances.shape != (len(queries), len(items)) or expected.shape != distances.shape:
            raise BundleError(
                f"The rescorer gives distances of shape {distances.shape} (torch: {expected.shape})"
                f" for {len(queries)} queries and {len(items)} items."
            )
        if not np.isfinite(expected).all():
            raise BundleError(
                "The combiner gives NaN or infinity as a distance between real items."
            )
        scale = float(np.abs(expected).mean()) or 1.0
        far = np.maximum(np.abs(expected), np.abs(distances)) > NEAR * scale
        gap = np.where(far, np.abs(distances - expected) / scale, 0.0)
        gap = np.where(np.isnan(distances), np.inf, gap)
        query, item = np.unravel_index(int(gap.argmax()), gap.shape)
        if gap[query, item] > worst.value:
            worst = Difference(float(gap[query, item]), "distance", int(item), len(queries))
    return worst


def check_repeatable(
    encoder: Encoder, items: NDArray[Any], outputs: Mapping[str, Floats], tolerance: float
) -> None:
    """Refuse a model that is not repeatable, because no graph could agree with it.

    Raises:
        BundleError: the outputs differ between two runs, or between an item alone and in a batch.
    """
    # for the second run, the same batch as in the first
    for batch, part, cause in (
        (
            BATCH,
            items[:BATCH],
            "it gives other numbers each time: dropout, or another random layer, runs in"
            " evaluation mode too.",
        ),
        (
            1,
            items[:ODD],
            "an item's vector depends on which others are in the batch: batch normalisation, or"
            " another statistic of the batch, is computed in evaluation mode too.",
        ),
    ):
        for name, values in torch_outputs(encoder, part, batch).items():
            gap = np.abs(values - outputs[name][: len(part)]).max(axis=1)
            gap = gap / length_scale(outputs[name])
            if gap.max() > tolerance:
                raise BundleError(
                    f"The model disagrees with itself by {gap.max():.2g} in '{name}' of item"
                    f" {gap.argmax()}: {cause}"
                )


def merged_distances(
    query: Floats, vector: Floats, subspaces: Sequence[Subspace]
) -> NDArray[np.float64]:
    """Return Euclidean distances (Q, N); with sub-spaces, the smallest over them."""
    from scipy.spatial.distance import cdist

    apart = [cdist(query[:, span], vector[:, span]) for span in spans_of(subspaces)]
    return np.asarray(np.minimum.reduce(apart))


def check_order(combiner: Combiner, codes: Floats, query: Floats, vector: Floats) -> None:
    """Refuse an `exact` combiner if its vectors do not give the order of its distances.

    Raises:
        BundleError: the order differs on these items.
    """
    distances = (
        combiner.compute_mat(torch.from_numpy(codes[:QUERIES]), torch.from_numpy(codes))
        .double()
        .numpy()
    )
    euclidean = merged_distances(query[:QUERIES], vector, combiner.subspaces)
    order = np.argsort(euclidean, axis=1, kind="stable")
    ranked = np.take_along_axis(distances, order, axis=1)
    drop = np.maximum.accumulate(ranked, axis=1) - ranked
    row, column = np.unravel_index(int(drop.argmax()), drop.shape)
    if drop[row, column] > 1e-3 * (distances.max() - distances.min()):
        raise BundleError(
            f"{type(combiner).__name__} says exact=True, but item {order[row, column]} is nearer to"
            f" item {row} by compute_mat than others that its index_vectors and query_vectors put"
            " before it. Set exact=False, so that export adds a rescorer."
        )


def checked_items(model: Model, items: NDArray[Any], what: str) -> NDArray[Any]:
    """Return raw inputs in the encoder's type.

    Raises:
        BundleError: there are no items, their shape or type is wrong, or they are not finite.
    """
    preprocessing = model.preprocessing
    if len(items) == 0:
        raise BundleError(
            f"Export needs real {what} to compare torch and ONNX Runtime on; there are none."
        )
    if preprocessing is not None:
        if items.dtype != np.uint8 or items.shape[1:] != preprocessing.shape:
            raise BundleError(
                f"The {what} must be uint8 pixels (N, {', '.join(map(str, preprocessing.shape))}), "
                f"not {items.dtype} {items.shape}."
            )
        return items
    if items.ndim != 2 or items.dtype.kind not in "fiu":
        raise BundleError(
            f"The {what} must be feature vectors (N, F), not {items.dtype} {items.shape}."
        )
    items = items.astype(np.float32, copy=False)
    if not np.isfinite(items).all():
        raise BundleError(f"The {what} hold NaN, infinity or a number beyond float32.")
    return items


def check_widths(combiner: Combiner, outputs: Mapping[str, Floats]) -> None:
    """Refuse query and index vectors of different widths, and sub-spaces outside of them.

    Raises:
        BundleError: the widths differ, or a sub-space exceeds the vectors.
    """
    width = outputs["vector"].shape[1]
    if "query" in outputs and outputs["query"].shape[1] != width:
        raise BundleError(
            f"{type(combiner).__name__} gives query vectors of {outputs['query'].shape[1]} columns"
            f" and index vectors of {width}."
        )
    for space in combiner.subspaces:
        if not 0 <= space.start < space.stop <= width:
            raise BundleError(
                f"{type(combiner).__name__}: sub-space '{space.name}' is columns {space.start} to"
                f" {space.stop} of {width}."
            )


@torch.no_grad()
def candidate_overlap(
    combiner: Combiner, codes: Tensor, depth: int = 10
) -> dict[str, float] | None:
    """Return the share of the exact nearest ten among the first candidates, by their number.

    Args:
        combiner: a combiner that is not exact.
        codes: (N, C), codes of real items; up to 512 evenly spaced ones are the queries.
        depth: number of exact nearest items.

    Returns:
        The shares by number of candidates, or `None` if there are too few items.
    """
    depths = [number for number in _OVERLAP if number < len(codes) - 1]
    if not depths:
        return None
    queries_rows = np.unique(
        np.linspace(0, len(codes) - 1, min(len(codes), _QUERIES)).round().astype(np.int64)
    )
    vectors = combiner.index_vectors(codes).float().numpy()
    queries = combiner.query_vectors(codes[queries_rows]).float().numpy()
    kept = np.zeros(len(depths))
    for part in np.array_split(np.arange(len(queries_rows)), -(-len(queries_rows) // 16)):
        rows = np.arange(len(part))
        exact = combiner.compute_mat(codes[queries_rows[part]], codes).double().numpy()
        near = merged_distances(queries[part], vectors, combiner.subspaces)
        for distances in (exact, near):
            distances[rows, queries_rows[part]] = np.inf
        nearest = np.argsort(exact, axis=1, kind="stable")[:, :depth]
        rank = np.argsort(np.argsort(near, axis=1, kind="stable"), axis=1)
        ranks = np.take_along_axis(rank, nearest, axis=1)
        kept += [(ranks < number).mean(axis=1).sum() for number in depths]
    return {
        str(number): float(share / len(queries_rows))
        for number, share in zip(depths, kept, strict=True)
    }


def input_of(model: Model, items: NDArray[Any]) -> Input:
    """Return the manifest's entry for the encoder's input."""
    if model.preprocessing is None:
        return Input(kind="features", dtype="float32", shape=(items.shape[1],))
    return Input(
        kind="image",
        dtype="uint8",
        shape=model.preprocessing.shape,
        preprocessing=model.preprocessing,
    )


def is_normalized(vectors: Floats) -> bool:
    """Return whether all vectors have length 1, to float32's precision."""
    return bool(np.abs(np.linalg.norm(vectors.astype(np.float64), axis=1) - 1).max() < 1e-4)


class Graphs:
    """Makes the graphs of a model, and compares each with torch.

    Attributes:
        combiner: the model's combiner.
        items: raw inputs.
        outputs: the outputs of torch for all items.
        worst: the largest difference of the latest graph.
    """

    def __init__(
        self, model: Model, items: NDArray[Any], tolerance: float, step: Callable[[str], None]
    ) -> None:
        self._module = Encoder(model).eval()
        self.combiner = model.combiner
        self.items = items
        self._tolerance = tolerance
        self._step = step
        self.outputs = torch_outputs(self._module, items)
        self.worst = Difference(0.0, "", 0, 0)

    def check(self) -> None:
        """Refuse a model that is not repeatable or breaks its combiner's contract.

        Raises:
            BundleError: see `check_repeatable`, `check_widths` and `check_order`.
        """
        check_repeatable(self._module, self.items, self.outputs, self._tolerance)
        vector = self.outputs["vector"]
        combiner = self.combiner
        if combiner is not None:
            check_widths(combiner, self.outputs)
            if combiner.exact and combiner.merge == "min":
                codes = self._codes()
                check_order(combiner, codes, self.outputs.get("query", vector), vector)

    def encoder(self) -> bytes:
        """Return the encoder's graph."""
        return self._encoder(self._module, self.items, self.outputs, "encoder")

    def split(self) -> tuple[bytes, bytes, int]:
        """Return the graphs of backbone and head, and the number of features between them.

        The backbone's graph does not depend on the head, so that it is the same to the byte with
        another head.
        """
        model = self._module.model
        backbone, head = FeatureEncoder(model).eval(), head_encoder(model).eval()
        features = torch_outputs(backbone, self.items)
        first = self._encoder(backbone, self.items, features, "backbone")
        largest = self.worst
        second = self._encoder(head, features["features"], self.outputs, "head")
        largest = max(largest, self.worst, key=lambda difference: difference.value)
        run_backbone, run_head = session(first).run, session(second).run

        def run(names: list[str], feeds: dict[str, NDArray[Any]]) -> list[Any]:
            return list(run_head(names, {"input": run_backbone(["features"], feeds)[0]}))

        self.worst = compare_encoder(self.outputs, run, self.items)
        if self.worst.value > self._tolerance:
            raise BundleError(f"The encoder cannot be split. {self._disagreement('encoder')}")
        self.worst = max(largest, self.worst, key=lambda difference: difference.value)
        return first, second, features["features"].shape[1]

    def _encoder(
        self, module: Encoder, items: NDArray[Any], outputs: Mapping[str, Floats], what: str
    ) -> bytes:
        signature = Signature(
            inputs={"input": ("N", *items.shape[1:])},
            outputs={name: ("N", values.shape[1]) for name, values in outputs.items()},
        )
        example = torch.from_numpy(np.resize(items[:2], (2, *items.shape[1:])))

        def compare(graph: bytes) -> Difference:
            return compare_encoder(outputs, session(graph).run, items)

        return self._agreed(module, (example,), signature, what, compare)

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
        model = self._module.model
        parts = [model(torch.from_numpy(x))[1].float() for x in _batches(self.items, BATCH)]
        return torch.cat(parts).numpy()

    def _agreed(
        self,
        module: torch.nn.Module,
        example: tuple[torch.Tensor, ...],
        signature: Signature,
        what: str,
        compare: Callable[[bytes], Difference],
    ) -> bytes:
        """Return the graph of the first exporter that agrees with torch."""
        complaints: list[BundleError] = []
        self._step(f"exporting the {what} and comparing it with torch")
        for exporter in EXPORTERS:
            try:
                proto = to_onnx(module, example, signature, exporter=exporter)
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
        if what != "rescorer":
            where = f"in '{worst.output}' of item {worst.item}, in a batch of {worst.batch}"
            kinds = {str(p.dtype).removeprefix("torch.") for p in self._module.parameters()}
            kinds -= {"float32"}
            cause = (
                f"Parameters of type {', '.join(sorted(kinds))} round differently: call"
                " model.float() first."
                if kinds
                else "torch's exporter translates a layer wrongly."
            )
        else:
            where = f"in the distance to item {worst.item}, with {worst.batch} queries at once"
            cause = "compute_mat may depend on how many queries or items it is given."
        return (
            f"torch and ONNX Runtime disagree by {worst.value:.2g} {where}; the tolerance is"
            f" {self._tolerance:g}. {cause}"
        )
