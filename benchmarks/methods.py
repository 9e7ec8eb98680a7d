"""Losses, generators and learners side by side on held-out classes, all with one budget: `retrieval.compare` on three sets.

    python benchmarks/methods.py --work FOLDER                 # goes on where it stopped
    python benchmarks/methods.py --work FOLDER --sets digits   # one set; --methods takes some methods, and more may be added later
    python benchmarks/methods.py --work FOLDER --fonts FONTS   # the fonts are not under /usr/share/fonts
    python benchmarks/methods.py --page                        # the page alone, from what is kept

`methods_recipes.py` has the recipes: the same net, batches and epochs for each method on a set, and as many settings tried. A setting is judged on
classes of the training side that it did not train on; the classes to search are out of reach until it is chosen.

- digits: scikit-learn's, classes 0-4 train and 5-9 are searched.
- Fashion-MNIST: classes 0-4 train and 5-9 are searched, a fixed draw of each class's images.
- glyphs: Han characters in twelve font families (`glyphs.py` says which Debian packages it needs): many classes, few items each, as Omniglot has.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # counts before NumPy is imported

from retrieval.training.comparison.result import Comparison, Contestant
from retrieval.training.comparison.search import Trial, best
from retrieval.training.comparison.statistics import (
    Difference,
    compare,
    holm,
    number,
    probability,
    said,
)
from retrieval.training.comparison.written import interval, settings

import cards
import intervals
import methods_recipes as recipes
from page_tables import markdown

HERE = Path(__file__).parent
KEPT = HERE / "results" / "raw" / "methods.json"
PAGE = HERE / "results" / "methods.md"
SEEDS, TRIALS, FOLDS = 5, 4, 2
RAW, FROZEN = "raw pixels", "pretrained, frozen"
TITLES = {"digits": "scikit-learn's digits", "fashion": "Fashion-MNIST", "glyphs": "Glyphs"}

CLAIMS = (
    ("lifted", "contrastive", "Oh Song et al., CVPR 2016"),
    ("lifted", "triplet", "Oh Song et al., CVPR 2016"),
    ("N-pair", "triplet", "Sohn, NIPS 2016"),
    ("margin", "triplet", "Wu et al., ICCV 2017"),
    ("Proxy-NCA", "triplet", "Movshovitz-Attias et al., ICCV 2017"),
    ("SoftTriple", "Proxy-NCA", "Qian et al., ICCV 2019"),
    ("Multi-Similarity", "lifted", "Wang et al., CVPR 2019"),
    ("Proxy-Anchor", "Multi-Similarity", "Kim et al., CVPR 2020"),
    ("Proxy-Anchor", "Proxy-NCA", "Kim et al., CVPR 2020"),
    ("Circle", "Multi-Similarity", "Sun et al., CVPR 2020"),
    ("improved lifted", "lifted", "Song et al., ANML"),
    ("improved N-pair", "N-pair", "Song et al., ANML"),
    ("improved Proxy-NCA", "Proxy-NCA", "Song et al., ANML"),
    ("DANML", "N-pair", "Song et al., ANML"),
    ("DANML", "Multi-Similarity", "Song et al., ANML"),
    ("DAML", "triplet", "Duan et al., DAML"),
    ("DAMML", "triplet", "Duan et al., DAMML"),
    ("DAMML", "DAML", "Duan et al., DAMML"),
    ("AML confusion", "triplet", "ours, after Chen et al., IJCAI 2018"),
    ("GMML", RAW, "Zadeh et al., ICML 2016"),
    ("LANML", "GMML", "Song et al., ANML"),
    ("warm OAHU", "OAHU", "ours"),
)
"""Rankings to look for, written down before any method was measured on classes to search: what is said to be better, than what, and by whom."""

KEYS = ("contestants", "seeds", "trials", "folds", "missing", "base")
"""What is kept of a `Comparison`."""
Kept = dict[str, Any]


def measure(name: str, work: Path, methods: Sequence[str]) -> Kept:
    """Compare methods on a set, or go on with it."""
    import retrieval
    from retrieval.data.splits import make_splits
    from retrieval.recipe.read import read_recipe
    from retrieval.run.build import build_dataset

    files = [file for file in recipes.prepare(name, work) if file.stem in methods]
    result = retrieval.compare(
        files,
        work / name / "comparison",
        seeds=SEEDS,
        search=TRIALS,
        folds=FOLDS,
        allow_different=True,
    )
    recipe = read_recipe(files[0])
    splits = make_splits(build_dataset(recipe), recipe.split)
    counts = {
        "train": len(splits.train),
        "train_classes": len(splits.train_classes),
        "query": len(splits.query),
        "query_classes": len(set(splits.labels[splits.query].tolist())),
    }
    kept = asdict(result)
    return {
        "counts": counts,
        **{key: kept[key] for key in KEYS},
    }


def comparison(kept: Kept) -> Comparison:
    """Return what `retrieval.compare` returned, from what is kept of it."""
    contestants = [
        Contestant(**{**each, "trials": [Trial(**trial) for trial in each["trials"]]})
        for each in kept["contestants"]
    ]
    rest = {key: kept[key] for key in KEYS if key != "contestants"}
    return Comparison(contestants=contestants, different=[], **rest)


def paired(result: Comparison, pairs: Sequence[tuple[str, str]]) -> list[Difference]:
    """Return the differences of some pairs, corrected together by Holm's method."""
    figures = {each.name: [f["map_at_r"] for f in each.figures] for each in result.contestants}
    found = [compare({one: figures[one], other: figures[other]}, [one])[0] for one, other in pairs]
    corrected = iter(holm([each.p for each in found if each.p is not None]))
    return [
        each if each.p is None else Difference(each.one, each.other, each.mean, each.p, next(corrected))
        for each in found
    ]


def verdict(each: Difference) -> str:
    """Return what is found of a ranking that has `one` above `other`."""
    if each.p is None:
        return "as said, with every seed" if each.mean.value > 0 else "the other way round, with every seed"
    if not each.certain:
        return "not told apart"
    return "as said" if each.mean.value > 0 else "the other way round"


def figures_table(result: Comparison) -> str:
    """Return all figures, the best MAP@R first."""
    chosen = dict(line.split(": ", 1) for line in settings(result))
    rows = []
    for each in sorted(result.contestants, key=lambda one: -result.mean(one, "map_at_r").value):
        score = best(each.trials).score if each.trials else None
        rows.append(
            [
                each.name if each.recipe else f"*{each.name}*",
                *(interval(result.mean(each, metric)) for metric in recipes.METRICS),
                "" if score is None else f"{score:.3f}",
                chosen.get(each.name, "")
                .replace("optimizer.", "")
                .replace("loss.", "")
                .replace("learner.", ""),
            ]
        )
    return markdown(["", "MAP@R", "Recall@1", "R-precision", "MAP@R in the search", "settings chosen"], rows)


def rankings(result: Comparison) -> list[str]:
    """Return the papers' rankings beside what is found, and a sentence for each that is not found."""
    there = {each.name for each in result.contestants}
    claims = [claim for claim in CLAIMS if {claim[0], claim[1]} <= there]
    found = paired(result, [(one, other) for one, other, _ in claims])
    rows = []
    for (one, other, source), each in zip(claims, found, strict=True):
        half = f" ± {number(each.mean.half)}" if each.mean.half else ""
        sign = "+" if each.mean.value >= 0 else "−"
        p = "" if each.corrected is None else probability(each.corrected)
        rows.append([one, other, source, f"{sign}{number(abs(each.mean.value))}{half}", p, verdict(each)])
    verdicts = [verdict(each).partition(",")[0] for each in found]
    tests = sum(each.p is not None for each in found)
    unsure = [
        f"{one} and {other}"
        for (one, other, _), what in zip(claims, verdicts, strict=True)
        if what == "not told apart"
    ]
    counted = ", ".join(
        f"{verdicts.count(what)} {what}" for what in ("as said", "the other way round", "not told apart")
    )
    return [
        markdown(["", "said to be above", "by", "MAP@R, difference", "p, corrected", "here"], rows),
        "",
        f"Of these {len(found)} rankings: {counted}.",
        "",
        *([f"Not told apart with {result.seeds} seeds: {'; '.join(unsure)}.", ""] if unsure else []),
        *(
            f"- Does not reproduce, {one} above {other}: {said(each, result.seeds, tests)}"
            for (one, other, _), each, what in zip(claims, found, verdicts, strict=True)
            if what == "the other way round"
        ),
        "",
    ]


def baselines(result: Comparison) -> list[str]:
    """Return whether the recipe that the search alone would choose beats both baselines, and which ones do at all."""
    names = [name for name in (RAW, FROZEN) if any(each.name == name for each in result.contestants)]
    tried = [each for each in result.contestants if each.trials]
    chosen = max(tried, key=lambda each: best(each.trials).score or 0.0).name
    both = paired(result, [(chosen, name) for name in names])
    tests = sum(each.p is not None for each in both)
    above = all(verdict(each).startswith("as said") for each in both)
    everyone = paired(result, [(name, base) for name in result.recipes for base in names])
    learnt = paired(result, [(name, "untrained") for name in result.recipes])
    better = [each.one for each in learnt if each.certain and each.mean.value > 0]
    beating = [
        name
        for name in result.recipes
        if all(verdict(each).startswith("as said") for each in everyone if each.one == name)
    ]
    return [
        f"**The search alone would choose {chosen}, and held out it {'beats' if above else 'does not beat'} {' and '.join(names)}.** "
        + " ".join(said(each, result.seeds, tests) for each in both),
        "",
        f"Of all {len(result.recipes)} methods, {len(beating)} {'is' if len(beating) == 1 else 'are'} above {' and '.join(names)} held out "
        f"(corrected for {len(everyone)} comparisons){': ' + '; '.join(beating) if beating else ''}. "
        f"{len(better)} {'is' if len(better) == 1 else 'are'} shown to be better than the net untrained (corrected for {len(learnt)}){': ' + '; '.join(better) if better else ''}.",
        "",
    ]


def models() -> list[str]:
    """Return how the recipes of `models/` stand beside raw pixels, from what their cards keep."""
    done, rows = cards.kept(), []
    for name, (row, *_) in cards.CARDS.items():
        runs = [done[cards.key(row, seed)] for seed in range(100) if cards.key(row, seed) in done]
        raw = [run["figures"].get(RAW, runs[0]["figures"][RAW]) for run in runs]
        of = {metric: [run["figures"]["trained"][metric] for run in runs] for metric in cards.COMPARED}
        less = {
            metric: [own - base[metric] for own, base in zip(of[metric], raw, strict=True)]
            for metric in cards.COMPARED
        }
        split = tomllib.loads((cards.MODELS / name / "recipe.toml").read_text(encoding="utf-8"))["split"][
            "by"
        ]
        seen = "others" if split == "class" else "the same"
        rows.append(
            [
                f"`{name}`",
                seen,
                intervals.interval(of["map_at_r"]),
                *(intervals.interval(less[m], sign=True) for m in ("map_at_r", "recall_at_1")),
            ]
        )
    above = [
        row[0] for row in rows if row[3].startswith("+") and row[4].startswith("+") and row[1] == "others"
    ]
    return [
        "## The recipes of `models/`",
        "",
        "What their cards have, beside raw pixels; a frozen ImageNet net was not measured there. Where the classes to search are those that trained, this says nothing of new ones.",
        "",
        markdown(
            ["", "classes searched", "MAP@R", "MAP@R, less raw pixels", "Recall@1, less raw pixels"], rows
        ),
        "",
        f"On classes that did not train, above raw pixels in both figures: {', '.join(above) if above else 'none of them'}.",
        "",
    ]


def section(name: str, kept: Kept) -> list[str]:
    """Return a set's part of the page."""
    result, counts = comparison(kept), kept["counts"]
    about = recipes.SETS[name]
    left = [method for method in recipes.METHODS if method not in result.recipes]
    return [
        f"## {TITLES[name][0].upper()}{TITLES[name][1:]}",
        "",
        f"{counts['train']:,} images of {counts['train_classes']} classes train, {counts['query']:,} of {counts['query_classes']} others are searched. The net sees "
        f"{about['size']} pixels{' with a stem of ' + str(about['stem']) if about['stem'] > 1 else ''}, a batch is {about['classes']} × {about['items']} images; learners see {about['pixels']} × {about['pixels']} pixels.",
        "",
        figures_table(result),
        "",
        *([f"**Not run yet on this set**: {'; '.join(left)}.", ""] if left else []),
        f"{result.conclusion} (all pairs, corrected for {sum(each.p is not None for each in result.differences)} comparisons)",
        "",
        *baselines(result),
        *rankings(result),
    ]


def render(raw: Kept) -> str:
    """Return the page."""
    missing = [title for name, title in TITLES.items() if name not in raw["sets"]]
    some = next(iter(raw["sets"].values()))
    return "\n".join(
        [
            "# Methods side by side, at a small budget",
            "",
            f"`python benchmarks/methods.py` compares them by `retrieval compare`. {raw['machine']}, torch {raw['torch']}, one thread. Mean ± Student's 95 % interval over {some['seeds']} seeds; differences are",
            "paired by seed, p values corrected by Holm's method. Italic rows are baselines: nothing is learned there.",
            "",
            f"**The budget is small**: `core.convnet` from scratch (three stages of one convolution, the first {recipes.NET['width']} channels wide; 32 numbers an item), {recipes.EPOCHS} epochs of {recipes.BATCHES} batches, no augmentation, a constant rate, and {some['trials']} settings",
            f'tried for each method, judged by MAP@R on the training classes in {some["folds"]} folds. It says what a method does with little, not what papers measure with pretrained nets, long training and large sets. "Triplet" takes semi-hard negatives; it is',
            "what DAML, DAMML and AML confusion build upon. A fold that has fewer classes than a batch takes them all, and more items of each.",
            "",
            "**What is not the same for all**: the learners (GMML, LANML, OAHU and warm OAHU) have no epochs; they are fitted to pixels, not to the net's features. DAML's generator takes one of the epochs for itself, so its metric has one less.",
            "",
            *(
                [
                    f"**Not run yet**: {', '.join(missing)}. The same command goes on with {'it' if len(missing) == 1 else 'them'}.",
                    "",
                ]
                if missing
                else []
            ),
            "**Without training**: `benchmarks/results/levels.md` has recipes that beat raw pixels on the held-out classes of digits and Fashion-MNIST.",
            "",
            "**Not here**: EMNIST. No package carries it, and it could not be downloaded where this was measured; `core.emnist` reads it.",
            "",
            *(line for name in TITLES if name in raw["sets"] for line in section(name, raw["sets"][name])),
            *models(),
        ]
    )


def read() -> Kept:
    """Return what is kept."""
    found: Kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {"sets": {}}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "retrieval-methods")
    parser.add_argument("--fonts", type=Path, help="where Debian's font packages are unpacked")
    parser.add_argument("--sets", nargs="*", default=list(TITLES), choices=list(TITLES))
    parser.add_argument("--methods", nargs="*", default=list(recipes.METHODS), choices=list(recipes.METHODS))
    parser.add_argument("--page", action="store_true", help="run nothing")
    options = parser.parse_args()
    if not options.page:
        import torch

        import glyphs
        from training import machine

        torch.set_num_threads(1)
        glyphs.FONTS = options.fonts or glyphs.FONTS
        options.work.mkdir(parents=True, exist_ok=True)
        for name in options.sets:
            found = measure(name, options.work.resolve(), options.methods)
            kept = read()
            kept |= {"machine": machine(), "torch": torch.__version__, "sets": {**kept["sets"], name: found}}
            KEPT.write_text(json.dumps(kept, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(render(read()), encoding="utf-8")
    print(render(read()))


if __name__ == "__main__":
    main()
