"""Do AML's adversarial negatives help a deep loss?

`aml.confusion` beside the same losses without it, and `aml.geometric_mean`.

Fashion-MNIST reduced to 2,000 images per class; 0–4 train, 5–9 are searched; a small convolutional
net, 64 dimensions, three epochs of 60 batches. Three arms for each loss, with the same seeds,
weights and order of batches:

- plain: the loss on real items;
- not moved: the triplets that the generator is given, with their real negatives in the generator's
  place (β = 10⁹). Without a miner these are each positive pair with one random negative, and not
  all triplets;
- confusion: the same with the adversarial negatives.

Parameters are chosen on the training classes alone: the net trains on 0, 1, 3 and is judged on 2,
4; one seed, highest MAP@R. First the loss's own, without a generator; then, with those, β and
`real_weight`, so the third arm has had more tries than the first. Then three other seeds train on
0–4, and the test classes are looked at once.

    python benchmarks/aml_deep.py            # goes on where it stopped, in benchmarks/work/aml_deep
    python benchmarks/aml_deep.py --report benchmarks/results/aml_deep.md

About 15 minutes of one core.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import Runs, reduced_fashion, report, spread, work_arguments

PER_CLASS = 2000
SEEDS = (0, 1, 2)
CHOOSING_SEED = 100
METRICS = ["recall_at_1", "recall_at_8", "map_at_r"]
SHOWN = ("R@1", "R@8", "MAP@R")
STILL = 1e9

Tables = dict[str, Any]


def triplet(miner: bool) -> list[Tables]:
    made: list[Tables] = []
    for margin in (0.05, 0.2, 0.5):
        made.append({"loss": {"name": "pml.triplet_margin", "margin": margin}})
        if miner:
            made[-1]["miner"] = {
                "name": "pml.triplet_margin",
                "margin": margin,
                "type_of_triplets": "semihard",
            }
    return made


def danml() -> list[Tables]:
    return [
        {
            "loss": {
                "name": "anml.danml",
                "gamma1": g1,
                "gamma2": g2,
                "positive_threshold": p,
                "negative_threshold": p,
            }
        }
        for g1, g2, p in ((1.0, 25.0, 0.5), (2.0, 30.0, 0.5), (2.0, 30.0, 0.65))
    ]


def geometric_mean(alphas: tuple[float, ...], betas: tuple[float, ...]) -> list[Tables]:
    return [
        {"loss": {"name": "aml.geometric_mean", "alpha": alpha, "beta": beta, "ridge": ridge}}
        for alpha in alphas
        for beta in betas
        for ridge in (0.001, 0.01, 0.1)
    ]


LOSSES = {"triplet": triplet(False), "triplet, semi-hard miner": triplet(True), "DANML": danml()}
GENERATORS: list[Tables] = [
    {"generator": {"name": "aml.confusion", "beta": beta}, "train": {"real_weight": weight}}
    for beta in (0.5, 2.0, 8.0)
    for weight in (0.0, 1.0)
]
DEEP = {
    "Eq 7 (geometric_mean, α = 0)": geometric_mean((0.0,), (1.0,)),
    "Eq 11 (geometric_mean)": geometric_mean((1.0,), (1.0, 10.0)),
}


def recipe(work: Path, tables: Tables, seed: int, choose: bool) -> Tables:
    """Return the recipe of one run; `choose`: on the training classes alone."""
    made: Tables = {
        "name": "aml-deep",
        "seed": seed,
        "optimizer": {"lr": 1e-3},
        "evaluate": {"metrics": METRICS},
        "data": {
            "name": "core.fashion_mnist",
            "folder": str(work / ("choose" if choose else "all")),
        },
        "backbone": {"name": "core.convnet", "size": 28, "width": 16},
        "head": {"embedding_size": 64},
        "sampler": {"classes": 3 if choose else 5, "items": 16, "batches": 60},
        "split": {
            "by": "class",
            "test": ["2", "4"] if choose else list("56789"),
            "validation": 0.0,
        },
    }
    made |= tables
    made["train"] = {"epochs": 3, "device": "cpu", "channels_last": True} | tables.get("train", {})
    return made


class Arms(Runs):
    """Runs of this benchmark's recipes."""

    def figures(self, tables: Tables, seed: int, choose: bool = False) -> dict[str, Any]:
        """Return a run's figures; train it if that was not done."""
        return self.run(recipe(self.work, tables, seed, choose))

    def choose(self, candidates: list[Tables]) -> Tables:
        """Return the candidate with the highest MAP@R on held-out training classes."""
        found = [self.figures(each, CHOOSING_SEED, True)["figures"] for each in candidates]
        return candidates[int(np.argmax([figures["map_at_r"] for figures in found]))]


def measure(results: Arms) -> dict[str, dict[str, Any]]:
    """Return each arm: what was chosen, and each seed's run."""
    arms: dict[str, Tables] = {}
    for name, candidates in LOSSES.items():
        plain = results.choose(candidates)
        confusion = results.choose([plain | generator for generator in GENERATORS])
        still = confusion | {"generator": {"name": "aml.confusion", "beta": STILL}}
        arms |= {
            f"{name}: plain": plain,
            f"{name}: not moved": still,
            f"{name}: confusion": confusion,
        }
    arms |= {name: results.choose(candidates) for name, candidates in DEEP.items()}
    return {
        name: {"chosen": tables, "runs": [results.figures(tables, seed) for seed in SEEDS]}
        for name, tables in arms.items()
    }


def chosen(tables: Tables) -> str:
    """Return an arm's parameters as a reader wants them."""
    values = {k: v for k, v in tables["loss"].items() if k != "name"}
    beta = tables.get("generator", {}).get("beta")
    if beta is not None:
        values |= {
            "β": "∞" if beta == STILL else beta,
            "real_weight": tables["train"]["real_weight"],
        }
    return ", ".join(f"{k} {v}" for k, v in values.items())


def lines(arms: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the report."""
    yield "# Adversarial negatives for deep losses (AML)\n"
    yield (
        "Made by `python benchmarks/aml_deep.py`, which says what is trained and how parameters"
        " were chosen. Fashion-MNIST, classes 0–4"
    )
    yield (
        "train and 5–9 are searched. Figures in %, mean ± standard deviation of three seeds;"
        " differences are of the same seed.\n"
    )
    yield f"| loss | parameters chosen | {' | '.join(SHOWN)} | training, CPU s |"
    yield "| --- " * 6 + "|"
    for name, arm in arms.items():
        figures = [spread([run["figures"][metric] for run in arm["runs"]]) for metric in METRICS]
        seconds = np.mean([run["seconds"] for run in arm["runs"]])
        yield f"| {name} | {chosen(arm['chosen'])} | {' | '.join(figures)} | {seconds:.1f} |"
    yield f"\n| from | to | {' | '.join(f'difference in {metric}' for metric in SHOWN)} |"
    yield "| --- " * 5 + "|"
    pairs = [
        (f"{name}: {x}", f"{name}: confusion") for name in LOSSES for x in ("plain", "not moved")
    ]
    pairs += [tuple(DEEP)]  # type: ignore[list-item]
    for before, after in pairs:
        differences = [
            spread(
                [
                    b["figures"][metric] - a["figures"][metric]
                    for a, b in zip(arms[before]["runs"], arms[after]["runs"], strict=True)
                ]
            )
            for metric in METRICS
        ]
        yield f"| {before} | {after} | {' | '.join(differences)} |"
    yield ""


def main() -> None:
    options = work_arguments(__doc__, "aml_deep").parse_args()
    torch.set_num_threads(1)
    runs = Arms(options.work.resolve())
    reduced_fashion(runs.work / "all", PER_CLASS, 10)
    reduced_fashion(runs.work / "choose", PER_CLASS, 5)
    report("\n".join(lines(measure(runs))), options.report, runs)


if __name__ == "__main__":
    main()
