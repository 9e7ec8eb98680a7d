"""Simulated users who search an index of scikit-learn's digits, and click hits of their taste."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper
from retrieval.bundle.bundle import Bundle
from retrieval.bundle.manifest import DistanceEntry, Input, Manifest, Verified, write_manifest
from retrieval.feedback.feedback_record import CLICKED, FEEDBACK_FILE, FeedbackRecord, Search
from retrieval.feedback.interleaving import load_head, team_draft
from retrieval.index.index import Index, open_index
from retrieval.store.contract import Item, widths_of
from retrieval.store.folder import create_local
from sklearn.datasets import load_digits

from retrieval_engines.testing.small_bundles import save_graph
from retrieval_feedback.worker import base_of

VOTERS = 60


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return pixels (1797, 64) of digits, and how thick they are drawn: a quarter, 0 to 3."""
    x = (load_digits().data / 16).astype(np.float32)
    ink = x.sum(axis=1)
    return x, np.digitize(ink, np.quantile(ink, [0.25, 0.5, 0.75]))


def pixel_bundle(folder: Path) -> Path:
    """Write a bundle whose vectors are the 64 pixels themselves."""
    folder.mkdir()
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 64])
        for name in ("input", "vector")
    ]
    node = helper.make_node("Identity", ["input"], ["vector"])
    save_graph(folder / "encoder.onnx", [node], ends[:1], ends[1:], {})
    manifest = Manifest(
        name="pixels",
        created="2026-01-01T00:00:00+00:00",
        versions={"onnx": onnx.__version__},
        opset=17,
        input=Input(kind="features", dtype="float32", shape=(64,)),
        vector=64,
        normalized=False,
        distance=DistanceEntry(name="Euclidean", exact=True),
        verified=Verified(tolerance=1e-4, largest_difference=0.0, items=1),
    )
    write_manifest(folder, manifest)
    return folder


def make_index(folder: Path) -> Index:
    """Create an index of digits, with row numbers as ids."""
    x, _ = digits()
    bundle = Bundle.open(pixel_bundle(folder.with_suffix(".bundle")), device="cpu")
    create_local(folder, bundle, widths_of(bundle))
    index = open_index(folder)
    index.upsert([Item(str(n), arrays={"vector": row}) for n, row in enumerate(x)])
    return index


def play(
    index: Index,
    record: FeedbackRecord,
    searches: int,
    seed: int,
    *,
    voters: int = VOTERS,
    taste: np.ndarray | None = None,
    voter: str = "v",
) -> None:
    """Let users search and click as a server would note it; the taste is thickness by default."""
    x, thickness = digits()
    if taste is None:
        taste = thickness
    rng = np.random.default_rng(seed)
    served = index.follow()
    trials = [trial for trial in record.open_trials() if trial.explore]
    noted = []
    marks = []
    for n in range(searches):
        query = int(rng.integers(len(x)))
        hits = [hit.id for hit in index.search(x[query], 51) if hit.id != str(query)]
        credits: tuple[float, ...] = ()
        challenger = ""
        trial = next((trial for trial in trials if rng.random() < trial.share), None)
        if trial is not None:
            rows = load_head(trial.head)(x[[query, *map(int, hits)]])
            order = np.argsort(np.linalg.norm(rows[1:] - rows[0], axis=1), kind="stable")
            ranking = [hits[row] for row in order]
            hits, credits = team_draft(hits, ranking, 10, lambda: rng.random() < 0.5)
            challenger = trial.challenger
        hits = hits[:10]
        id = f"{seed}-{n}"
        name = f"{voter}{rng.integers(voters)}"
        keys = (id, 1e9 + n, name, base_of(served), served.sha256)
        noted.append(Search(*keys, None, str(query), tuple(hits), challenger, credits))
        likes = [rng.random() < (0.9 if taste[int(hit)] == taste[query] else 0.05) for hit in hits]
        marks.append(
            (id, name, {hit: CLICKED for hit, like in zip(hits, likes, strict=True) if like})
        )
    record.note_searches(noted)
    for id, name, clicked in marks:
        if clicked:
            record.add(id, name, clicked)


def precision(index: Index) -> float:
    """Return the share of hits of the query's thickness among ten, over 200 digits."""
    x, thickness = digits()
    rows = range(0, 1797, 9)
    return float(
        np.mean(
            [
                thickness[int(hit.id)] == thickness[row]
                for row in rows
                for hit in index.search(x[row], 11)[1:]
            ]
        )
    )


def feedback_file(index: Index) -> Path:
    return Path(str(index.path)) / FEEDBACK_FILE
