from __future__ import annotations

import pytest
from sklearn.datasets import load_wine
from sklearn.preprocessing import StandardScaler


@pytest.fixture(scope="module")
def wine():
    x, y = load_wine(return_X_y=True)
    return StandardScaler().fit_transform(x), y
