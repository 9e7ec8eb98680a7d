"""Types of NumPy arrays, by the type of their numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Pixels = NDArray[np.uint8]
Floats32 = NDArray[np.float32]
Floats64 = NDArray[np.float64]
Floats = NDArray[np.floating[Any]]
"""Numbers of either precision."""
