"""`names` and `create`: every plugin's parts without a recipe."""

import pytest
import retrieval
import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import TripletMarginLoss


def test_names_are_listed_by_kind():
    found = retrieval.names("loss")
    assert "pml.triplet_margin" in found and found == sorted(found)
    assert retrieval.names("losses") == found
    assert "core.digits" in retrieval.names("dataset")


def test_an_unknown_kind_is_refused_with_the_closest():
    with pytest.raises(
        retrieval.errors.PluginError, match=r"There is no kind 'los' .*Did you mean 'loss'\?"
    ):
        retrieval.names("los")


def test_a_part_is_made_with_its_parameters():
    loss = retrieval.create("loss", "pml.triplet_margin", margin=0.3)
    assert isinstance(loss, TripletMarginLoss) and loss.margin == 0.3
    again = retrieval.create("losses", "pml.triplet_margin", margin=0.3)
    x, labels = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) // 2
    assert float(loss(x, labels)) == float(again(x, labels)) > 0


def test_parts_of_parts_are_names_tables_or_objects():
    by_name = retrieval.create("loss", "pml.triplet_margin", distance="pml.cosine_similarity")
    by_table = retrieval.create(
        "loss", "pml.triplet_margin", distance={"name": "pml.cosine_similarity"}
    )
    own = CosineSimilarity()
    by_object = retrieval.create("loss", "pml.triplet_margin", distance=own)
    assert isinstance(by_name.distance, CosineSimilarity) and isinstance(
        by_table.distance, CosineSimilarity
    )
    assert by_object.distance is own


def test_what_training_gives_in_a_recipe_is_a_parameter_here():
    backbone = retrieval.create("backbone", "core.features", features=7)
    assert backbone.features == 7
    with pytest.raises(retrieval.errors.RecipeError, match=r"\[backbone\] features: is required"):
        retrieval.create("backbone", "core.features")


def test_every_problem_is_told_at_once():
    with pytest.raises(retrieval.errors.RecipeError) as caught:
        retrieval.create(
            "loss", "pml.triplet_margin", margn=0.1, swap="yes", distance="pml.cosin_similarity"
        )
    text = str(caught.value)
    assert (
        "Did you mean 'margin'?" in text
        and "swap" in text
        and "Did you mean 'pml.cosine_similarity'?" in text
    )
    assert len(caught.value.problems) == 3
