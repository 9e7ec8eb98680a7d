"""Compare each ONNX graph with torch on real items, and refuse models that no graph can match."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from retrieval.base.arrays import Array, Floats32, Floats64
from retrieval.bundle.distances import columns_of_subspaces
from retrieval.errors import BundleError
from retrieval.model.contracts import Combiner, Subspace
from retrieval.model.graph import (
    EncoderModule,
    Exporter,
    Rescorer,
    Signature,
    fault_line,
    session,
    to_onnx,
)
from retrieval.model.input_reads import DependsOnInputs
from retrieval.model.model import Model, TextPart

RunGraph = Callable[[list[str], dict[str, Array]], Sequence[Any]]
"""Runs a graph on (names of its outputs, inputs by name), like an ONNX Runtime session."""

BATCH = 64
"""Default number of items per batch, which bounds the memory."""

ODD = 7
"""Size of the small batch that reveals a batch size fixed in the graph."""
QUERIES = 16
"""Number of queries whose distances to all items are compared at once."""
NEAR = 0.01
"""Pairs nearer than this share of the mean distance are not compared."""
OUTLIER_TOLERANCE = 100
"""Outliers may differ by this many tolerances: rounding errors grow outside the usual range."""

ODD_TEXTS = ("a", "red mug " * 1000, "ÇA, ß – 東京 🙂 42 €", "?!", "mug " * 40)
"""Texts unlike those of people who search, which the graph of texts must agree on, too."""

EXPORTERS: Sequence[Exporter] = ("dynamo", "torchscript")
"""torch's exporters; the first whose graph agrees with torch is used."""
_OVERLAP = (10, 20, 50, 100, 200, 500)
"""Numbers of candidates for which the manifest records `candidate_overlap`."""

_OVERLAP_QUERIES = 512
"""Largest number of queries for measuring the overlap."""


class TorchDifference(NamedTuple):
    """The largest difference from torch, divided by the mean length or distance, and its place."""

    value: float
    where: str


def torch_outputs(encoder: EncoderModule, items: Array, batch: int = BATCH) -> dict[str, Floats32]:
    """Return each output of the torch model for all items."""
    try:
        parts = [encoder(torch.from_numpy(inputs)) for inputs in _batches(items, batch)]
    except Exception as fault:  # whatever the model's code raises
        raise BundleError(
            f"The model fails on items of shape {items.shape[1:]}: {fault_line(fault)}"
        ) from fault
    outputs = _joined(encoder.names, parts)
    for name, values in outputs.items():
        if values.ndim != 2:
            raise BundleError(
                f"The model's '{name}' has shape {values.shape}; it must hold one vector per item."
            )
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
            raise BundleError(
                f"The model gives NaN or infinity in '{name}' for item {row}, so it cannot be"
                " exported."
            )
    return outputs


def onnx_outputs(run: RunGraph, names: Sequence[str], items: Array) -> dict[str, Floats32]:
    """Return each output of the graph behind `run` for all items, in batches of `BATCH`."""
    parts = []
    for inputs in _batches(items, BATCH):
        try:
            parts.append(run(list(names), {"input": inputs}))
        except Exception as fault:  # ONNX Runtime's errors share no public base class
            raise BundleError(
                f"The exported graph fails on a batch of {len(inputs)}: {fault_line(fault)}. The"
                " model's code probably fixes the batch size: write x.flatten(1) instead of"
                " x.reshape(8, -1)."
            ) from fault
        for name, values in zip(names, parts[-1], strict=True):
            if len(values) != len(inputs):
                raise BundleError(
                    f"The exported graph gives {len(values)} rows of '{name}' for a batch of"
                    f" {len(inputs)}."
                )
    return _joined(names, parts)


def _joined(names: Sequence[str], parts: Sequence[Sequence[Any]]) -> dict[str, Floats32]:
    """Return the outputs of all batches by name."""
    columns = zip(names, zip(*parts, strict=True), strict=True)
    return {name: np.concatenate(column) for name, column in columns}


def _batches(items: Array, size: int) -> Iterator[Array]:
    for start in range(0, len(items), size):
        yield np.ascontiguousarray(items[start : start + size])


def _worst(
    expected: Mapping[str, Floats32],
    outputs: Mapping[str, Floats32],
    start: int = 0,
    note: str = "",
) -> TorchDifference:
    """Return the largest difference between outputs and the `expected` rows from `start` on."""
    differences = []
    for name, values in outputs.items():
        rows = expected[name].astype(np.float64)
        scale = float(np.linalg.norm(rows, axis=1).mean()) or 1.0
        gap = np.abs(values - rows[start : start + len(values)]).max(axis=1) / scale
        # NaN compares as no difference at all
        gap = np.where(np.isnan(gap), np.inf, gap)
        row = int(gap.argmax())
        where = f"in '{name}' of item {start + row}{note}"
        differences.append(TorchDifference(float(gap[row]), where))
    return max(differences)


def outliers(items: Array) -> Array:
    """Return inputs that are unlike the items (N, …), to reveal a path that only items take.

    For pixels these are almost black and almost white images, noise, negatives, and images in poor
    light; for vectors zeros, noise, negatives, and much smaller and larger vectors.
    """
    rng = np.random.default_rng(0)
    shape = (2, *items.shape[1:])
    originals = items[:2]
    if items.dtype == np.uint8:
        # Models such as those that scale each image by its deviation amplify the rounding errors
        # of constant images, so that these have a little noise.
        dark = rng.integers(0, 3, shape, np.uint8)
        noise = rng.integers(0, 256, shape, np.uint8)
        return np.concatenate(
            [dark, 255 - dark, noise, 255 - originals, originals // 8, 255 - originals // 8]
        )
    noise = rng.normal(items.mean(axis=0), 3 * items.std(axis=0) + 1e-3, shape)
    extremes = [np.zeros_like(originals), noise, -originals, originals / 100, originals * 10]
    return np.concatenate(extremes).astype(np.float32)


def _accepted(run: Callable[[Tensor], Sequence[Tensor]], rows: Array) -> Array:
    """Return the rows for which torch gives finite numbers; others tell nothing about a graph."""

    def is_finite(row: Array) -> bool:
        try:
            return all(bool(output.isfinite().all()) for output in run(torch.from_numpy(row[None])))
        except Exception:  # whatever the model's code raises
            return False

    return rows[[is_finite(row) for row in rows]]


def compare_encoder(
    reference: Mapping[str, Floats32], run: RunGraph, items: Array
) -> TorchDifference:
    """Return the largest difference between torch's outputs and the graph's, at three batch sizes.

    The graph runs on one item, on `ODD` items, and on all items in batches of up to `BATCH`. A
    batch size that the exporter fixed in the graph shows as a difference or a failure.
    """
    differences = []
    for part, start in ((items[:1], 0), (items[-ODD:], max(0, len(items) - ODD)), (items, 0)):
        outputs = onnx_outputs(run, list(reference), part)
        note = f", in a batch of {min(BATCH, len(part))}"
        differences.append(_worst(reference, outputs, start, note))
    return max(differences)


def compare_rescorer(rescorer: Rescorer, session: Any, codes: Floats32) -> TorchDifference:
    """Return the largest difference between torch's and the graph's distances, over their mean.

    Pairs whose distance is below `NEAR` times the mean in torch and in the graph are left out: near
    zero, the square root turns a rounding error of 1e-7 into 3e-4.
    """
    differences = []
    for queries, items in ((codes[:1], codes), (codes[:3], codes[-ODD:]), (codes[:QUERIES], codes)):
        expected = rescorer(torch.from_numpy(queries), torch.from_numpy(items)).double().numpy()
        try:
            (distances,) = session.run(["distance"], {"query": queries, "items": items})
        except Exception as fault:  # ONNX Runtime's errors share no public base class
            raise BundleError(
                f"The exported rescorer fails on {len(queries)} queries and {len(items)} items:"
                f" {fault_line(fault)}"
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
        where = f"in the distance to item {item}, with {len(queries)} queries at once"
        differences.append(TorchDifference(float(gap[query, item]), where))
    return max(differences)


def encoder_graph(
    module: EncoderModule,
    items: Array,
    outputs: Mapping[str, Floats32],
    tolerance: float,
    what: str,
) -> tuple[bytes, float]:
    """Return the graph of an encoder or half of one, and its difference from torch's `outputs`."""
    signature = Signature(
        inputs={"input": ("N", *items.shape[1:])},
        outputs={name: ("N", values.shape[1]) for name, values in outputs.items()},
    )
    example = torch.from_numpy(np.resize(items[:2], (2, *items.shape[1:])))

    def check(graph: bytes) -> float:
        run = session(graph).run
        worst = compare_encoder(outputs, run, items)
        refuse_difference(worst, module, tolerance)
        rows = _accepted(module, outliers(items))
        if len(rows):
            # torch sees each outlier alone, as code that branches on a batch would mix them
            expected = torch_outputs(module, rows, 1)
            outputs_of_graph = onnx_outputs(run, module.names, rows)
            refuse_outliers(_worst(expected, outputs_of_graph), tolerance)
        return worst.value

    return agreed_graph(module, (example,), signature, check, what)


def text_graph(part: TextPart, texts: Sequence[str], tolerance: float) -> tuple[bytes, float]:
    """Return the graph of a model's part for texts, and its difference from torch on texts.

    It is compared on one text, on `ODD` texts, and on all texts and `ODD_TEXTS` in batches.
    """
    listed = [*texts, *ODD_TEXTS]
    batches = [listed[:1], listed[:ODD]]
    batches += [listed[start : start + BATCH] for start in range(0, len(listed), BATCH)]
    tokens = [part.tokenizer(batch) for batch in batches]
    expected = [part(*map(torch.from_numpy, feeds.values())).float().numpy() for feeds in tokens]
    width = expected[0].shape[1]
    signature = Signature(
        {"ids": ("N", "L"), "mask": ("N", "L")},
        {"vector": ("N", width)},
        {"L": part.encoder.length},
    )

    def check(graph: bytes) -> float:
        run = session(graph).run
        differences = []
        for batch, feeds, rows in zip(batches, tokens, expected, strict=True):
            try:
                (vectors,) = run(["vector"], dict(feeds))
            except Exception as fault:  # ONNX Runtime's errors share no public base class
                raise BundleError(
                    f"The exported graph fails on {len(batch)} texts of {feeds['ids'].shape[1]}"
                    f" tokens: {fault_line(fault)}"
                ) from fault
            worst = _worst({"vector": rows}, {"vector": vectors})
            differences.append(worst._replace(where=f"in a batch of {len(batch)} texts"))
        worst = max(differences)
        refuse_difference(worst, part, tolerance)
        return worst.value

    example = tuple(map(torch.from_numpy, part.tokenizer(["two red mugs", "a mug"]).values()))
    return agreed_graph(part, example, signature, check, "text encoder")


def rescorer_graph(combiner: Combiner, codes: Floats32, tolerance: float) -> tuple[bytes, float]:
    """Return the graph of a combiner's distance, and its difference from torch on codes (N, C)."""
    module = Rescorer(combiner).eval()
    width = codes.shape[1]
    signature = Signature(
        inputs={"query": ("Q", width), "items": ("N", width)}, outputs={"distance": ("Q", "N")}
    )
    example = tuple(torch.from_numpy(np.resize(codes, (rows, width))) for rows in (3, 5))
    refuse_state(module, lambda: module(*example))
    some = torch.from_numpy(codes[:QUERIES])

    def check(graph: bytes) -> float:
        run = session(graph)
        worst = compare_rescorer(module, run, codes)
        refuse_difference(worst, module, tolerance)
        rows = _accepted(lambda row: [module(row, some), module(some, row)], outliers(codes))
        if len(rows):
            both = np.concatenate([rows, codes[:QUERIES]])
            refuse_outliers(compare_rescorer(module, run, both), tolerance)
        return worst.value

    return agreed_graph(module, example, signature, check, "rescorer")


def agreed_graph(
    module: nn.Module,
    example: tuple[Tensor, ...],
    signature: Signature,
    check: Callable[[bytes], float],
    what: str,
) -> tuple[bytes, float]:
    """Return the graph of the first exporter that agrees with torch, and its difference.

    Args:
        module: the module to export.
        example: inputs of the module.
        signature: names and shapes of the graph's inputs and outputs.
        check: returns a graph's difference from torch, and refuses a graph that disagrees.
        what: the module's name in messages.

    Raises:
        BundleError: no exporter's graph agrees. The message names the line of code that depends on
            inputs, if there is one, and is otherwise about the first exporter.
    """
    faults: list[BundleError] = []
    for exporter in EXPORTERS:
        try:
            proto = to_onnx(module, example, signature, exporter=exporter)
            graph: bytes = proto.SerializeToString()
            return graph, check(graph)
        except BundleError as fault:
            faults.append(fault)
    cause = next((f for f in faults if isinstance(f, DependsOnInputs)), faults[0])
    raise BundleError(f"The {what} cannot be exported. {cause}") from cause


def refuse_difference(worst: TorchDifference, module: nn.Module, tolerance: float) -> None:
    """Refuse a graph of `module` that differs from torch by more than the tolerance."""
    if worst.value <= tolerance:
        return
    kinds = {str(p.dtype).removeprefix("torch.") for p in module.parameters()} - {"float32"}
    cause = "torch's exporter translates a layer wrongly."
    if isinstance(module, Rescorer):
        cause = "The result of compute_mat may depend on the number of queries or items."
    elif kinds:
        cause = (
            f"Parameters of type {', '.join(sorted(kinds))} round differently: call model.float()"
            " first."
        )
    raise BundleError(
        f"torch and ONNX Runtime disagree by {worst.value:.2g} {worst.where}; the tolerance is"
        f" {tolerance:g}. {cause}"
    )


def refuse_outliers(worst: TorchDifference, tolerance: float) -> None:
    """Refuse a graph that differs from torch by more than the tolerance for `outliers`."""
    if worst.value > OUTLIER_TOLERANCE * tolerance:
        raise BundleError(
            f"torch and ONNX Runtime agree on real items, but disagree by {worst.value:.2g}"
            f" {worst.where} of inputs made to be unlike them (almost black and white images,"
            f" noise); the tolerance there is {OUTLIER_TOLERANCE * tolerance:g}. The graph probably"
            " holds only one branch of the model's Python code."
        )


def refuse_state(module: nn.Module, call: Callable[[], object]) -> None:
    """Refuse a module that draws random numbers or changes itself when `call` runs it again."""
    before = _state(module)
    call()
    after = _state(module)
    changed = [name for name in after if name not in before or after[name] != before[name]]
    if changed:
        raise BundleError(
            f"The model changes {changed[0]} on each call in evaluation mode, but a graph has no"
            " state and would give other numbers after some calls. Do so only if self.training."
        )


def _state(module: nn.Module) -> dict[str, Any]:
    """Return what a call may change, by its name in a sentence."""
    state: dict[str, Any] = {
        "torch's random numbers": torch.get_rng_state().tolist(),
        "Python's random numbers": random.getstate(),
        "NumPy's random numbers": repr(np.random.get_state(legacy=False)["state"]),
    }
    for name, tensor in module.state_dict(keep_vars=True).items():
        # torch counts no versions of a tensor made in inference mode
        version = 0
        if not tensor.is_inference():
            version = tensor._version
        state[f"the tensor '{name}'"] = (id(tensor), version)
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, bool | int | float):
                state[f"'{f'{path}.{name}'.lstrip('.')}'"] = value
    return state


def check_repeatable(
    encoder: EncoderModule, items: Array, outputs: Mapping[str, Floats32], tolerance: float
) -> None:
    """Refuse a model whose outputs change with the call or the batch: no graph could agree."""
    by_call = (
        "it gives other numbers on each call. Dropout or another random layer is still active in"
        " evaluation mode."
    )
    by_batch = (
        "an item's vector depends on the other items in the batch. Batch normalisation, or another"
        " statistic of the batch, is still computed in evaluation mode."
    )
    # `outputs` come from batches of `BATCH`, so that in the first comparison only the call differs
    calls = [(BATCH, items[:BATCH], by_call)]
    calls += [(size, items[:ODD], by_batch) for size in (3, 2, 1)]
    for batch, part, cause in calls:
        worst = _worst(outputs, torch_outputs(encoder, part, batch))
        if worst.value > tolerance:
            raise BundleError(
                f"The model disagrees with itself by {worst.value:.2g} {worst.where}: {cause}"
            )
    refuse_state(encoder, lambda: torch_outputs(encoder, items[:1], 1))


def smallest_distances(
    query: Floats32, vector: Floats32, subspaces: Sequence[Subspace]
) -> Floats64:
    """Return Euclidean distances (Q, N): the smallest over the sub-spaces, if there are any."""
    from scipy.spatial.distance import cdist

    spans = columns_of_subspaces(subspaces)
    distances = [cdist(query[:, span], vector[:, span]) for span in spans]
    return np.asarray(np.minimum.reduce(distances))


def check_combiner(model: Model, items: Array, outputs: Mapping[str, Floats32]) -> None:
    """Refuse a combiner whose vectors do not fit its sub-spaces, or that is wrongly `exact`."""
    combiner = model.combiner
    vector = outputs["vector"]
    if combiner is None:
        return
    query = outputs.get("query", vector)
    width = vector.shape[1]
    if query.shape[1] != width:
        raise BundleError(
            f"{type(combiner).__name__} gives query vectors of {query.shape[1]} columns and index"
            f" vectors of {width}."
        )
    for space in combiner.subspaces:
        if not 0 <= space.start < space.stop <= width:
            raise BundleError(
                f"{type(combiner).__name__}: sub-space '{space.name}' has start {space.start} and"
                f" stop {space.stop}, which must lie in this order within 0 to {width}."
            )
    if not combiner.exact or combiner.merge != "min":
        return
    codes = torch.cat([model(torch.from_numpy(x))[1].float() for x in _batches(items, BATCH)])
    distances = combiner.compute_mat(codes[:QUERIES], codes).double().numpy()
    euclidean = smallest_distances(query[:QUERIES], vector, combiner.subspaces)
    order = np.argsort(euclidean, axis=1, kind="stable")
    # in the order of the vectors, the combiner's distances must never fall
    ranked = np.take_along_axis(distances, order, axis=1)
    drop = np.maximum.accumulate(ranked, axis=1) - ranked
    row, column = np.unravel_index(int(drop.argmax()), drop.shape)
    if drop[row, column] > 1e-3 * (distances.max() - distances.min()):
        raise BundleError(
            f"{type(combiner).__name__} has exact=True, but compute_mat puts item"
            f" {order[row, column]} nearer to item {row} than some items that are nearer by"
            " index_vectors and query_vectors. Set exact=False, so that export adds a rescorer."
        )


def checked_inputs(model: Model, items: Array, what: str) -> Array:
    """Check raw inputs, and return them in the encoder's type."""
    preprocessing = model.preprocessing
    if len(items) == 0:
        raise BundleError(
            f"Export compares torch and ONNX Runtime on real {what}, but there are none."
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


@torch.no_grad()
def candidate_overlap(combiner: Combiner, codes: Tensor) -> dict[str, float] | None:
    """Return the share of the ten exactly nearest items that are among the first candidates.

    Args:
        combiner: a combiner that is not exact.
        codes: (N, C), codes of real items. Up to 512 of the rows, evenly spaced, are the queries.

    Returns:
        The shares by number of candidates, or `None` if there are too few items.
    """
    numbers = [number for number in _OVERLAP if number < len(codes) - 1]
    if not numbers:
        return None
    count = min(len(codes), _OVERLAP_QUERIES)
    queries = np.linspace(0, len(codes) - 1, count).round().astype(np.int64)
    vectors = combiner.index_vectors(codes).float().numpy()
    sums = np.zeros(len(numbers))
    for rows in np.split(queries, range(QUERIES, len(queries), QUERIES)):
        exact = combiner.compute_mat(codes[rows], codes).double().numpy()
        query = combiner.query_vectors(codes[rows]).float().numpy()
        near = smallest_distances(query, vectors, combiner.subspaces)
        for distances in (exact, near):  # an item does not find itself
            distances[np.arange(len(rows)), rows] = np.inf
        nearest = np.argsort(exact, axis=1, kind="stable")[:, :10]
        rank = np.argsort(np.argsort(near, axis=1, kind="stable"), axis=1)
        ranks = np.take_along_axis(rank, nearest, axis=1)
        sums += [(ranks < number).mean(axis=1).sum() for number in numbers]
    return {str(n): float(total / count) for n, total in zip(numbers, sums, strict=True)}


def is_normalized(vectors: Floats32) -> bool:
    """Return whether all vectors have length 1, to float32's precision."""
    return bool(np.abs(np.linalg.norm(vectors.astype(np.float64), axis=1) - 1).max() < 1e-4)
