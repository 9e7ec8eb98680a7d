"""Is the graph the model? torch and ONNX Runtime side by side on real items, at several batch sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieval.errors import BundleError
from retrieval.model.contracts import Combiner, Subspace
from retrieval.model.graph import Encoder, Rescorer, first_line
from retrieval.serving.merging import spans_of

Floats = NDArray[np.float32]

BATCH = 64
"""Items at a time, where not another number is what is being tested: bounds the memory that verifying takes."""

ODD = 7
QUERIES = 16
NEAR = 0.01
"""Pairs nearer than this share of the mean distance count as the same point when distances are compared."""


@dataclass(frozen=True)
class Difference:
    """The largest difference seen, and where.

    Attributes:
        value: absolute, divided by the mean length of torch's rows: for unit vectors the plain difference.
        output: of the graph.
        item: its row among the items.
        batch: how many items went through at once.
    """

    value: float
    output: str
    item: int
    batch: int


def torch_outputs(encoder: Encoder, items: NDArray[Any], batch: int = BATCH) -> dict[str, Floats]:
    """Return each output of the torch model for all items.

    Raises:
        BundleError: it fails on them, or gives NaN or infinity.
    """
    parts: list[tuple[torch.Tensor, ...]] = []
    for start in range(0, len(items), batch):
        inputs = torch.from_numpy(np.ascontiguousarray(items[start : start + batch]))
        try:
            parts.append(encoder(inputs))
        except Exception as fault:  # whatever the model's code raises
            raise BundleError(
                f"The model fails on items of shape {items.shape[1:]}: {first_line(fault)}"
            ) from fault
    outputs = {
        name: torch.cat([part[column] for part in parts]).numpy() for column, name in enumerate(encoder.names)
    }
    for name, values in outputs.items():
        if values.ndim != 2:
            raise BundleError(
                f"The model's '{name}' has shape {values.shape}; it must be one vector per item."
            )
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
            raise BundleError(
                f"The model gives NaN or infinity in '{name}' for item {row}: there is nothing to export."
            )
    return outputs


def onnx_outputs(
    session: Any, names: Sequence[str], items: NDArray[Any], batch: int = BATCH
) -> dict[str, Floats]:
    """Return each output of the graph for all items.

    Raises:
        BundleError: ONNX Runtime fails, or gives another number of rows than it was given.
    """
    parts = []
    for start in range(0, len(items), batch):
        inputs = np.ascontiguousarray(items[start : start + batch])
        try:
            parts.append(session.run(list(names), {"input": inputs}))
        except Exception as fault:  # ONNX Runtime's errors share no public base class
            raise BundleError(
                f"The exported graph fails on a batch of {len(inputs)}: {first_line(fault)}. "
                "The model's code probably fixes the batch size: write x.flatten(1), not x.reshape(8, -1)."
            ) from fault
        for name, values in zip(names, parts[-1], strict=True):
            if len(values) != len(inputs):
                raise BundleError(
                    f"The exported graph gives {len(values)} rows of '{name}' for a batch of {len(inputs)}."
                )
    return {name: np.concatenate([part[column] for part in parts]) for column, name in enumerate(names)}


def length_scale(values: Floats) -> float:
    """Return the mean length of rows (1 for unit vectors); 1 when all are zero."""
    return float(np.linalg.norm(values.astype(np.float64), axis=1).mean()) or 1.0


def compare_encoder(reference: Mapping[str, Floats], session: Any, items: NDArray[Any]) -> Difference:
    """Return the largest difference between torch's outputs and the graph's, over three batch sizes.

    One item alone, an odd number, and all items in batches of up to `BATCH`: a batch size that the exporter folded into the graph
    shows as a difference or as a failure.

    Raises:
        BundleError: the graph fails.
    """
    worst = Difference(-1.0, "", 0, 0)
    for batch, start in ((1, 0), (ODD, max(0, len(items) - ODD)), (BATCH, 0)):
        part = items[start : start + batch] if batch < BATCH else items
        outputs = onnx_outputs(session, list(reference), part, batch)
        for name, values in outputs.items():
            expected = reference[name][start : start + len(part)]
            gap = np.abs(values.astype(np.float64) - expected).max(axis=1) / length_scale(reference[name])
            gap = np.where(np.isnan(gap), np.inf, gap)
            row = int(gap.argmax())
            if gap[row] > worst.value:
                worst = Difference(float(gap[row]), name, start + row, min(batch, len(part)))
    return worst


def compare_rescorer(rescorer: Rescorer, session: Any, codes: Floats) -> Difference:
    """Return the largest difference between torch's distances and the graph's, relative to the mean distance.

    Pairs that both put nearer than `NEAR` of the mean are left out: there a square root turns rounding at 1e-7 into 3e-4.

    Raises:
        BundleError: the graph fails, or gives another shape.
    """
    worst = Difference(-1.0, "distance", 0, 0)
    for queries, items in ((codes[:1], codes), (codes[:3], codes[-ODD:]), (codes[:QUERIES], codes)):
        expected = rescorer(torch.from_numpy(queries), torch.from_numpy(items)).numpy().astype(np.float64)
        try:
            (distances,) = session.run(["distance"], {"query": queries, "items": items})
        except Exception as fault:  # ONNX Runtime's errors share no public base class
            raise BundleError(
                f"The exported rescorer fails on {len(queries)} queries and {len(items)} items: {first_line(fault)}"
            ) from fault
        if distances.shape != (len(queries), len(items)) or expected.shape != distances.shape:
            raise BundleError(
                f"The rescorer gives distances of shape {distances.shape} (torch: {expected.shape}) for "
                f"{len(queries)} queries and {len(items)} items."
            )
        if not np.isfinite(expected).all():
            raise BundleError("The combiner gives NaN or infinity as a distance between real items.")
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
    """Refuse a model that disagrees with itself: no graph could agree with it.

    Raises:
        BundleError: the same items give other numbers on a second run, or an item gives other numbers alone than among others.
    """
    few = items[:ODD]
    for batch, cause in (
        (
            BATCH,
            "it gives other numbers each time: dropout, or another random layer, runs in evaluation mode too.",
        ),
        (
            1,
            "an item's vector depends on which others are in the batch: batch normalisation, or another statistic "
            "of the batch, is computed in evaluation mode too.",
        ),
    ):
        # the same rows beside the same others, as far as the batch size allows
        given = items[:BATCH] if batch == BATCH else few
        for name, values in torch_outputs(encoder, given, batch).items():
            gap = np.abs(values - outputs[name][: len(given)]).max(axis=1) / length_scale(outputs[name])
            if gap.max() > tolerance:
                raise BundleError(
                    f"The model disagrees with itself by {gap.max():.2g} in '{name}' of item {gap.argmax()}: {cause}"
                )


def likely_cause(encoder: Encoder) -> str:
    """Return why the graph may disagree with a model that agrees with itself."""
    types = {str(p.dtype).removeprefix("torch.") for p in encoder.parameters()} - {"float32"}
    if types:
        return f"Parameters of type {', '.join(sorted(types))} round differently: call model.float() first."
    return "The exporter translates a layer wrongly: try the other one (exporter='torchscript' or 'dynamo')."


def merged_distances(query: Floats, vector: Floats, subspaces: Sequence[Subspace]) -> NDArray[np.float64]:
    """Return Euclidean distances (Q, N) between (Q, P) and (N, P): the smallest over sub-spaces, where there are some."""
    best: NDArray[np.float64] | None = None
    for span in spans_of(subspaces):
        q, v = query[:, span].astype(np.float64), vector[:, span].astype(np.float64)
        squares = (q * q).sum(1)[:, None] - 2 * q @ v.T + (v * v).sum(1)
        distances = np.sqrt(np.maximum(squares, 0.0))
        best = distances if best is None else np.minimum(best, distances)
    assert best is not None
    return best


def check_order(combiner: Combiner, codes: Floats, query: Floats, vector: Floats) -> None:
    """Hold a combiner that says `exact` to it: the order of its vectors must be the order of its distances.

    Raises:
        BundleError: on these items it is not.
    """
    distances = (
        combiner.compute_mat(torch.from_numpy(codes[:QUERIES]), torch.from_numpy(codes)).double().numpy()
    )
    euclidean = merged_distances(query[:QUERIES], vector, combiner.subspaces)
    order = np.argsort(euclidean, axis=1, kind="stable")
    ranked = np.take_along_axis(distances, order, axis=1)
    drop = np.maximum.accumulate(ranked, axis=1) - ranked
    row, column = np.unravel_index(int(drop.argmax()), drop.shape)
    if drop[row, column] > 1e-3 * (distances.max() - distances.min()):
        raise BundleError(
            f"{type(combiner).__name__} says exact=True, but item {order[row, column]} is nearer to item {row} by "
            "compute_mat than others that its index_vectors and query_vectors put before it. Set exact=False, so "
            "that export adds a rescorer."
        )
