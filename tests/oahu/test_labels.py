"""Streams and votes of OAHU take no missing label for a class."""

from __future__ import annotations

import numpy as np
import pytest

from retrieval_oahu.spaces import Spaces
from retrieval_oahu.streams import from_labels


@pytest.mark.parametrize("labels", [["a", "a", float("nan"), "b"], [1, 1, None, 2]])
def test_a_missing_label_is_refused(labels):
    with pytest.raises(ValueError, match=r"1 of 4 labels is missing .* row 2"):
        next(from_labels(labels))
    references = Spaces(np.ones((2, 4, 3)), np.full(2, 0.5))
    with pytest.raises(ValueError, match=r"1 of 4 labels is missing .* row 2"):
        references.classify(references, labels, 1)
