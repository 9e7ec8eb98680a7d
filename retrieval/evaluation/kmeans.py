"""k-means, for figures of clusters: Lloyd's algorithm in single precision, on codes less their mean, from a seeded start.

- Start: k-means++ (Arthur & Vassilvitskii 2007), each centre the best of 2 + ln k draws, as scikit-learn has it. From 32 clusters on, several are drawn at once,
  16 times in all, as in Bahmani et al., "Scalable k-means++" (2012), each the best of three: one pass a centre would take longer than all that follows.
- Rounds, at most 100, compute only what can change: items whose own centre moved are compared with all centres, the others with those that moved. Nothing is left
  out by that, and late rounds, when few move, cost little. They end when none moves, or all together by less than 1e-4 of the variance.
- A cluster that is left without items takes the item that is farthest from its centre.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROUNDS = 100
STILL = 1e-4
"""Part of the variance of the codes: when the centres have moved by less in all, it ends."""
_DRAWS, _TRIALS = 16, 3
_CELLS = 1 << 19
"""Distances at once: two megabytes, which a processor's cache holds."""

Floats = NDArray[np.float32]
Numbers = NDArray[np.int64]


def kmeans(codes: NDArray[Any] | Tensor, count: int, *, seed: int = 0) -> Numbers:
    """Return the cluster number (N,) of each code (N, C) among `count` k-means clusters; see the module."""
    table = codes.detach().to("cpu", torch.float32) if isinstance(codes, Tensor) else torch.from_numpy(
        np.array(codes, dtype=np.float32)
    )  # fmt: skip
    table = table - table.mean(0)  # distances by products lose what a common offset takes
    norms = (table * table).sum(1).numpy()
    centers = _start(table, norms, min(count, len(table)), np.random.default_rng(seed))
    return _rounds(table, norms, centers)


def _rounds(table: Tensor, norms: Floats, centers: Tensor) -> Numbers:
    still = STILL * float(norms.mean()) / table.shape[1]
    found, least = _nearest(table, centers)
    changed = np.ones(len(centers), bool)
    for _ in range(ROUNDS):
        moved, shift = _move(table, norms, centers, found, least, changed)
        if shift <= still:
            break
        before = found.copy()
        fresh = moved[found]
        ours = np.flatnonzero(fresh)
        found[ours], least[ours] = _nearest(_rows(table, ours), centers)
        others = np.flatnonzero(~fresh)
        if len(others):
            some = np.flatnonzero(moved)
            theirs, closer = _nearest(_rows(table, others), centers[some])
            better = closer < least[others]
            found[others[better]] = some[theirs[better]]
            least[others[better]] = closer[better]
        switched = before != found
        changed[:] = False
        changed[before[switched]] = changed[found[switched]] = True
    return found


def _move(
    table: Tensor, norms: Floats, centers: Tensor, found: Numbers, least: Floats, changed: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], float]:
    """Put the centres of clusters whose items changed amid their items; return which centres moved, and their squared shifts' sum."""
    sizes = np.bincount(found, minlength=len(centers))
    empty = np.flatnonzero(sizes == 0)
    if len(empty):
        distances = norms + least
        farthest = np.argsort(-distances, kind="stable")[: len(empty)]
        farthest = farthest[
            distances[farthest] > 1e-6 * norms[farthest]
        ]  # codes that are all the same have none
        changed[found[farthest]] = changed[empty[: len(farthest)]] = True
        found[farthest] = empty[: len(farthest)]
        sizes = np.bincount(found, minlength=len(centers))
    rows = np.flatnonzero(changed[found])
    sums = torch.zeros_like(centers).index_add_(0, torch.from_numpy(found[rows]), _rows(table, rows))
    which = torch.from_numpy(np.flatnonzero(changed & (sizes > 0)))
    means = sums[which] / torch.from_numpy(sizes)[which, None]
    shifts = ((means - centers[which]) ** 2).sum(1)
    centers[which] = means
    moved = np.zeros(len(centers), bool)
    moved[which[shifts > 0].numpy()] = True
    return moved, float(shifts.sum())


def _start(table: Tensor, norms: Floats, count: int, random: np.random.Generator) -> Tensor:
    """Return the first centres (count, C): items drawn by their squared distance from those drawn before."""
    first = int(random.integers(len(table)))
    each = max(1, count // _DRAWS)
    trials = 2 + int(np.log(count)) if each == 1 else _TRIALS
    chosen = [first]
    distances = norms + _nearest(table, table[first : first + 1])[1]
    distances[first] = 0
    while len(chosen) < count:
        weights = np.maximum(distances, 0).astype(np.float64)
        wanted = min(each, count - len(chosen))
        if np.count_nonzero(weights) <= wanted * trials:  # hardly more different codes than clusters
            rest = np.setdiff1d(np.arange(len(table)), chosen)
            chosen += random.permutation(rest)[: count - len(chosen)].tolist()
            break
        drawn = random.choice(len(table), wanted * trials, replace=False, p=weights / weights.sum())
        gains = _gains(table, distances - norms, table[torch.from_numpy(drawn)]).reshape(wanted, trials)
        best = drawn.reshape(wanted, trials)[np.arange(wanted), gains.argmax(1)]
        np.minimum(distances, norms + _nearest(table, table[torch.from_numpy(best)])[1], out=distances)
        chosen += best.tolist()
        distances[chosen] = 0
    return table[torch.tensor(chosen)].clone()


def _gains(table: Tensor, least: Floats, some: Tensor) -> NDArray[np.float64]:
    """Return by how much each of some items (M, C), as one more centre, would lessen the sum of squared distances (M,)."""
    own = (some * some).sum(1)
    total = torch.zeros(len(some), dtype=torch.float64)
    for part in _parts(len(table), len(some)):
        block = torch.addmm(own, table[part], some.T, alpha=-2)
        total += torch.from_numpy(least[part])[:, None].sub(block).clamp_(min=0).sum(0)
    return total.numpy()


def _parts(rows: int, columns: int) -> Iterator[slice]:
    """Yield blocks of rows."""
    step = max(64, _CELLS // columns)
    for start in range(0, rows, step):
        yield slice(start, start + step)


def _nearest(table: Tensor, centers: Tensor) -> tuple[Numbers, Floats]:
    """Return of each item (N, C) which centre (K, C) is nearest, and the squared distance less the item's own squared norm."""
    norms = (centers * centers).sum(1)
    found, least = np.empty(len(table), np.int64), np.empty(len(table), np.float32)
    for part in _parts(len(table), len(centers)):
        block = torch.addmm(norms, table[part], centers.T, alpha=-2).numpy()
        found[part] = block.argmin(1)
        least[part] = block[np.arange(len(block)), found[part]]
    return found, least


def _rows(table: Tensor, rows: Numbers) -> Tensor:
    """Return some rows of a table; the table itself where that is all of it."""
    return table if len(rows) == len(table) else table[torch.from_numpy(rows)]
