"""What a batch takes in memory: measured on small ones, drawn out to the whole, compared with what
is free.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_CLOSE = 0.1


class Allocated(TorchDispatchMode):
    """Inside, counts the bytes of the tensors that torch's operations make and that are still
    there.

    Attributes:
        peak: the most there were at one time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it made."""
        made = func(*args, **(kwargs or {}))
        given = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)
        }
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known and storage._cdata not in given:
                    self._add(storage)
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self._now += size
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size


def drawn_out(sizes: Sequence[int], peaks: Sequence[int], size: int) -> int:
    """Return the bytes that a batch takes, of those that smaller ones took.

    A network's part grows with the batch, that of pairs with its square, that of triplets with its
    cube: the sum of the first two that is closest to what was measured, none of them negative; of
    all three where two are not close. (Always three, noise of small batches would be drawn out with
    the cube.)

    Args:
        sizes: of the batches that were measured.
        peaks: the bytes that they took.
        size: of the batch in question.
    """
    from scipy.optimize import nnls

    n = np.asarray(sizes, dtype=np.float64)
    scale = np.asarray(peaks, dtype=np.float64)
    for highest in (2, 3):
        powers = np.arange(1.0, highest + 1)
        terms = (
            n[:, None] ** powers / scale[:, None]
        )  # relative errors: small batches count as much
        weights, _ = nnls(terms, np.ones(len(n)))
        if np.abs(terms @ weights - 1).max() < _CLOSE:
            break
    return int(weights @ float(size) ** powers)


def free_bytes(device: torch.device) -> int | None:
    """Return the memory that is free on a device: of the GPU, or of this process's machine and
    control group.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = [_meminfo(), _group()]
    return min((value for value in found if value is not None), default=None)


def _meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")
        )
    except (OSError, ValueError, StopIteration):  # not Linux
        return None


def _group() -> int | None:
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        return max(0, limit - int((group / "memory.current").read_text(encoding="ascii")))
    except (OSError, ValueError):  # none, or "max"
        return None


def shown(size: int) -> str:
    """Return a number of bytes as a person reads it."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{max(1, round(size / 1e6))} MB"
