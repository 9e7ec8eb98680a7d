"""LANML, PNCA, GMML and AML on the pixels of digits, beside raw pixels, PCA, NCA and Fisher's
discriminants: the figures of models/digits-lanml and models/digits-gmml.

    python benchmarks/digits_learners.py --output FOLDER            # goes on where it stopped
    python benchmarks/digits_learners.py --learners aml.gmml aml.aml

scikit-learn's digits, half of each class held out, a fifth of the other half for choosing: the
candidates below by MAP@R there, mean over three seeds (of the split). Then each learner's choice is
asked about the held-out half of each seed. That half was looked at twice: LANML's first grid of λ
ended at its choice, .3, so it was widened (.003 out, 1 and 3 in), and the choice stayed.
"""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from retrieval.evaluation.evaluate_run import evaluate
from retrieval.recipe.read import read_recipe
from retrieval.run.open import Run
from retrieval.training.trainer import train

from bench import MODELS, WORK, arguments, markdown

RECIPE = MODELS / "digits-lanml" / "recipe.toml"
SEEDS = (0, 1, 2)
METRICS = ["recall_at_1", "recall_at_2", "recall_at_4", "recall_at_8", "r_precision", "map_at_r"]


def grid(**values: tuple[float, ...]) -> list[dict[str, Any]]:
    """Return every combination of parameters."""
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


WIDTHS = (9, 16, 32)
CANDIDATES: dict[str, list[dict[str, Any]]] = {
    "core.pca": grid(n_components=WIDTHS),
    "core.lda": [{}],
    "core.nca": grid(n_components=WIDTHS),
    "anml.lanml": grid(
        gamma1=(-1.0, 1.0), regularization=(0.03, 0.3, 1.0, 3.0), n_components=WIDTHS
    ),
    "anml.pnca": grid(alpha=(0.1, 0.3, 1.0), n_components=WIDTHS),
    "aml.gmml": grid(t=(0.0, 0.2, 0.4, 0.6, 0.8), regularization=(0.0, 0.03)),
    "aml.aml": [
        values | {"regularization": 0.03}
        for values in grid(t=(0.2, 0.4, 0.6, 0.8), alpha=(1.0, 10.0))
    ],
}


def fitted(folder: Path, name: str, given: dict[str, Any], seed: int) -> Path:
    """Fit one learner, unless it is done already."""
    if not (folder / "summary.json").is_file():
        values = {"name": name, **given}
        table = ", ".join(f"{key} = {json.dumps(value)}" for key, value in values.items())
        made = read_recipe(RECIPE, [f"learner={{{table}}}", f"split.seed={seed}"])
        train(folder, made, report=print, resume=folder.is_dir())
    return folder


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--output", type=Path, default=WORK / "digits_learners")
    parser.add_argument("--learners", nargs="*", default=list(CANDIDATES), choices=list(CANDIDATES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, list[dict[str, float]]] = {"raw pixels": []}
    for name in options.learners:
        candidates, means = CANDIDATES[name], []
        for i, given in enumerate(candidates):
            scores = []
            for seed in SEEDS:
                run = fitted(options.output / f"{name}-{i}-{seed}", name, given, seed)
                summary = json.loads((run / "summary.json").read_text())
                scores.append(summary["validation"]["map_at_r"])
            means.append(statistics.mean(scores))
            print(f"{name} {given}: validation MAP@R {means[-1]:.4f}", flush=True)
        best = means.index(max(means))
        title = f"{name} {', '.join(f'{k} = {v}' for k, v in candidates[best].items())}".strip()
        rows[title] = []
        for seed in SEEDS:
            folder = options.output / f"{name}-{best}-{seed}"
            if not (folder / "evaluation-test.json").is_file():
                evaluate(Run.open(folder), metrics=METRICS, baseline=name == options.learners[0])
            figures = json.loads((folder / "evaluation-test.json").read_text())["metrics"]
            rows[title].append(figures["trained"])
            rows["raw pixels"] += [figures["raw pixels"]] if "raw pixels" in figures else []
    lines = [
        [title, *(f"{statistics.mean(v):.3f} ± {statistics.stdev(v):.3f}" for v in columns)]
        for title, runs in rows.items()
        for columns in [[[run[metric] for run in runs] for metric in METRICS]]
    ]
    print("\n" + markdown(["", *METRICS], lines))


if __name__ == "__main__":
    main()
