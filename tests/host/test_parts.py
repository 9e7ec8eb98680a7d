"""Parts of a factory: other factories' products, nested and in lists."""

from __future__ import annotations

import pytest
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.regularizers import LpRegularizer
from retrieval.errors import PluginError, RecipeError
from retrieval.serving.store.address import Address

GIVEN = {
    "embedding_size": 8,
    "classes": 3,
    "features": 5,
    "address": Address("shelf://here", "shelf", "here"),
}


def test_one_of_every_kind_is_found_checked_and_built(everything):
    for kind, name, values in [
        ("datasets", "items", {"count": 2}),
        ("backbones", "same", {}),
        ("losses", "margin", {"scale": 2}),
        ("losses", "fixed", {}),
        ("miners", "all_pairs", {}),
        ("generators", "middle", {}),
        ("combiners", "cosine", {"weight": 2}),
        ("learners", "centre", {"mode": "median"}),
        ("metrics", "best", {}),
        ("indexes", "scan", {"block": 3}),
        ("stores", "shelf", {"timeout": 3}),
        ("distances", "euclidean", {"p": 1}),
        ("reducers", "mean", {}),
        ("regularizers", "lp", {"p": 1}),
    ]:
        table = {"name": f"everything.{name}", **values}
        assert everything.check(kind, table, "[x]") == []
        made = everything.build(kind, table, GIVEN)
        assert made is not None
        if name == "fixed":
            assert made.shape == (3, 8)


def test_parts_within_parts_and_lists_of_parts(everything):
    table = {
        "name": "everything.several",
        "losses": [
            {
                "name": "everything.margin",
                "scale": 1,
                "reducer": {"name": "everything.mean", "pad": "everything.lp"},
            },
            {
                "name": "everything.margin",
                "scale": 2,
                "distance": {"name": "everything.euclidean", "p": 3},
            },
            "everything.fixed",
        ],
        "first": {"name": "everything.fixed"},
        "weights": [1, 2, 3],
    }
    assert everything.check("losses", table, "[loss]") == []
    made = everything.build("losses", table, GIVEN)
    assert [type(loss).__name__ for loss in made.losses] == ["Margin", "Margin", "Fixed"]
    assert isinstance(made.losses[0].reducer.pad, LpRegularizer)
    assert isinstance(made.losses[1].distance, LpDistance) and made.losses[1].distance.p == 3
    assert made.losses[2].shape == made.first.shape == (3, 8)
    assert made.weights == [1.0, 2.0, 3.0]
    assert made.losses[0].distance is None


def test_each_problem_of_a_nested_part_has_its_place(everything):
    table = {
        "name": "everything.several",
        "losses": [
            {
                "name": "everything.margin",
                "scale": 0,
                "reducer": {"name": "everything.mean", "pad": {"name": "x"}},
            },
            {"name": "everything.margni"},
            {"scale": 3},
            3,
        ],
        "first": {"name": "everything.fixed", "classes": 3},
        "weights": "a",
        "loses": 1,
    }
    found = everything.check("losses", table, "[loss]")
    places = [
        ("[loss] loses:", "Did you mean 'losses'?"),
        ("[loss] weights:", "should be a list of number"),
        ("[loss] losses[0] scale:", "(> 0), not 0."),
        ("[loss] losses[0] reducer pad name:", "There is no regularizer 'x'."),
        ("[loss] losses[1] name:", "Did you mean 'everything.margin'?"),
        ("[loss] losses[2] must name a loss:", '"PLUGIN.NAME"'),
        ("[loss] losses[3] must name a loss:", '"PLUGIN.NAME"'),
        ("[loss] first classes:", "is given by the host"),
    ]
    for problem, (place, words) in zip(found, places, strict=True):
        assert problem.startswith(place) and words in problem


def test_a_required_part_that_is_missing(everything):
    assert everything.check("losses", {"name": "everything.several"}, "[loss]") == [
        "[loss] losses: is required (a loss list)."
    ]
    with pytest.raises(RecipeError, match="is required"):
        everything.build("losses", {"name": "everything.several"}, GIVEN)


def test_the_host_s_distance_goes_before_the_default(everything):
    distance = LpDistance(p=7)
    made = everything.build(
        "losses", {"name": "everything.margin", "scale": 1}, {**GIVEN, "distance": distance}
    )
    assert made.distance is distance


def test_what_the_host_does_not_know_is_said(everything):
    with pytest.raises(
        PluginError,
        match=r"everything\.fixed asks the host for 'classes' \(number of training classes\)",
    ):
        everything.build("losses", "everything.fixed", {"embedding_size": 3})
