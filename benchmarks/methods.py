"""Losses, generators and learners on held-out classes with the same small budget: `retrieval
compare` with a search, on three class splits of three sets.

    npm pack @phosphor-icons/core@2.1.1 && tar xzf phosphor-icons-core-2.1.1.tgz
    pip install resvg-py==0.5.0 'embedding-retrieval[compare,efficientnet]' matplotlib
    OMP_NUM_THREADS=1 python benchmarks/methods.py --icons package
    OMP_NUM_THREADS=1 python benchmarks/methods.py --sets digits --methods triplet contrastive
    python benchmarks/methods.py --write

The second run is a part that takes five minutes; the last command writes the page from the kept
results. Interrupted runs resume, and `--methods` may add methods later. Everything takes about two
hours of one idle core. It needs Debian's package dataset-fashion-mnist (or a downloaded
Fashion-MNIST).

- digits: scikit-learn's 1,797; six of the ten classes train, four are searched.
- fashion: 200 images of each of Fashion-MNIST's ten classes; six train, four are searched.
- icons: 600 of Phosphor's 1,512 icons, a class each, in six weights (thin, light, regular, bold,
  fill, duotone), rendered with 32 × 32 pixels; 400 classes train, 200 are searched.

`retrieval compare --splits 3` draws a set's splits. Each setting is judged on two folds of the
training classes. Every net on a set has the same layers, batches and epochs. The search varies
every net's learning rate over three decades, and the parameter that a method's paper tunes (for
N-pair and lifted, only the rate).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from retrieval.training.comparison import statistics
from retrieval.training.comparison.plan import ComparisonPlan
from retrieval.training.comparison.result import Comparison, Contestant, Tuning
from retrieval.training.comparison.statistics import MeanDifference, number
from retrieval.training.comparison.tables import interval_text
from retrieval.training.comparison.tuning import Trial, agreement

import bench
import pictures

KEPT, PICTURE = bench.RAW / "methods.json", bench.RESULTS / "methods_search.png"
SEEDS, SPLITS, TRIALS, FOLDS = 3, 3, 16, 2
EPOCHS, BATCHES, WIDTH = 4, 12, 12
NET = {"name": "core.convnet", "width": WIDTH, "layers": 1}
RATES, OWN_RATE = (3e-5, 3e-2), 3e-3
METRICS = ("map_at_r", "recall_at_1", "r_precision")
PACKAGES = ("torch", "pytorch-metric-learning", "optuna", "resvg_py")
FRAMES = ("title", "pixels", "stem", "batch", "held", "background")
SETS: dict[str, dict[str, Any]] = {
    "digits": dict(zip(FRAMES, ("Digits", 8, 1, (5, 6), 4, 0), strict=True)),
    "fashion": dict(zip(FRAMES, ("Fashion-MNIST", 14, 1, (5, 6), 4, 0), strict=True)),
    "icons": dict(zip(FRAMES, ("Icons", 16, 2, (16, 4), 200, 255), strict=True)),
}
"""Pixels on a side for nets and learners, the net's stem, a batch (classes × items), the number of
searched classes, and the grey around a picture.
"""
SIZES = {"digits": (1797, 10), "fashion": (2000, 10), "icons": (3600, 600)}
"""Items and classes of each set."""

CLAIMS = (
    ("Multi-Similarity", "lifted", "Wang et al., CVPR 2019"),
    ("Proxy-Anchor", "Multi-Similarity", "Kim et al., CVPR 2020"),
    ("Circle", "Multi-Similarity", "Sun et al., CVPR 2020"),
    ("Recall@k, SiMix", "Recall@k", "Patel et al., CVPR 2022"),
    ("contextual", "Multi-Similarity", "Liao et al., ICML 2023"),
    ("Metrix contrastive", "contrastive", "Venkataramanan et al., ICLR 2022"),
    ("Metrix Multi-Similarity", "Multi-Similarity", "Venkataramanan et al., ICLR 2022"),
    ("Metrix Proxy-Anchor", "Proxy-Anchor", "Venkataramanan et al., ICLR 2022"),
    ("DANML", "N-pair", "Song et al., ANML"),
    ("DANML", "Multi-Similarity", "Song et al., ANML"),
    ("DAML", "triplet", "Duan et al., DAML"),
    ("DAMML", "triplet", "Duan et al., DAMML"),
    ("DAMML", "DAML", "Duan et al., DAMML"),
    ("AML confusion", "triplet", "ours, after Chen et al., IJCAI 2018"),
    ("GMML", "raw pixels", "Zadeh et al., ICML 2016"),
    ("LANML", "GMML", "Song et al., ANML"),
)
"""Rankings that papers claim, chosen before any method was measured on searched classes."""

Tables = dict[str, Any]
Kept = dict[str, Any]


def _range(low: float, high: float, log: bool = True) -> Tables:
    return {"low": low, "high": high, "log": log}


def _net(
    loss: str,
    key: str = "",
    own: float = 0.0,
    span: tuple[float, float] = (0, 0),
    log: bool = True,
    more: Tables | None = None,
    **further: Any,
) -> tuple[Tables, Tables]:
    """Return a net's recipe tables and its search: the learning rate, and one parameter of the
    loss.
    """
    values = {key: own} if key else {}
    tables = {"loss": {"name": loss, **values, **(more or {})}, "optimizer": {"lr": OWN_RATE}}
    spans = {f"loss.{key}": _range(*span, log=log)} if key else {}
    return tables | further, {"optimizer.lr": _range(*RATES), **spans}


TRIPLET: tuple[Any, ...] = ("daml.triplet", "margin", 0.5, (0.03, 1.5))
MINED = {"miner": {"name": "daml.semi_hard"}}
SIMILAR = {"miner": {"name": "pml.multi_similarity"}}
REAL = {"train": {"real_weight": 1.0}}
LANML = {"name": "anml.lanml", "gamma1": 1.0, "regularization": 0.3, "n_components": 32}
LANML |= {"max_queries": 500, "max_iter": 20}
RECALL: tuple[Any, ...] = ("rank_temperature", 0.01, (0.003, 0.3))
METRIX: tuple[Any, ...] = ("weight", 0.4, (0.1, 0.9), False)
TWO_VIEWS = {"views": 2, "positives": "item"}
PROXIES = {"lr": OWN_RATE, "lr_factor": {"loss": 100.0}}
"""Proxies and class weights learn 100 times faster than the net, as in Proxy-Anchor's code."""
FIRST = {"name": "metric", "epochs": 1, "train": ["backbone", "head", "loss"]}
"""First phase of DAML and DAMML."""
METHODS: dict[str, tuple[Tables, Tables]] = {
    "triplet": _net(*TRIPLET, **MINED),
    "contrastive": _net("pml.contrastive", "neg_margin", 0.8, (0.1, 1.5)),
    "Multi-Similarity": _net("pml.multi_similarity", "base", 0.5, (0.0, 0.9), False, **SIMILAR),
    "GMML": (
        {"learner": {"name": "aml.gmml", "t": 0.4, "regularization": 0.1}},
        {"learner.t": _range(0.01, 0.99, log=False), "learner.regularization": _range(1e-4, 10.0)},
    ),
    "LANML": (
        {"learner": LANML},
        {"learner.regularization": _range(0.003, 30.0), "learner.gamma1": {"choices": [-1.0, 1.0]}},
    ),
    "DANML": _net("anml.danml_mined", "gamma2", 30.0, (1.0, 100.0), more={"gamma1": 2.0}),
    "AML confusion": _net(
        *TRIPLET, **MINED, **REAL, generator={"name": "aml.confusion", "beta": 2.0}
    ),
    "Recall@k": _net("core.recall_at_k", *RECALL),
    "Recall@k, SiMix": _net("core.recall_at_k", *RECALL, more={"mix": True}),
    "contextual": _net("core.contextual", "weight", 0.4, (0.05, 0.9), False),
    "Metrix contrastive": _net("core.metrix", "negative_margin", 0.5, (0.1, 1.5)),
    "Metrix Multi-Similarity": _net("core.metrix_multi_similarity", *METRIX, **SIMILAR),
    "Metrix Proxy-Anchor": _net("core.metrix_proxy_anchor", *METRIX, optimizer=PROXIES),
    "Barlow Twins": _net(
        "core.barlow_twins", "weight", 0.005, (0.0005, 0.05), augmentation=TWO_VIEWS
    ),
    "Proxy-Anchor": _net("pml.proxy_anchor", "margin", 0.1, (0.0, 0.4), False, optimizer=PROXIES),
    "ArcFace": _net("pml.arc_face", "scale", 30.0, (4.0, 64.0), optimizer=PROXIES),
    "Circle": _net("pml.circle", "gamma", 80.0, (16.0, 256.0)),
    "margin": _net(
        *("pml.margin", "beta", 1.2, (0.4, 1.4), False, {"learn_beta": True}),
        miner={"name": "pml.distance_weighted"},
    ),
    "N-pair": _net("anml.npair"),
    "lifted": _net("anml.lifted"),
    "DAML": _net(
        *TRIPLET,
        **MINED,
        **REAL,
        generator={"name": "daml.hard_negative", "margin": 0.5},
        generator_optimizer={"lr": 1e-3},
        phase=[
            {**FIRST, "synthetic": False},
            {"name": "generator", "epochs": 1, "train": ["generator"]},
            {"name": "both", "epochs": EPOCHS - 2},
        ],
    ),
    "DAMML": _net(
        *TRIPLET,
        **MINED,
        combiner={"name": "daml.discriminator", "metrics": 4, "hidden": 64},
        phase=[FIRST, {"name": "all", "epochs": EPOCHS - 1}],
    ),
    "OAHU": (
        {"learner": {"name": "oahu.oahu", "learning_rate": 0.01, "tau": 1.9, "embedding": 32}},
        {"learner.learning_rate": _range(0.003, 0.3), "learner.tau": _range(0.1, 1.9, log=False)},
    ),
}
"""The recipe tables and the search of each method, in the order of measurement."""


def recipe(name: str, method: str, work: Path) -> Tables:
    about, (own, tried) = SETS[name], METHODS[method]
    file = work / f"{name}.npz"
    with np.load(file) as saved:
        classes = np.unique(saved["labels"])
    table: Tables = {
        "name": method,
        "data": {"name": "pictures.saved", "file": str(file)},
        "split": {"by": "class", "test": classes[: about["held"]].tolist(), "validation": 0.0},
        "evaluate": {"metrics": list(METRICS)},
        **own,
        "train": {"device": "cpu", **own.get("train", {})},
        "search": tried,
    }
    if "learner" in own:
        return {**table, "backbone": {"name": "core.pixels", "size": about["pixels"]}}
    if "phase" not in own:
        table["train"]["epochs"] = EPOCHS
    classes_per_batch, items = about["batch"]
    if "augmentation" in own:  # learns from pairs of views, without labels
        transforms = [pictures.MOVED | {"fill": about["background"]}]
        table["augmentation"] = {**own["augmentation"], "transforms": transforms}
        classes_per_batch, items = classes_per_batch * items // 2, 1
    return {
        **table,
        "sampler": {"classes": classes_per_batch, "items": items, "batches": BATCHES},
        "backbone": NET | {"size": about["pixels"], "stem": about["stem"]},
        "head": {"embedding_size": 32},
    }


def measure(name: str, work: Path, methods: Sequence[str], icons: Path) -> Kept:
    """Compare methods on a set, or resume; return the results to keep."""
    import retrieval
    import tomli_w

    (work / name / "recipes").mkdir(parents=True, exist_ok=True)
    if not (work / f"{name}.npz").exists():
        arrays, labels = pictures.load(name, icons, SIZES["icons"][1])
        assert (len(arrays), len(np.unique(labels))) == SIZES[name]
        np.savez(work / f"{name}.npz", images=arrays, labels=labels)
    files = []
    for method in methods:
        files.append(work / name / "recipes" / f"{method}.toml")
        files[-1].write_text(tomli_w.dumps(recipe(name, method, work)), encoding="utf-8")
    os.environ["RETRIEVAL_ALLOW_PLUGINS"] = "1"  # a resumed run has its own copy
    result = retrieval.compare(
        files,
        work / name / "comparison",
        seeds=SEEDS,
        splits=SPLITS,
        search=TRIALS,
        folds=FOLDS,
        plugins=[pictures.__file__],
        allow_different=True,
    )
    return {"contestants": [asdict(row) for row in result.contestants]}


def comparison(kept: Kept) -> Comparison:
    """Return the comparison from its kept results."""
    rows = []
    for row in kept["contestants"]:
        searches = [
            Tuning(search["values"], [Trial(**trial) for trial in search["trials"]])
            for search in row["searches"]
        ]
        rows.append(Contestant(row["name"], row["kind"], row["metrics"], searches))
    plan = ComparisonPlan({}, TRIALS, FOLDS, None, SEEDS, SPLITS)
    return Comparison(rows, plan, [], None, "triplet", test_baselines=True)


def tested(result: Comparison, pairs: Sequence[tuple[str, str]]) -> list[MeanDifference]:
    """Test pairs together, including baselines; the splits are the blocks."""
    return statistics.compare_pairs(result.primary, list(result.primary), pairs)


def beside(result: Comparison, base: str) -> tuple[list[str], list[str]]:
    """Return the recipes that are better than a baseline, and those that are worse."""
    tests = tested(result, [(recipe, base) for recipe in result.recipes])
    decided = [test for test in tests if test.decided]
    better = [test.contestant for test in decided if test.mean.value > 0]
    return better, [test.contestant for test in decided if test.contestant not in better]


def signed(difference: MeanDifference) -> str:
    half = f" ± {number(difference.mean.half)}" if difference.mean.half else ""
    return f"{difference.mean.value:+.3f}".replace("-", "−") + half


def metrics_table(result: Comparison) -> str:
    """Return a table of metrics, the agreement of the folds and the best learning rates."""
    rows = []
    for row in sorted(result.contestants, key=lambda row: -result.mean(row, METRICS[0]).value):
        tuned = [search for search in row.searches if "optimizer.lr" in search.values]
        rates = sorted(search.values["optimizer.lr"] for search in tuned)
        rows.append(
            [
                row.name if row.recipe else f"*{row.name}*",
                *(interval_text(result.mean(row, metric)) for metric in METRICS),
                bench.decimals(agreed(row), 2) if row.recipe else "",
                ", ".join(f"{rate:.2g}" for rate in rates),
            ]
        )
    head = ["", "MAP@R", "Recall@1", "R-precision", "folds' ρ", "rates chosen"]
    return bench.markdown(head, rows)


def section(name: str, kept: Kept) -> str:
    result, about, (items, classes) = comparison(kept), SETS[name], SIZES[name]
    lines = ""
    for base in (row.name for row in result.contestants if row.kind in ("raw", "frozen")):
        above, below = beside(result, base)
        lines += (
            f"- Against {base}: better {', '.join(above) or 'none'}; worse"
            f" {', '.join(below) or 'none'}; the others are not decided"
            f" ({len(result.recipes)} tests).\n"
        )
    batch, per_class = about["batch"]
    return f"""
        ## {about["title"]}

        {items:,} images, {classes - about["held"]} classes to train, {about["held"]} to search.
        Nets and learners see {about["pixels"]} × {about["pixels"]} pixels; a batch is {batch} ×
        {per_class} images.

        {metrics_table(result)}

        **{result.conclusion}** (all pairs of methods)

        {lines}
    """


def summary(sets: Kept) -> str:
    """Return one sentence for each set."""
    lines = ""
    for name, kept in sets.items():
        result = comparison(kept)
        above, below = beside(result, "raw pixels")
        count = len(result.recipes)
        rhos = [agreed(row) for row in result.contestants if row.recipe]
        lines += (
            f"- {SETS[name]['title']}: of {count} methods, {len(above)} are better than raw pixels,"
            f" {len(below)} worse, {count - len(above + below)} not decided; the folds' ρ is"
            f" {bench.decimals(min(rhos), 2)} to {bench.decimals(max(rhos), 2)}.\n"
        )
    return lines


def agreed(row: Contestant) -> float:
    """Return the mean rank correlation of the folds over the splits."""
    folds = [agreement(search.trials) for search in row.searches]
    return float(np.mean([fold.rho for fold in folds if fold]))


def rankings(raw: Kept) -> str:
    """Return the papers' claims beside our results."""
    results = {name: comparison(kept) for name, kept in raw.items()}
    measured = set.intersection(*(set(result.primary) for result in results.values()))
    claims = [claim for claim in CLAIMS if {claim[0], claim[1]} <= measured]
    cells: list[list[str]] = [list(claim) for claim in claims]
    for result in results.values():
        tests = tested(result, [(better, worse) for better, worse, _ in claims])
        for row, test in zip(cells, tests, strict=True):
            row.append(f"**{signed(test)}**" if test.decided else signed(test))
    head = ["", "claimed above", "by", *(SETS[name]["title"] for name in results)]
    return f"""
        ## Claimed rankings

        Differences of MAP@R, with intervals at the level of Holm's correction within a column; bold
        ones are decided at 5 %. A bold difference below 0 is the other way round than claimed, at
        this budget. A difference that is not decided says nothing against its claim.

        {bench.markdown(head, cells)}
    """


def picture(points: dict[str, list[list[float]]], file: Path) -> None:
    """Draw the learning rates of the search, then and now, with a line for each method."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, 2, sharex=True, sharey=True, figsize=(9, 1.2 + 0.3 * len(points)), dpi=100
    )
    for place, title in enumerate(("a new sampler for each trial", "one sampler for a search")):
        for line, rates in enumerate(points.values()):
            axes[place].plot(rates[place], [line] * TRIALS, "o", alpha=0.5, markersize=5)
            axes[place].plot(rates[place][:4], [line] * 4, "k|", markersize=10)
        axes[place].set(xscale="log", title=title, xlabel="learning rate")
        axes[place].set_yticks(range(len(points)), list(points))
    figure.tight_layout()
    figure.savefig(file, metadata={"Software": None})
    pyplot.close(figure)


def render(raw: Kept) -> str:
    sets = raw["sets"]
    methods = [row["name"] for row in sets["digits"]["contestants"] if row["name"] in METHODS]
    return bench.page(f"""
        # Methods side by side, at a small budget

        `python benchmarks/methods.py` compares {len(methods)} methods by `retrieval compare` with
        {TRIALS} trials, {FOLDS} folds, {SPLITS} class splits and {SEEDS} seeds. {raw["machine"]},
        one thread; {raw["versions"]}.

        **The budget is small**: `core.convnet` from scratch (three stages of a convolution, the
        first {WIDTH} channels wide; 32 numbers an item), {EPOCHS} epochs of {BATCHES} batches, no
        augmentation, a constant rate. The page shows methods at a small budget; papers measure them
        with pretrained nets and long training. A claim that fails here may hold at a larger budget.

        ± is Student's 95 % interval over the splits, each the mean over its seeds; p values are
        corrected by Holm's method within each table. Splits of ten classes overlap, so the
        intervals of digits and Fashion-MNIST are too narrow. *Folds' ρ* is the mean rank
        correlation of the trials' scores between the two folds; near 0, the search could not
        distinguish the settings. Rows in italics are baselines.

        **What differs**: learners (GMML, LANML, OAHU) are fitted to pixels and have no epochs.
        "Triplet" uses semi-hard negatives; AML confusion, DAML and DAMML add a generator or a
        combiner to this loss. The first epoch of DAML and DAMML trains the metric alone. Proxies
        and class weights learn 100 times faster than the net. **Barlow Twins has no labels**: it
        sees two views of each image, which are turned, moved, scaled and sheared a little.

        {summary(sets)}
        {rankings(sets)}
        ## What the search draws

        ![Rates that a search of {TRIALS} trials draws for each net](methods_search.png)

        The rates of {TRIALS} trials for each net on the first split of digits; bars mark the first
        four. Left: an earlier search made a new sampler for each trial, so the nets shared their
        second to fourth rate. (Its rates were computed later, with scores that fall with the
        distance from today's choice.) Right: the current search.
        {"".join(section(name, sets[name]) for name in SETS)}
    """)


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument(
        "--work", type=Path, default=bench.WORK / "methods", help="folder of finished runs"
    )
    parser.add_argument("--icons", type=Path, default=Path("package"), help="npm's package")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument(
        "--write", action="store_true", help="write the page from the kept results; run nothing"
    )
    options = parser.parse_args()
    raw = json.loads(KEPT.read_text(encoding="utf-8"))
    if not options.write:
        arguments = (options.work, options.methods, options.icons)
        sets = {name: measure(name, *arguments) for name in options.sets}
        if set(sets) != set(SETS):
            print(bench.page("".join(section(name, kept) for name, kept in sets.items())))
            return
        raw |= {"machine": bench.machine(), "versions": bench.versions(*PACKAGES)}
        raw["commit"] = bench.commit()
        for name, kept in sets.items():
            # methods that were not measured now keep their earlier rows
            both = [*raw["sets"][name]["contestants"], *kept["contestants"]]
            rows = {row["name"]: row for row in both}
            raw["sets"][name] = {"contestants": list(rows.values())}
        for row in comparison(raw["sets"]["digits"]).contestants:
            if row.name in raw["rates"]:
                trials = row.searches[0].trials
                raw["rates"][row.name][1] = [trial.values["optimizer.lr"] for trial in trials]
        bench.write(KEPT, json.dumps(raw, indent=1, ensure_ascii=False) + "\n")
    bench.write(bench.RESULTS / "methods.md", bench.with_commits(render(raw), raw))
    picture(raw["rates"], PICTURE)


if __name__ == "__main__":
    main()
