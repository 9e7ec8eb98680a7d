"""A page of benchmarks/results is what its script writes from the kept results."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
OTHERS = {"cards", "anml_table2_earlier", "feedback_first", "feedback_second", "feedback_third"}
"""Results of cards, which have their own test, of scripts that cannot render a page again, and of
earlier versions, which are part of another page.
"""
SCRIPTS = {"attack_proxy": "attack"}
KEPT = {path.stem: path for path in sorted((RESULTS / "raw").iterdir())}


def kept(name: str) -> Any:
    text = KEPT[name].read_text(encoding="utf-8")
    if KEPT[name].suffix == ".json":
        return json.loads(text)
    return [json.loads(line) for line in text.splitlines()]


OTHERS |= {name for name in ("attack", "attack_proxy") if "held" not in kept(name)}  # older
PAGES = sorted({path.stem for path in RESULTS.glob("*.md")} - OTHERS)


@pytest.mark.parametrize("name", PAGES)
def test_the_page_shows_the_kept_results(name):
    with_commits = importlib.import_module("bench").with_commits
    script = importlib.import_module(SCRIPTS.get(name, name))
    page = with_commits(script.render(kept(name)), kept(name))
    assert page == (RESULTS / f"{name}.md").read_text(encoding="utf-8")


def test_every_kept_result_has_a_page():
    assert KEPT.keys() == {*PAGES} | OTHERS
