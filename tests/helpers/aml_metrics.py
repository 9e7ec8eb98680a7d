"""The check that a learned metric is symmetric and positive definite."""

from typing import Any

import numpy as np


def assert_spd(m: Any) -> None:
    np.testing.assert_array_equal(m, m.T)
    assert np.isfinite(m).all()
    np.linalg.cholesky(m)
