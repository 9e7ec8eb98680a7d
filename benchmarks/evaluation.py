"""Recall@1 and MAP@R: `retrieval.evaluate` beside other libraries' evaluators, and FAISS by hand.

    # writes results/evaluation.md; needs 4 GB of memory, torchmetrics and sentence-transformers
    python benchmarks/evaluation.py
    python benchmarks/evaluation.py --only 1,000          # sets with these words; nothing is kept

"Images" are Fashion-MNIST's training images as 128 principal components of unit length, in ten
classes, so MAP@R needs the nearest tenth of the gallery. "Classes of N" are Gaussian clouds on the
unit sphere with N items each. Each item searches among all others, or queries in a gallery of their
own. Each contestant runs in a new process on one thread, after a warm-up on a small set.

FAISS by hand is an exact index, and the two metrics as one would write them with NumPy.
sentence-transformers' evaluator has no way to leave out the query itself, so it takes part where
there is a gallery. torchmetrics takes a row for each pair, so it measures Recall@1 of the smallest
set only.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

import bench

OURS, DEFAULT = "`retrieval.evaluate`", "`AccuracyCalculator()`"
BINS = '`AccuracyCalculator(k="max_bin_count")`'
FAISS, SENTENCES, TORCHMETRICS = "FAISS and NumPy", "sentence-transformers", "torchmetrics"
CALLS = 3


@dataclass(frozen=True)
class Set:
    """One set of vectors.

    Attributes:
        items: number of items, which are searched.
        width: number of dimensions.
        each: number of items of each class; `None` means Fashion-MNIST's images.
        queries: number of queries in addition to the items; 0 if the items are the queries.
        others: contestants besides `AccuracyCalculator(k="max_bin_count")` and FAISS.
    """

    items: int
    width: int = 128
    each: int | None = None
    queries: int = 0
    others: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The set's name on the page."""
        kind = f"classes of {self.each}" if self.each else "images"
        size = f"{self.queries:,} in {self.items:,}" if self.queries else f"{self.items:,}"
        return f"{size} × {self.width}, {kind}"


SETS = (
    Set(1_000, 64, 10, others=(DEFAULT, TORCHMETRICS)),
    Set(5_000, 512, 4, others=(DEFAULT,)),
    Set(12_000, 256, 20, queries=3_000, others=(SENTENCES,)),
    Set(50_000, 128, 10, queries=2_000, others=(SENTENCES,)),
    Set(10_000),
    Set(20_000, 128, 15),
    Set(60_000, 128, 15),
    Set(20_000),
)


def items_of(chosen: Set) -> tuple[Any, Any, Any, Any]:
    """Return vectors and labels of the queries, and of the gallery; the same if it has none."""
    random = np.random.default_rng(0)
    if chosen.each is None:
        from retrieval.data.image_archives import read_idx
        from sklearn.decomposition import PCA

        images = read_idx(bench.FASHION / "train-images-idx3-ubyte.gz", 3).reshape(60_000, -1)
        rows = random.permutation(len(images))[: chosen.items]
        labels = read_idx(bench.FASHION / "train-labels-idx1-ubyte.gz", 1)[rows].astype(np.int64)
        vectors = PCA(chosen.width, random_state=0).fit_transform(images[rows] / 255)
    else:
        classes = chosen.items // chosen.each
        labels = np.arange(chosen.items + chosen.queries, dtype=np.int64) % classes
        centres = random.normal(size=(classes, chosen.width))
        vectors = centres[labels] + 2.2 * random.normal(size=(len(labels), chosen.width))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = vectors.astype(np.float32)
    if not chosen.queries:
        return vectors, labels, vectors, labels
    size = chosen.items
    return vectors[size:], labels[size:], vectors[:size], labels[:size]


def figures_of(name: str, queries: Any, truth: Any, gallery: Any, labels: Any) -> dict[str, float]:
    """Return a contestant's Recall@1 and, if it has it, MAP@R."""
    alone = gallery is queries
    if name == OURS:
        from retrieval.evaluation.evaluation import evaluate

        where = {} if alone else {"gallery": gallery, "gallery_labels": labels}
        result = evaluate(queries, truth, metrics=["recall_at_1", "map_at_r"], **where)
        return dict(result.values)
    if name == FAISS:
        return _by_hand(queries, truth, gallery, labels, alone)
    import torch

    torch.set_num_threads(1)
    if name == SENTENCES:
        return _by_sentence_transformers(queries, truth, gallery, labels)
    if name == TORCHMETRICS:
        from torchmetrics.retrieval import RetrievalPrecision

        scores = torch.from_numpy(queries) @ torch.from_numpy(gallery).T
        kept = ~torch.eye(len(queries), dtype=torch.bool)
        right = torch.from_numpy(truth)[:, None] == torch.from_numpy(labels)
        number = torch.arange(len(queries))[:, None].expand_as(scores)
        precision = RetrievalPrecision(top_k=1)
        return {"recall_at_1": float(precision(scores[kept], right[kept], indexes=number[kept]))}
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    names = {"precision_at_1": "recall_at_1", "mean_average_precision_at_r": "map_at_r"}
    k = "max_bin_count" if name == BINS else None
    calculator = AccuracyCalculator(include=tuple(names), k=k, device=torch.device("cpu"))
    vectors = [torch.from_numpy(queries), torch.from_numpy(truth)]
    if not alone:
        vectors += [torch.from_numpy(gallery), torch.from_numpy(labels)]
    return {names[key]: float(value) for key, value in calculator.get_accuracy(*vectors).items()}


def _by_hand(queries: Any, truth: Any, gallery: Any, labels: Any, alone: bool) -> dict[str, float]:
    import faiss

    index = faiss.IndexFlatL2(gallery.shape[1])
    index.add(gallery)
    relevant = np.bincount(labels)[truth] - alone
    near = index.search(queries, int(relevant.max()) + alone)[1]
    if alone:
        # The query itself is nearly always first, but not where an equal vector precedes it.
        itself = near == np.arange(len(near))[:, None]
        itself[~itself.any(1), -1] = True
        near = near[~itself].reshape(len(near), -1)
    right = labels[near] == truth[:, None]
    ranks = np.arange(1, right.shape[1] + 1)
    within = right & (ranks <= relevant[:, None])
    precision = (within.cumsum(1) / ranks * within).sum(1) / relevant
    return {"recall_at_1": float(right[:, 0].mean()), "map_at_r": float(precision.mean())}


def _by_sentence_transformers(queries: Any, truth: Any, gallery: Any, labels: Any) -> Any:
    import torch
    from sentence_transformers import util
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    members: dict[int, set[str]] = {}
    for row, label in enumerate(labels.tolist()):
        members.setdefault(label, set()).add(str(row))
    depth = len(members[int(truth[0])])
    evaluator = InformationRetrievalEvaluator(
        {str(row): str(row) for row in range(len(queries))},
        {str(row): str(row) for row in range(len(gallery))},
        {str(row): members[label] for row, label in enumerate(truth.tolist())},
        mrr_at_k=[1],
        ndcg_at_k=[1],
        accuracy_at_k=[1],
        precision_recall_at_k=[1],
        map_at_k=[depth],
        score_functions={"cosine": util.cos_sim},
        write_csv=False,
    )
    # The vectors are given, so no text is embedded.
    evaluator.embed_inputs = lambda model, sentences, *_, **__: torch.from_numpy(queries)
    found = evaluator.compute_metrices(None, corpus_embeddings=torch.from_numpy(gallery))["cosine"]
    return {"recall_at_1": found["accuracy@k"][1], "map_at_r": found["map@k"][depth]}


def contestant(name: str, data: Set) -> dict[str, Any]:
    """Return a contestant's metrics, CPU seconds, and additional memory in MB."""
    bench.one_thread()
    queries, truth, gallery, labels = items_of(data)
    small = queries[:300], truth[:300] % 10
    figures_of(name, *small, *(small if gallery is queries else (gallery, labels)))
    before, times = bench.status("VmRSS"), []
    for _ in range(CALLS):
        began = time.process_time()
        values = figures_of(name, queries, truth, gallery, labels)
        times.append(time.process_time() - began)
        if times[0] > 5:
            break
    added = (bench.status("VmHWM") - before) / 2**20
    return {"cpu": statistics.median(times), "added": added, "values": values}


def measure(only: list[str] | None) -> list[dict[str, Any]]:
    """Run each contestant on each set, one after the other."""
    rows = []
    for data in SETS:
        if only and not any(word in data.title for word in only):
            continue
        for name in (OURS, BINS, FAISS, *data.others):
            row = {"set": data.title, "contestant": name}
            try:
                row |= bench.alone(contestant, name, data)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    return rows


def render(raw: dict[str, Any]) -> str:
    lines, apart = [], 0.0
    for row in raw["rows"]:
        ours = bench.chosen(raw["rows"], set=row["set"])[0]
        cells = [row["set"], row["contestant"]]
        if "failed" in row:
            lines.append([*cells, row["failed"], "", "", "", ""])
            continue
        ratio = row["cpu"] / ours["cpu"]
        values = [row["values"].get(key) for key in ("recall_at_1", "map_at_r")]
        lines.append(
            [*cells, f"{row['cpu']:.2f}", f"{ratio:.1f} ×", f"{row['added']:,.0f}"]
            + ["–" if value is None else f"{value:.4f}" for value in values]
        )
        apart = max(apart, *(abs(value - ours["values"][k]) for k, value in row["values"].items()))
    head = ["set", "contestant", "CPU s", "÷ ours", "added MB", "Recall@1", "MAP@R"]
    return bench.page(f"""
        # Evaluation: Recall@1 and MAP@R

        `python benchmarks/evaluation.py`. Each item searches among all others, or queries in a
        gallery. *Images* are Fashion-MNIST's as 128 principal components of unit length, 10
        classes; other sets are Gaussian clouds on the unit sphere. `retrieval` gives the result of
        double precision, with ties ordered by row; its products are in single precision, and only
        pairs that their rounding leaves in doubt are measured again. *FAISS and NumPy* is an exact
        index and the two metrics written by hand.

        {raw["machine"]}, one thread, each contestant in a new process; {raw["versions"]}; load
        average {raw["load"]} at the start. CPU seconds are the median of up to {CALLS} calls;
        memory is the rise of the process's peak.

        {bench.markdown(head, lines)}

        The contestants' metrics on the same items differ by at most {apart:.0e}.
    """)


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--only", nargs="+", help="sets with these words; nothing is kept")
    options = parser.parse_args()
    bench.one_thread()
    packages = ["torch", "numpy", "faiss-cpu", "pytorch-metric-learning"]
    raw = bench.machine_of(*packages, "sentence-transformers", "torchmetrics")
    raw["rows"] = measure(options.only)
    bench.finish("evaluation", raw, render(raw), keep=not options.only)


if __name__ == "__main__":
    main()
