"""A page of benchmarks/results is what its script makes of the figures that were kept: nothing in it was typed by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def kept(name: str) -> Any:
    file = RESULTS / "raw" / name
    text = file.read_text(encoding="utf-8")
    return json.loads(text) if file.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


def page(name: str) -> Callable[[Any], str]:
    if name == "evaluation":
        from evaluation_report import render
    else:
        from onnx_report import render
    return render


@pytest.mark.parametrize("name", ["evaluation", "onnx"])
def test_the_page_is_made_of_what_was_kept(name: str) -> None:
    assert page(name)(kept(f"{name}.json")) == (RESULTS / f"{name}.md").read_text(encoding="utf-8")


def test_sentences_follow_the_figures() -> None:
    figures = kept("evaluation.json")
    before = page("evaluation")(figures)
    for row in figures["rows"][1::2]:
        row["cpu"] *= 10
    after = page("evaluation")(figures)
    said = [[line for line in text.splitlines() if line.startswith("- ")] for text in (before, after)]
    assert said[0] != said[1] and all("× our CPU seconds" in line for line in said[0][:1])
