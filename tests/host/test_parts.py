"""Parameters that are parts made by other factories, nested and in lists."""

from __future__ import annotations

from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.regularizers import LpRegularizer

GIVEN = {"embedding_size": 8, "classes": 3, "features": 5}
FIXED = "everything.fixed"


def test_parts_within_parts_and_lists_of_parts(everything):
    margin = {"name": "everything.margin", "scale": 1}
    reducer = {"name": "everything.mean", "pad": "everything.lp"}
    distance = {"name": "everything.euclidean", "p": 3}
    table = {
        "name": "everything.several",
        "losses": [margin | {"reducer": reducer}, margin | {"distance": distance}, FIXED],
        "first": {"name": FIXED},
        "weights": [1, 2, 3],
    }
    assert everything.check("losses", table, "[loss]") == []
    loss = everything.build("losses", table, GIVEN)
    assert [type(loss).__name__ for loss in loss.losses] == ["Margin", "Margin", "Fixed"]
    assert isinstance(loss.losses[0].reducer.pad, LpRegularizer)
    assert isinstance(loss.losses[1].distance, LpDistance) and loss.losses[1].distance.p == 3
    assert loss.losses[2].shape == loss.first.shape == (3, 8)
    assert loss.weights == [1.0, 2.0, 3.0] and loss.losses[0].distance is None


def test_each_problem_of_a_nested_part_has_its_place(everything):
    reducer = {"name": "everything.mean", "pad": {"name": "x"}}
    margin = {"name": "everything.margin", "scale": 0, "reducer": reducer}
    table = {
        "name": "everything.several",
        "losses": [margin, {"name": "everything.margni"}, {"scale": 3}, 3],
        "first": {"name": FIXED, "classes": 3},
        "weights": "a",
        "loses": 1,
    }
    problems = everything.check("losses", table, "[loss]")
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
    for problem, (place, words) in zip(problems, places, strict=True):
        assert problem.startswith(place) and words in problem


def test_the_hosts_distance_replaces_the_default(everything):
    distance = LpDistance(p=7)
    table = {"name": "everything.margin", "scale": 1}
    assert everything.build("losses", table, {**GIVEN, "distance": distance}).distance is distance
