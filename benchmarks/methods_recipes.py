"""The recipes that `methods.py` compares: three sets, and on each of them the same methods with the same batches, epochs and net.

What a method is (loss, miner, generator, combiner, learner) and what may be tried for it stands in `METHODS`; all the rest is the set's.
The learning rate is tried for every net, and beside it the one parameter that its paper tunes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent
PLUGINS = [str(HERE / "glyphs.py")]
EPOCHS, BATCHES = 5, 16
METRICS = ["map_at_r", "recall_at_1", "r_precision"]
SETS: dict[str, dict[str, Any]] = {
    "digits": {"size": 16, "stem": 1, "classes": 5, "items": 8, "pixels": 8},
    "fashion": {"size": 28, "stem": 2, "classes": 5, "items": 8, "pixels": 14},
    "glyphs": {"size": 32, "stem": 2, "classes": 20, "items": 4, "pixels": 16},
}
"""Pixels of the net, its stem, a batch (classes × items), and pixels on a side for the learners."""
NET = {"name": "core.convnet", "width": 16, "layers": 1}
PER_CLASS = 200
"""Fashion-MNIST's images of each class, drawn once with seed 0."""
TRAIN, SEARCH = 400, 100
"""Glyphs' classes, of twelve images each."""
HELD_OUT = ["5", "6", "7", "8", "9"]

Tables = dict[str, Any]
Tried = dict[str, Any]


def _between(low: float, high: float, log: bool = False) -> Tried:
    return {"low": low, "high": high, "log": log}


def _net(loss: Tables, tried: Tried, **further: Any) -> tuple[Tables, Tried]:
    """Return a method that trains the net, and what may be tried for it."""
    rate = {"optimizer.lr": _between(1e-3, 1e-2, log=True)}
    return {"loss": loss, "optimizer": {"lr": 3e-3}, **further}, {**rate, **tried}


def _proxies(loss: Tables, tried: Tried) -> tuple[Tables, Tried]:
    """Return a method whose loss has weights of its own, which take ten times the rate."""
    made, all_tried = _net(loss, tried)
    return {**made, "optimizer": {"lr": 3e-3, "lr_factor": {"loss": 10.0}}}, all_tried


SEMI_HARD: Tables = {"name": "daml.triplet", "margin": 0.5}
MARGIN: Tried = {"loss.margin": _between(0.1, 1.0, log=True)}
MINED: Tables = {"miner": {"name": "daml.semi_hard"}}
DAML: Tables = {
    "generator": {"name": "daml.hard_negative", "margin": 0.5},
    "generator_optimizer": {"lr": 1e-3},
    "train": {"real_weight": 1.0},
    "phase": [
        {"name": "metric", "epochs": 1, "train": ["backbone", "head", "loss"], "synthetic": False},
        {"name": "generator", "epochs": 1, "train": ["generator"]},
        {"name": "both", "epochs": EPOCHS - 2},
    ],
}
"""Algorithm 1 within the epochs that all have: in one of them the metric stands still."""

METHODS: dict[str, tuple[Tables, Tried]] = {
    "Multi-Similarity": _net(
        {"name": "pml.multi_similarity", "base": 0.5},
        {"loss.base": _between(0.2, 0.8)},
        miner={"name": "pml.multi_similarity"},
    ),
    "triplet": _net(SEMI_HARD, MARGIN, **MINED),
    "GMML": (
        {"learner": {"name": "aml.gmml", "t": 0.4, "regularization": 0.1}},
        {"learner.t": _between(0.05, 0.9), "learner.regularization": _between(0.001, 1.0, log=True)},
    ),
    "LANML": (
        {"learner": {"name": "anml.lanml", "gamma1": 1.0, "regularization": 0.3, "n_components": 32}},
        {"learner.regularization": _between(0.03, 3.0, log=True), "learner.gamma1": {"choices": [-1.0, 1.0]}},
    ),
    "warm OAHU": (
        {"learner": {"name": "oahu.warm"}},
        {"learner.prior": _between(5.0, 80.0, log=True), "learner.ridge": _between(0.1, 10.0, log=True)},
    ),
    "OAHU": (
        {"learner": {"name": "oahu.oahu", "learning_rate": 0.01, "tau": 1.9, "embedding": 32}},
        {"learner.learning_rate": _between(0.003, 0.3, log=True), "learner.tau": _between(0.1, 1.9)},
    ),
    "DAML": _net(SEMI_HARD, MARGIN, **MINED, **DAML),
    "DAMML": _net(
        SEMI_HARD, MARGIN, **MINED, combiner={"name": "daml.discriminator", "metrics": 4, "hidden": 64}
    ),
    "AML confusion": _net(
        SEMI_HARD,
        MARGIN,
        **MINED,
        generator={"name": "aml.confusion", "beta": 2.0},
        train={"real_weight": 1.0},
    ),
    "DANML": _net(
        {"name": "anml.danml_mined", "gamma1": 2.0, "gamma2": 30.0},
        {"loss.gamma2": _between(10.0, 60.0, log=True)},
    ),
    "N-pair": _net({"name": "anml.npair"}, {}),
    "improved N-pair": _net(
        {"name": "anml.improved_npair", "gamma": 16.0}, {"loss.gamma": _between(4.0, 32.0, log=True)}
    ),
    "lifted": _net({"name": "anml.lifted", "margin": 0.5}, MARGIN),
    "improved lifted": _net({"name": "anml.improved_lifted", "margin": 0.5}, MARGIN),
    "Proxy-NCA": _proxies(
        {"name": "pml.proxy_nca", "softmax_scale": 8.0},
        {"loss.softmax_scale": _between(1.0, 16.0, log=True)},
    ),
    "improved Proxy-NCA": _proxies(
        {"name": "anml.improved_proxy_nca", "gamma2": 8.0},
        {"loss.gamma2": _between(2.0, 16.0, log=True)},
    ),
    "Proxy-Anchor": _proxies(
        {"name": "pml.proxy_anchor", "alpha": 32.0}, {"loss.alpha": _between(8.0, 64.0, log=True)}
    ),
    "contrastive": _net(
        {"name": "pml.contrastive", "neg_margin": 0.8}, {"loss.neg_margin": _between(0.3, 1.4)}
    ),
    "Circle": _net(
        {"name": "pml.circle", "m": 0.4, "gamma": 32.0}, {"loss.gamma": _between(16.0, 128.0, log=True)}
    ),
    "SoftTriple": _proxies(
        {"name": "pml.soft_triple", "centers_per_class": 4}, {"loss.la": _between(5.0, 40.0, log=True)}
    ),
    "SupCon": _net({"name": "pml.sup_con"}, {"loss.temperature": _between(0.05, 0.5, log=True)}),
    "ArcFace": _proxies(
        {"name": "pml.arc_face", "margin": 15.0, "scale": 24.0},
        {"loss.scale": _between(8.0, 64.0, log=True)},
    ),
    "margin": _net(
        {"name": "pml.margin", "beta": 0.9},
        {"loss.beta": _between(0.6, 1.3)},
        miner={"name": "pml.distance_weighted"},
    ),
}
"""Each method's tables, and what a search may try."""


def table(name: str, method: str, work: Path) -> Tables:
    """Return the recipe of a method on a set."""
    about, (own, tried) = SETS[name], METHODS[method]
    held = HELD_OUT if name != "glyphs" else json.loads((work / "glyphs.json").read_text(encoding="utf-8"))
    data = (
        {"name": "core.digits"}
        if name == "digits"
        else {"name": "glyphs.saved", "file": str(work / f"{name}.npz")}
    )
    made: Tables = {
        "name": method,
        "plugins": [] if name == "digits" else PLUGINS,
        "data": data,
        "split": {"by": "class", "test": held, "validation": 0.0},
        "evaluate": {"metrics": METRICS},
        **own,
        "train": {"device": "cpu", **own.get("train", {})},
        "search": tried,
    }
    if "learner" in own:
        made["backbone"] = {"name": "core.pixels", "size": about["pixels"]}
        if name != "digits" and method == "LANML":
            made["learner"] = {**own["learner"], "max_queries": 1000, "max_iter": 20}
        return made
    if "phase" not in own:
        made["train"]["epochs"] = EPOCHS
    made["sampler"] = {"classes": about["classes"], "items": about["items"], "batches": BATCHES}
    made["backbone"] = {**NET, "size": about["size"], "stem": about["stem"]}
    made["head"] = {"embedding_size": 32}
    return made


def fashion() -> dict[str, NDArray[Any]]:
    """Return 200 images (N, 28, 28) of each of Fashion-MNIST's classes, drawn by a fixed seed, and their labels (N,)."""
    from retrieval.host.create import create

    whole = create("dataset", "core.fashion_mnist")
    labels, rng = np.array(whole.labels), np.random.default_rng(0)
    kept = np.sort(
        np.concatenate(
            [rng.permutation(np.flatnonzero(labels == each))[:PER_CLASS] for each in np.unique(labels)]
        )
    )
    return {"images": whole.arrays[kept], "labels": labels[kept]}


def _glyphs(work: Path) -> dict[str, NDArray[Any]]:
    import glyphs

    drawn = glyphs.Glyphs(TRAIN + SEARCH, SETS["glyphs"]["size"])
    assert drawn.arrays is not None
    order = np.random.default_rng(0).permutation(np.unique(drawn.labels))
    (work / "glyphs.json").write_text(json.dumps(order[TRAIN:].tolist()), encoding="utf-8")
    return {"images": drawn.arrays, "labels": np.array(drawn.labels)}


def prepare(name: str, work: Path) -> list[Path]:
    """Write a set's images where they are not kept yet, and its recipes.

    Returns:
        The recipes' files, in the order of `METHODS`.
    """
    import tomli_w

    folder = work / name / "recipes"
    folder.mkdir(parents=True, exist_ok=True)
    if name != "digits" and not (work / f"{name}.npz").exists():
        arrays = fashion() if name == "fashion" else _glyphs(work)
        np.savez(work / f"{name}.npz", **arrays)  # type: ignore[arg-type]
    files = []
    for method in METHODS:
        file = folder / f"{method}.toml"
        file.write_text(tomli_w.dumps(table(name, method, work)), encoding="utf-8")
        files.append(file)
    return files
