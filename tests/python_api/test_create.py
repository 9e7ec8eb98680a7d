"""`names` and `create`: every plugin's parts without a recipe."""

import pytest
import retrieval
import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import TripletMarginLoss
from refusals import refusal
from retrieval.errors import PluginError, RecipeError

TRIPLET = ("loss", "pml.triplet_margin")


def test_names_are_listed_by_kind():
    names = retrieval.names("loss")
    assert "pml.triplet_margin" in names and names == sorted(names) == retrieval.names("losses")
    assert "core.digits" in retrieval.names("dataset")
    unknown = refusal(PluginError, retrieval.names, "los")
    assert unknown.startswith("There is no kind 'los' ") and "Did you mean 'loss'?" in unknown


def test_a_part_gets_its_parameters():
    loss = retrieval.create(*TRIPLET, margin=0.3)
    assert isinstance(loss, TripletMarginLoss) and loss.margin == 0.3
    again = retrieval.create("losses", "pml.triplet_margin", margin=0.3)
    x, labels = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) // 2
    assert float(loss(x, labels)) == float(again(x, labels)) > 0


@pytest.mark.parametrize("distance", ["pml.cosine_similarity", {"name": "pml.cosine_similarity"}])
def test_parts_of_parts_are_names_tables_or_objects(distance):
    part = retrieval.create(*TRIPLET, distance=distance).distance
    assert isinstance(part, CosineSimilarity)
    assert retrieval.create(*TRIPLET, distance=part).distance is part


def test_values_that_training_supplies_are_parameters_of_create():
    assert retrieval.create("backbone", "core.features", features=7).features == 7
    missing = refusal(RecipeError, retrieval.create, "backbone", "core.features")
    assert "[backbone] features: is required" in missing


def test_all_problems_are_named_at_once():
    wrong = {"margn": 0.1, "swap": "yes", "distance": "pml.cosin_similarity"}
    problems = refusal(RecipeError, retrieval.create, *TRIPLET, **wrong)
    assert "3 problems" in problems and "swap" in problems
    assert "Did you mean 'margin'?" in problems and "'pml.cosine_similarity'?" in problems
