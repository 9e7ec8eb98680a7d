from __future__ import annotations

import pytest
from retrieval.errors import RecipeError, RetrievalError, did_you_mean

NAMES = ["pml.contrastive", "pml.margin", "acme.margin", "core.digits", "AdamW", "Adam"]


@pytest.mark.parametrize(
    ("word", "closest"),
    [
        ("pml.contrstive", "pml.contrastive"),
        ("contrastive", "pml.contrastive"),  # without its plugin
        ("acme.contrastive", "pml.contrastive"),  # of another plugin
        ("pnl.margin", "pml.margin"),
        ("pml.digits", "core.digits"),
        ("adamw", "AdamW"),
        ("Adamw", "AdamW"),
        ("pml.zzzzzz", ""),  # a shared plugin's name is not a likeness
        ("zzz", ""),
        ("", ""),
    ],
)
def test_the_closest_word(word, closest):
    assert did_you_mean(word, iter(NAMES)) == (f" Did you mean '{closest}'?" if closest else "")


def test_a_recipe_error_counts_its_problems():
    assert str(RecipeError(["a."])) == "The recipe has 1 problem:\n  - a."
    error = RecipeError(iter(["a.", "b."]), "r.toml")
    assert str(error) == "r.toml has 2 problems:\n  - a.\n  - b." and error.problems == ("a.", "b.")
    assert isinstance(error, RetrievalError)
