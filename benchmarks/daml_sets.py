"""The sets of `daml_baselines.py`: frozen features, or drawings as they are, whole and their
training classes alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from retrieval.data.features import backbone_features
from retrieval.host.plugins import load_plugins
from retrieval.model.model import Model
from torch import nn

from bench import reduced_fashion

PER_CLASS = 1000
SIZE = 96
DRAWN = 24
COMPONENTS = 128
SEEDS = (0, 1, 2)
CHOOSING_SEED = 100
SETS = ("glyphs", "random", "few", "drawn", "fashion")
FEW = 60


def prepare(work: Path, sets: list[str]) -> None:
    """Write the sets: frozen features, reduced on training classes; all, and the training classes
    alone for choosing.
    """
    if {"few", "drawn", "random"} & set(sets):
        sets = ["glyphs", *sets]  # it says which classes are for what
    for name in dict.fromkeys(sets):
        if (work / f"{name}-choose.npz").exists():
            continue
        if name == "random":
            continue  # glyphs with fewer negatives
        if name == "few":
            few_classes(work)
            continue
        if name == "drawn":
            drawings(work)
            continue
        x, y, training, fitted = (
            glyph_features(work) if name == "glyphs" else fashion_features(work)
        )
        for suffix, kept, fit in (
            ("", np.full(len(y), True), training),
            ("-choose", training, fitted),
        ):
            mean = x[fit].mean(0)
            _, _, axes = np.linalg.svd(x[fit] - mean, full_matrices=False)
            z = (x - mean) @ axes[:COMPONENTS].T
            z /= np.linalg.norm(z, axis=1, keepdims=True)
            save(work / f"{name}{suffix}.npz", z[kept], y[kept])


def few_classes(work: Path) -> None:
    """Write a set for each seed, and one for choosing last: their own training classes, the same
    ones to search.
    """
    order = np.array(json.loads((work / "glyphs-classes.json").read_text()))
    for seed in (*SEEDS, CHOOSING_SEED):
        choose = seed == CHOOSING_SEED
        start = FEW * (len(SEEDS) if choose else seed)
        kept = np.concatenate([order[start : start + FEW], held_out(work, "few", choose)])
        with np.load(work / f"glyphs{'-choose' if choose else ''}.npz") as whole:
            rows = np.isin(whole["labels"], kept)
            x, y = whole["features"][rows], whole["labels"][rows]
        save(work / ("few-choose.npz" if choose else f"few-{seed}.npz"), x, y)


def drawings(work: Path) -> None:
    """Write the glyphs as images."""
    order = json.loads((work / "glyphs-classes.json").read_text())
    plugins = load_plugins([str(Path(__file__).with_name("glyphs.py"))])
    whole = plugins.build("datasets", {"name": "glyphs.han", "size": DRAWN}, {})
    labels = np.array(whole.labels)
    for suffix, kept in (("", labels == labels), ("-choose", np.isin(labels, order[:600]))):
        write(work / f"drawn{suffix}.npz", images=whole.arrays[kept], labels=labels[kept])


def save(file: Path, x: NDArray[Any], y: NDArray[Any]) -> None:
    write(file, features=x.astype(np.float32), labels=y)


def write(file: Path, **arrays: NDArray[Any]) -> None:
    temporary = file.with_name("tmp.npz")
    with temporary.open("wb") as stream:
        np.savez(stream, **arrays)
    temporary.replace(file)


Featured = tuple[NDArray[Any], NDArray[Any], NDArray[np.bool_], NDArray[np.bool_]]
"""Features, labels, which rows are of training classes, and which of these are not for choosing."""


def glyph_features(work: Path) -> Featured:
    plugins = load_plugins([str(Path(__file__).with_name("glyphs.py"))])
    x, y = encoded(plugins, plugins.build("datasets", {"name": "glyphs.han"}, {}))
    order = np.random.default_rng(0).permutation(
        np.unique(y)
    )  # neighbours in Unicode share a radical
    (work / "glyphs-classes.json").write_text(json.dumps(order.tolist()))
    return x, y, np.isin(y, order[:600]), np.isin(y, order[:480])


def fashion_features(work: Path) -> Featured:
    folder = reduced_fashion(work / "fashion", PER_CLASS, 10)
    plugins = load_plugins()
    x, y = encoded(
        plugins, plugins.build("datasets", {"name": "core.fashion_mnist", "folder": folder}, {})
    )
    return x, y, np.isin(y, list("01234")), np.isin(y, list("013"))


def encoded(plugins: Any, dataset: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    backbone = plugins.build("backbones", {"name": "core.efficientnet_lite0", "size": SIZE}, {})
    found = backbone_features(Model(backbone, nn.Identity()), dataset, torch.device("cpu"), 64)
    return np.asarray(found.arrays, dtype=np.float64), np.array(dataset.labels)


def held_out(work: Path, data: str, choose: bool) -> list[str]:
    if data == "fashion":
        return ["2", "4"] if choose else list("56789")
    order = json.loads((work / "glyphs-classes.json").read_text())
    found: list[str] = order[480:600] if choose else order[600:]
    return found
