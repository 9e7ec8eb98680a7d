"""A recipe in Python: the file's checks, and the file's sentences."""

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


def test_the_sentences_are_the_files_and_all_at_once(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text(tomli_w.dumps(WRONG), encoding="utf-8")
    with pytest.raises(retrieval.errors.RecipeError) as of_file:
        retrieval.read_recipe(file)
    with pytest.raises(retrieval.errors.RecipeError) as of_class:
        retrieval.Recipe(**WRONG)
    with pytest.raises(retrieval.errors.RecipeError) as of_dictionary:
        retrieval.read_recipe(WRONG)
    assert of_file.value.problems == of_class.value.problems == of_dictionary.value.problems
    assert len(of_file.value.problems) == 5


def test_changes_are_applied_and_the_dictionary_stays_as_it_is():
    before = deepcopy(SMALL)
    made = retrieval.read_recipe(SMALL, ["loss.margin=0.7", "train.epochs=3"])
    assert (
        made.loss is not None and made.loss.parameters["margin"] == 0.7 and made.train.epochs == 3
    )
    assert before == SMALL
    assert retrieval.read_recipe(made, ["train.epochs=4"]).train.epochs == 4


def test_a_value_that_no_file_can_hold_is_refused():
    with pytest.raises(retrieval.errors.RecipeError, match=r"\[loss\] distance: is of type object"):
        retrieval.Recipe(**{**SMALL, "loss": {"name": "pml.triplet_margin", "distance": object()}})


def test_an_object_stands_in_the_place_of_a_part(cache, tmp_path):
    module = Net()
    made = retrieval.Recipe(**{**SMALL, "backbone": module})
    assert made.objects == {"backbone": module} and made.backbone.name == "object.Net"
    changed = retrieval.read_recipe(made, ["train.epochs=2"], objects={"loss": TripletMarginLoss()})
    assert set(changed.objects) == {"backbone", "loss"} and changed.train.epochs == 2
    run = retrieval.train(made, tmp_path / "run", progress=False)
    assert run.model.backbone.features == 32 and not run.path.joinpath("plugins").exists()
    longer = retrieval.train(
        {**SMALL, "backbone": Net()},
        run.path,
        resume=True,
        overrides=["train.epochs=2"],
        progress=False,
    )
    assert len(longer.metrics_file.read_text(encoding="utf-8").splitlines()) == 2


def test_text_in_the_place_of_a_table_is_answered_in_both_languages():
    with pytest.raises(
        retrieval.errors.RecipeError, match=r'or in Python data=\{"name": "core\.digits"\}\.'
    ):
        retrieval.Recipe(**{**SMALL, "data": "core.digits"})
