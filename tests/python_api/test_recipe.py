"""A recipe in Python has the same checks and sentences as a file."""

from copy import deepcopy
from typing import Any

import pytest
import retrieval
import tomli_w
from pytorch_metric_learning.losses import TripletMarginLoss

from .conftest import SMALL, Net

WRONG: dict[str, Any] = {
    **SMALL,
    "sampler": {"classes": 1, "itms": 4},
    "loss": {"name": "pml.triplet_margin", "margn": 0.1},
    "train": {"epochs": "ten"},
    "optimizer": {"name": "Adm"},
}


def test_a_file_and_python_give_equal_recipes(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text(tomli_w.dumps(SMALL), encoding="utf-8")
    read = retrieval.read_recipe(str(file))
    assert read == retrieval.Recipe(**SMALL) == retrieval.read_recipe(file)
    assert read == retrieval.read_recipe(SMALL) and isinstance(read, retrieval.Recipe)


def test_a_file_and_python_have_the_same_problems_all_at_once(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text(tomli_w.dumps(WRONG), encoding="utf-8")
    problems = []
    for read in (
        lambda: retrieval.read_recipe(file),
        lambda: retrieval.Recipe(**WRONG),
        lambda: retrieval.read_recipe(WRONG),
    ):
        with pytest.raises(retrieval.errors.RecipeError) as caught:
            read()
        problems.append(caught.value.problems)
    assert problems[0] == problems[1] == problems[2] and len(problems[0]) == 5


def test_changes_are_applied_and_the_dictionary_stays_unchanged():
    before = deepcopy(SMALL)
    recipe = retrieval.read_recipe(SMALL, ["loss.margin=0.7", "train.epochs=3"])
    assert recipe.loss.parameters["margin"] == 0.7 and recipe.train.epochs == 3
    assert before == SMALL
    assert retrieval.read_recipe(recipe, ["train.epochs=4"]).train.epochs == 4


def test_an_object_replaces_a_part(tmp_path):
    module = Net()
    recipe = retrieval.Recipe(**{**SMALL, "backbone": module})
    assert recipe.objects == {"backbone": module} and recipe.backbone.name == "object.Net"
    loss = {"loss": TripletMarginLoss()}
    changed = retrieval.read_recipe(recipe, ["train.epochs=2"], objects=loss)
    assert set(changed.objects) == {"backbone", "loss"} and changed.train.epochs == 2
    run = retrieval.train(recipe, tmp_path / "run", progress=False)
    assert run.model.backbone.features == 32 and not run.path.joinpath("plugins").exists()
    options = {"resume": True, "overrides": ["train.epochs=2"], "progress": False}
    longer = retrieval.train({**SMALL, "backbone": Net()}, run.path, **options)
    assert len(longer.metrics_file.read_text(encoding="utf-8").splitlines()) == 2


def test_text_in_place_of_a_table_is_answered_in_toml_and_python():
    says = r'or in Python data=\{"name": "core\.digits"\}\.'
    with pytest.raises(retrieval.errors.RecipeError, match=says):
        retrieval.Recipe(**{**SMALL, "data": "core.digits"})
