"""CSV columns keep their types."""

from __future__ import annotations

import json

import pytest
from retrieval.serving.files.csv_table import typed


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (["12", "8", "-15", "0"], [12, 8, -15, 0]),
        (["12", "8.5", ""], [12.0, 8.5, None]),
        (["1e3", "-2.5E-1"], [1000.0, -0.25]),
        (["true", "false", ""], [True, False, None]),
        (["007", "12"], ["007", "12"]),  # codes, not numbers
        (["1234567890123456"], ["1234567890123456"]),
        (["1e999", "1"], ["1e999", "1"]),
        (["nan", "1"], ["nan", "1"]),
        (["1_000", "1"], ["1_000", "1"]),
        (["\u0663", "1"], ["\u0663", "1"]),  # digits of another script are text
        (["", ""], ["", ""]),
        (["12 cm", "3"], ["12 cm", "3"]),
    ],
)
def test_a_column_has_one_type(texts, values):
    rows = typed([{"a": text, "b": "x"} for text in texts])
    assert [row["a"] for row in rows] == values
    assert [type(row["a"]) for row in rows] == [type(value) for value in values]
    assert all(row["b"] == "x" for row in rows) and list(rows[0]) == ["a", "b"]
    json.dumps(rows, allow_nan=False)


def test_no_rows():
    assert typed([]) == []
