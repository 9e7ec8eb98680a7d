"""A page of benchmarks/results is what its script makes of the figures that were kept."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


OTHERS = {"cards", "anml_table2_earlier", "attack", "attack_proxy"}
"""Kept for a card, which has its own test, or by a script that renders nothing again."""
KEPT = {path.stem: path for path in sorted((RESULTS / "raw").iterdir())}


def kept(name: str) -> Any:
    text = KEPT[name].read_text(encoding="utf-8")
    if KEPT[name].suffix == ".json":
        return json.loads(text)
    return [json.loads(line) for line in text.splitlines()]


PAGES = sorted({path.stem for path in RESULTS.glob("*.md")} - OTHERS)


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_made_of_what_was_kept(name):
    page = importlib.import_module(name).render(kept(name))
    assert page == (RESULTS / f"{name}.md").read_text(encoding="utf-8")


def test_whatever_was_kept_has_its_page_tested():
    assert KEPT.keys() == {*PAGES} | OTHERS
