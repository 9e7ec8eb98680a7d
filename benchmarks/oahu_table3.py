"""OAHU, its baselines and the warm start on Fashion-MNIST: Table 3 and Figure 4 of the paper, and where OAHU does help.

    OMP_NUM_THREADS=1 python benchmarks/oahu_table3.py

Each figure goes to results/raw/oahu_table3.jsonl as soon as it is measured, and a second run goes on from there. Some 15 minutes of CPU
time. Protocol: every choice (constants of the baselines, experts, components and ridge of `oahu.warm`) was made on the development parts of
two other splits, and for features on other images and other choices of classes than those measured; the queries are 4,000 images a repeat that lie in neither of those parts. 35,000 of
the other images are the development part, as in the paper: they give the triplets and are the references.
"""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import RESULTS, Kept, resume_arguments
from oahu_report import POINTS, draw, report

Floats = NDArray[Any]
REPEATS = 3
QUERIES = 4000
CACHE: Path | None = None
"""Where features of the images are kept from run to run."""


def learners() -> dict[str, Callable[[int], Any]]:
    """Return what is compared: each makes a learner of a seed."""
    from retrieval_oahu import LEGO, OAHU, OASIS, OPML, RDML, Warm

    return {
        "LEGO": lambda seed: LEGO(seed=seed),
        "LEGO, median targets": lambda seed: LEGO(upper=50, lower=50, seed=seed),
        "RDML": lambda seed: RDML(seed=seed),
        "OASIS": lambda seed: OASIS(seed=seed),
        "OPML": lambda seed: OPML(seed=seed),
        "OAHU": lambda seed: OAHU(seed=seed),
        "OAHU, untrained": lambda seed: OAHU(seeds=0, closure=0, seed=seed),
        "OAHU, η .01 τ 1.9": lambda seed: OAHU(learning_rate=0.01, tau=1.9, seed=seed),
        "oahu.warm": lambda seed: Warm(seed=seed),
    }


def fashion() -> tuple[Floats, Floats]:
    """Return all 70,000 images as (N, 784) between 0 and 1, and their classes."""
    from retrieval_core import fashion_mnist

    data = fashion_mnist()
    return data.arrays.reshape(len(data), -1).astype(np.float32) / 255, np.array(data.labels, dtype=np.int64)


def split(repeat: int) -> tuple[Floats, Floats]:
    """Return rows of the development part (35,000) and of the queries."""
    chosen_on = [np.random.default_rng(seed).permutation(70_000)[:35_000] for seed in (0, 1)]
    untouched = np.setdiff1d(np.arange(70_000), np.concatenate(chosen_on))
    queries = np.random.default_rng(100).permutation(untouched)[QUERIES * repeat : QUERIES * (repeat + 1)]
    rest = np.random.default_rng(200 + repeat).permutation(np.setdiff1d(np.arange(70_000), queries))
    return rest[:35_000], queries


def nearest(query: Floats, references: Floats, k: int, inner: bool = False, own: bool = False) -> Floats:
    """Return rows (Q, k), nearest first; `inner` by the largest inner product, `own` leaves out the item itself."""
    query, references = query.astype(np.float32), references.astype(np.float32)
    norms = 0 if inner else (references**2).sum(1)
    found = []
    for start in range(0, len(query), 500):
        d = norms - 2 * query[start : start + 500] @ references.T
        if own:
            d[np.arange(len(d)), start + np.arange(len(d))] = np.inf
        some = np.argpartition(d, k, axis=1)[:, :k]
        found.append(
            np.take_along_axis(some, np.argsort(np.take_along_axis(d, some, 1), axis=1, kind="stable"), 1)
        )
    return np.concatenate(found)


def vote(labels: Floats) -> Floats:
    """Return the most frequent label of each row (Q, k); of equally frequent ones the nearest."""
    counts = (labels[:, :, None] == labels[:, None]).sum(2)
    return labels[np.arange(len(labels)), counts.argmax(1)]


def classified(learner: Any, refs: Floats, labels: Floats, query: Floats, k: int = 5) -> Floats:
    """Return labels of the queries by each learner's own way; None is Euclid."""
    kind = type(learner).__name__
    if kind == "OAHU":
        return learner.classify(query, learner.spaces(refs), labels, k)
    if kind == "OASIS":
        return vote(labels[nearest(learner.queries(query), learner.transform(refs), k, inner=True)])
    if learner is not None:
        query, refs = learner.transform(query), learner.transform(refs)
    return vote(labels[nearest(query, refs, k)])


def scores(truth: Floats, found: Floats) -> dict[str, float]:
    """Return error and macro-F1."""
    from sklearn.metrics import f1_score

    return {"error": float((truth != found).mean()), "f1": float(f1_score(truth, found, average="macro"))}


def triplet_rows(labels: Floats, seed: int) -> Floats:
    """Return the paper's 10,000 triplets (T, 3)."""
    from retrieval_oahu.streams import paper_stream

    return np.array(list(paper_stream(labels, 5000, 5000, seed=seed)))


Job = tuple[str, str, int]


def jobs() -> Iterator[tuple[Job, Callable[[], list[dict[str, Any]]]]]:
    """Return what is to be measured: part, method and repeat, and a function that gives its rows."""
    x, y = fashion()
    made = learners()
    for repeat in range(REPEATS):
        dev, queries = split(repeat)
        for name in ("Euclid", *made):
            yield (
                ("table", name, repeat),
                lambda n=name, r=repeat, d=dev, q=queries: table_rows(n, r, x, y, d, q),
            )
    for repeat in range(REPEATS):
        dev, queries = split(repeat)
        for name in ("LEGO", "RDML", "OASIS", "OPML", "OAHU", "oahu.warm"):
            if not name.startswith("oahu.warm") and repeat:
                continue
            yield (
                ("curve", name, repeat),
                lambda n=name, r=repeat, d=dev, q=queries: curve_rows(n, r, x, y, d, q),
            )
        for name in ("Euclid", "OAHU", "OAHU, η .01 τ 1.9", "oahu.warm"):
            yield ("retrieval", name, repeat), lambda n=name, r=repeat: retrieval_rows(n, r, x, y)
        for name in ("Euclid", "LEGO", "OAHU", "OAHU, η .01 τ 1.9", "oahu.warm"):
            yield (
                ("few", name, repeat),
                lambda n=name, r=repeat, d=dev, q=queries: few_rows(n, r, x, y, d, q),
            )
    features: list[Any] = []
    for repeat in range(REPEATS):
        for name in ("Euclid", "OAHU, η .01 τ 1.9", "oahu.warm"):
            yield (
                ("features", name, repeat),
                lambda n=name, r=repeat: feature_rows(
                    n, r, features or features.extend(efficientnet(x, y)) or features, y
                ),
            )
    for repeat, learned in enumerate(further_choices()):
        for name in ("Euclid", "oahu.warm"):
            yield (
                ("choices", name, repeat),
                lambda n=name, r=repeat, c=learned: feature_rows(
                    n, r, features or features.extend(efficientnet(x, y)) or features, y, c
                ),
            )
    for repeat in range(REPEATS):
        own: list[Any] = []
        for name in ("Euclid", "OAHU, η .01 τ 1.9", "oahu.warm"):
            yield (
                ("convnet", name, repeat),
                lambda n=name, r=repeat, o=own: feature_rows(n, r, o or o.extend(convnet(r, x, y)) or o, y),
            )


def table_rows(
    name: str, repeat: int, x: Floats, y: Floats, dev: Floats, queries: Floats
) -> list[dict[str, Any]]:
    """Error, F1 and utilisation of Table 3; error with few references; AUC of pairs."""
    from sklearn.metrics import roc_auc_score

    learner = None
    seconds = 0.0
    if name != "Euclid":
        started = time.process_time()
        learner = learners()[name](repeat).fit(x[dev], y[dev])
        seconds = time.process_time() - started
    row: dict[str, Any] = scores(y[queries], classified(learner, x[dev], y[dev], x[queries]))
    row["fit_seconds"] = seconds
    if learner is not None:
        row["utilization"] = learner.constraint_utilization_
    for few in (100, 1000):
        row[f"error_{few}"] = scores(y[queries], classified(learner, x[dev[:few]], y[dev[:few]], x[queries]))[
            "error"
        ]
    a, b = np.random.default_rng(repeat).integers(0, len(queries), (2, 20_000))
    a, b = a[a != b], b[a != b]
    one, other = x[queries[a]], x[queries[b]]
    if learner is None:
        d = ((one - other) ** 2).sum(1)
    elif name == "OASIS":
        d = -(learner.queries(one) * learner.transform(other)).sum(1)
    else:
        d = ((learner.transform(one) - learner.transform(other)) ** 2).sum(1)
    row["auc"] = float(roc_auc_score(y[queries[a]] == y[queries[b]], -d))
    return [row]


def few_rows(
    name: str, repeat: int, x: Floats, y: Floats, dev: Floats, queries: Floats
) -> list[dict[str, Any]]:
    """Error with each of ten draws of 100 references."""
    learner = None if name == "Euclid" else learners()[name](repeat).fit(x[dev], y[dev])
    errors = []
    for draw_ in range(10):
        some = np.random.default_rng(400 + draw_).permutation(dev)[:100]
        errors.append(scores(y[queries], classified(learner, x[some], y[some], x[queries]))["error"])
    return [{"errors": errors}]


def curve_rows(
    name: str, repeat: int, x: Floats, y: Floats, dev: Floats, queries: Floats
) -> list[dict[str, Any]]:
    """Error after so many triplets, and the weights along the way."""
    learner = learners()[name](repeat).prepare(x[dev])
    rows = np.random.default_rng(repeat).permutation(triplet_rows(y[dev], repeat))
    found, before = [], 0
    asked = queries if name.startswith("oahu.warm") else queries[:2000]
    for point in POINTS:
        learner.learn_from(
            x[dev[rows[start : min(start + 256, point)]]] for start in range(before, point, 256)
        )
        before = point
        e = scores(y[asked], classified(learner, x[dev], y[dev], x[asked]))["error"]
        row: dict[str, Any] = {"triplets": point, "error": e}
        if name.startswith("oahu.warm"):
            row["euclid"] = (
                scores(y[asked], classified(None, x[dev], y[dev], x[asked]))["error"]
                if not found
                else found[0]["euclid"]
            )
        found.append(row)
    if hasattr(learner, "weights_"):
        every = max(1, len(learner.weights_) // 64)
        found[-1]["weights"] = learner.weights_[::every].round(4).tolist()
        found[-1]["weights_at"] = learner.weights_at_[::every].tolist()
    return found


def retrieval_rows(name: str, repeat: int, x: Floats, y: Floats) -> list[dict[str, Any]]:
    """Recall@K and precision@10 on classes that were not trained on: each item asks for the others."""
    rng = np.random.default_rng(300 + repeat)
    order = rng.permutation(70_000)
    train = order[y[order] < 5][:15_000]
    test = order[y[order] >= 5][:5000]
    if name == "Euclid":
        return [retrieved("Euclid", nearest(x[test], x[test], 10, own=True), y[test])]
    learner = learners()[name](repeat).fit(x[train], y[train])
    codes = learner.transform(x[test])
    summed = nearest(codes, codes, 10, own=True)
    if not name.startswith("OAHU"):
        return [retrieved(name, summed, y[test])]
    spaces = learner.spaces(x[test])
    exact, _ = spaces.retrieve(spaces, 11)
    without = np.array([[i for i in row if i != n][:10] for n, row in enumerate(exact.tolist())])
    overlap = float(np.mean([len(np.intersect1d(a, b)) / 10 for a, b in zip(without, summed, strict=True)]))
    return [
        retrieved(f"{name}: Eq 27, a space at a time", without, y[test]) | {"overlap": overlap},
        retrieved(f"{name}: weighted sum, one index", summed, y[test]),
    ]


def retrieved(title: str, rows: Floats, labels: Floats) -> dict[str, Any]:
    """Return Recall@1, 5, 10 and Precision@10."""
    hits = labels[rows] == labels[:, None]
    return {"title": title, "p10": float(hits.mean())} | {
        f"r{k}": float(hits[:, :k].any(1).mean()) for k in (1, 5, 10)
    }


LEARNED = [(0, 2, 4, 6, 8), (1, 3, 5, 7, 9), (0, 1, 2, 3, 4)]
"""The classes that triplets are of; the others are searched."""
CHOSEN_ON = [(0, 1, 5, 6, 7), (2, 3, 4, 8, 9), (0, 2, 3, 5, 9), (1, 4, 6, 7, 8)]
"""The same on other images, for choosing `oahu.warm`'s form."""


def further_choices() -> list[tuple[int, ...]]:
    """Return nine random choices of five classes, none of `LEARNED` or of those that anything was chosen on, or their other halves."""
    known = {*LEARNED, *CHOSEN_ON}
    known |= {tuple(c for c in range(10) if c not in some) for some in known}
    rng, found = np.random.default_rng(500), list[tuple[int, ...]]()
    while len(found) < 9:
        some = tuple(sorted(rng.permutation(10)[:5].tolist()))
        if some not in known and some not in found:
            found.append(some)
    return found


def feature_rows(
    name: str, repeat: int, kept: list[Any], y: Floats, learned: tuple[int, ...] | None = None
) -> list[dict[str, Any]]:
    """5-NN error on features of classes that were not trained on, along the stream."""
    f, labels = kept
    learned = learned or LEARNED[repeat]
    seen = np.isin(labels, learned)
    train, test = np.flatnonzero(seen), np.flatnonzero(~seen)
    learner = None if name == "Euclid" else learners()[name](repeat).prepare(f[train])
    rows = np.random.default_rng(repeat).permutation(triplet_rows(labels[train], repeat))
    found, before = [], 0
    refs, asked = test[: len(test) // 2], test[len(test) // 2 :]
    for point in POINTS if learner is not None else (0,):
        if learner is not None:
            learner.learn_from(
                f[train[rows[start : min(start + 256, point)]]] for start in range(before, point, 256)
            )
        before = point
        found.append(
            {"triplets": point} | scores(labels[asked], classified(learner, f[refs], labels[refs], f[asked]))
        )
    return found


def efficientnet(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return features (N, 1280) of 10,000 of the images at 64 × 64 pixels, and their classes."""
    import torch

    from retrieval_core import efficientnet_lite0

    torch.set_num_threads(1)
    model = efficientnet_lite0(size=64).eval()
    mean, std = (
        torch.tensor(v).view(1, -1, 1, 1) for v in (model.preprocessing.mean, model.preprocessing.std)
    )
    chosen = np.random.default_rng(7).permutation(70_000)[:10_000]
    if CACHE is not None and CACHE.exists():
        return np.load(CACHE), y[chosen]
    found = []
    with torch.inference_mode():
        for start in range(0, len(chosen), 100):
            image = torch.from_numpy(x[chosen[start : start + 100]].reshape(-1, 1, 28, 28))
            image = torch.nn.functional.interpolate(image, size=(64, 64), mode="bilinear").expand(
                -1, 3, -1, -1
            )
            found.append(model((image - mean) / std).numpy())
    if CACHE is not None:
        np.save(CACHE, np.concatenate(found))
    return np.concatenate(found), y[chosen]


def convnet(repeat: int, x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return features (N, 64) of the same 10,000 images by the net of models/fashion-mnist, trained on the stream's classes only."""
    import torch
    from retrieval.recipe.read import read_recipe
    from retrieval.run.open import load_run
    from retrieval.training.trainer import train

    torch.set_num_threads(1)
    unseen = [str(c) for c in range(10) if c not in LEARNED[repeat]]
    recipe = Path(__file__).parents[1] / "models" / "fashion-mnist" / "recipe.toml"
    made = read_recipe(recipe, [f"split.test={json.dumps(unseen)}", f"seed={repeat}"])
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train(run, made, report=lambda _: None)
        net = load_run(run).model.backbone.eval()
    chosen = np.random.default_rng(7).permutation(70_000)[:10_000]
    mean, std = (np.array(v, np.float32)[0] for v in (net.preprocessing.mean, net.preprocessing.std))
    images = torch.from_numpy((x[chosen].reshape(-1, 1, 28, 28) - mean) / std)
    with torch.inference_mode():
        return torch.cat([net(part) for part in images.split(500)]).numpy(), y[chosen]


def main() -> None:
    """Measure what is missing, and write the page and the figure."""
    parts = ["table", "curve", "retrieval", "features", "convnet", "few", "choices"]
    parser = resume_arguments(__doc__)
    parser.add_argument("--parts", nargs="*", default=parts, choices=parts)
    parser.add_argument("--methods", nargs="*", default=None, help="only these")
    parser.add_argument("--repeats", nargs="*", type=int, default=range(9), help="only these")
    parser.add_argument("--cache", type=Path, help="an .npy file to keep the images' features in")
    options = parser.parse_args()
    global CACHE
    CACHE = options.cache
    warnings.filterwarnings("ignore", message="tau is")
    kept = Kept("oahu_table3", options.fresh)
    done = {(r["part"], r["method"], r["repeat"]) for r in kept.rows}
    for job, measure in jobs():
        part, method, repeat = job
        if job in done or part not in options.parts or repeat not in options.repeats:
            continue
        if options.methods is not None and method not in options.methods:
            continue
        started = time.process_time()
        found = [{"part": part, "method": method, "repeat": repeat, **row} for row in measure()]
        found[0]["cpu"] = time.process_time() - started
        for row in found:
            kept.add(row)
    if not options.fresh:
        draw(kept.rows, RESULTS / "oahu_table3.png")
    kept.finish(report(kept.rows, "oahu_table3.png"))


if __name__ == "__main__":
    main()
