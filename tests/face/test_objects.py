"""Objects made in Python in the places of named parts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import retrieval
import torch
from numpy.typing import NDArray
from pytorch_metric_learning.losses import ContrastiveLoss, TripletMarginLoss
from pytorch_metric_learning.miners import MultiSimilarityMiner
from sklearn.datasets import load_digits
from torch import Tensor, nn

from .conftest import SMALL, Net

DIGITS = load_digits()


def same(weights: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    for name, value in weights.items():
        assert torch.equal(value, others[name]), name


class Digits(retrieval.plugin.Dataset):
    """A dataset that somebody wrote in a notebook."""

    def __init__(self, count: int = 1797) -> None:
        self.arrays = (DIGITS.images[:count] * 15).astype(np.uint8)
        self.labels = [str(label) for label in DIGITS.target[:count]]
        self.keys = [str(i) for i in range(count)]

    def __getitem__(self, index: int) -> NDArray[Any]:
        return self.arrays[index]


def objects(margin: float = 0.2, width: int = 32, count: int = 1797) -> dict[str, Any]:
    torch.manual_seed(5)
    loss = TripletMarginLoss(margin=margin)
    return {"backbone": Net(width), "loss": loss, "dataset": Digits(count)}


TABLES = {key: SMALL[key] for key in ("name", "split", "sampler", "head", "train")}
"""A recipe that names none of the three."""


@pytest.fixture(scope="module")
def own(cache, tmp_path_factory):
    return retrieval.train(
        TABLES, tmp_path_factory.mktemp("own") / "run", progress=False, **objects()
    )


def test_the_objects_are_trained_and_yours_stay_as_they_are(own, tmp_path):
    given = objects()
    before = {name: value.clone() for name, value in given["backbone"].state_dict().items()}
    run = retrieval.train(TABLES, tmp_path / "run", progress=False, **given)
    same(given["backbone"].state_dict(), before)
    trained = run.model.state_dict()
    assert not torch.equal(trained["backbone.module.layers.1.weight"], before["layers.1.weight"])
    same(own.model.state_dict(), trained)  # the same objects and seed


def test_the_width_of_features_is_measured(own):
    assert own.model.backbone.features == 32
    assert own.model.preprocessing == retrieval.plugin.Preprocessing((8, 8), 1)


def test_a_module_that_says_nothing_gets_images_as_for_imagenet(tmp_path):
    from retrieval.model.products import IMAGENET, ModuleBackbone

    module = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
    made = ModuleBackbone(module, "object.Sequential", None)
    assert made.preprocessing == IMAGENET and IMAGENET.size == (224, 224) and made.features == 12


def test_vectors_go_to_a_module_as_they_are(cache, tmp_path):
    from retrieval.data.datasets import ArrayDataset

    pixels = DIGITS.data.astype(np.float32) / 16
    vectors = ArrayDataset(pixels, [str(t) for t in DIGITS.target], kind="features")
    recipe, net = TABLES | {"loss": SMALL["loss"]}, nn.Linear(64, 24)
    run = retrieval.train(recipe, tmp_path / "run", dataset=vectors, backbone=net, progress=False)
    assert run.model.backbone.features == 24 and run.model.preprocessing is None


def test_the_folder_says_what_it_needs(own):
    text = (own.path / "recipe.toml").read_text(encoding="utf-8")
    assert (
        'name = "object.Net"' in text
        and "# [loss] object.TripletMarginLoss was made in Python" in text
    )
    said = json.loads((own.path / "run.json").read_text(encoding="utf-8"))["objects"]
    assert set(said) == {"data", "backbone", "loss"}
    assert said["loss"]["settings"]["margin"] == 0.2 and said["data"]["items"] == 1797


def test_it_is_opened_with_the_same_objects_and_evaluated(own):
    opened = retrieval.load(str(own.path), **objects())
    same(opened.model.state_dict(), own.model.state_dict())
    opened.evaluate(progress=False)
    report = json.loads((own.path / "evaluation-test.json").read_text(encoding="utf-8"))
    assert report["metrics"]["trained"]["recall_at_1"] > 0.5


def test_without_its_objects_it_is_refused_with_all_that_are_missing(own):
    with pytest.raises(retrieval.errors.RecipeError) as caught:
        retrieval.load(own.path)
    assert len(caught.value.problems) == 3
    assert "retrieval.load(…, dataset=…)" in str(caught.value)
    with pytest.raises(retrieval.errors.RecipeError, match="made in Python"):
        retrieval.train(own.path / "recipe.toml", own.path, resume=True, progress=False)


@pytest.mark.parametrize(
    ("settings", "parts", "sentence"),
    [
        ({"margin": 0.3}, {}, r"another loss: margin was 0.2, and is 0.3"),
        ({"width": 16}, {}, r"checkpoint does not match the model"),
        ({"count": 900}, {}, r"another dataset: (count was|items was 1797, and is 900)"),
        (
            {},
            {"loss": ContrastiveLoss()},
            r"another loss: class was .*TripletMarginLoss, and is .*ContrastiveLoss",
        ),
    ],
)
def test_other_objects_are_refused(own, settings, parts, sentence):
    with pytest.raises(retrieval.errors.DataError, match=sentence):
        retrieval.load(own.path, **objects(**settings) | parts)


def test_changed_items_are_refused(own):
    given = objects()
    given["dataset"].arrays[17, 3, 3] ^= 1
    with pytest.raises(retrieval.errors.DataError, match="items, labels or sides differ"):
        retrieval.load(own.path, **given)


def test_an_object_for_a_plugins_part_is_refused(trained):
    says = r"\[backbone\] core.convnet, not with an object. Leave backbone=… out"
    with pytest.raises(retrieval.errors.DataError, match=says):
        retrieval.load(trained.path, backbone=Net())


def test_a_resumed_run_ends_as_one_that_was_never_stopped(cache, tmp_path):
    longer, quiet = TABLES | {"train": {"epochs": 2}}, {"progress": False}
    whole = retrieval.train(longer, tmp_path / "whole", **quiet, **objects())
    retrieval.train(TABLES, tmp_path / "half", **quiet, **objects())
    resume = {"resume": True, **quiet}
    with pytest.raises(retrieval.errors.DataError, match=r"another loss: margin was 0\.2"):
        retrieval.train(longer, tmp_path / "half", **resume, **objects(margin=0.4))
    resumed = retrieval.train(longer, tmp_path / "half", **resume, **objects())
    same(whole.model.state_dict(), resumed.model.state_dict())


def test_it_is_exported_like_any_other(own, tmp_path):
    bundle = own.export(tmp_path / "bundle", progress=False)
    digit = Digits().arrays[3]
    with torch.inference_mode():
        expected = own.model(torch.from_numpy(digit)[None, None])[1].numpy()
    assert bundle.encode(digit, progress=False) == pytest.approx(expected, abs=1e-5)


class Half(retrieval.plugin.Combiner):
    """Half of the Euclidean distance, of one learned map."""

    exact = True

    def build_head(self, features: int) -> nn.Module:
        return nn.Linear(features, 16)

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return torch.cdist(query_emb, ref_emb) / 2

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return (query_emb - ref_emb).square().sum(1).add(1e-12).sqrt() / 2


def test_a_loss_whose_distance_is_the_combiner_keeps_it(cache, tmp_path):
    combiner = Half()
    loss = TripletMarginLoss(margin=0.2, distance=combiner)
    parts = {"combiner": combiner, "loss": loss, "miner": MultiSimilarityMiner()}
    run = retrieval.train(SMALL, tmp_path / "run", progress=False, **parts)
    assert run.objective is not None and run.model.combiner is not combiner
    assert run.objective.loss.distance is run.model.combiner
    assert loss.distance is combiner
    assert run.recipe.miner is not None and run.recipe.miner.name == "object.MultiSimilarityMiner"
    says = r"\[combiner\] object.Half needs a loss that takes a `distance`"
    parts = {"combiner": combiner, "loss": TripletMarginLoss()}
    with pytest.raises(retrieval.errors.RecipeError, match=says):
        retrieval.train(SMALL, tmp_path / "b", progress=False, **parts)


def flat(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        (
            {"backbone": nn.Conv2d(1, 4, 3)},
            r"object.Conv2d gave a tensor of shape \(2, 4, .*must give features",
        ),
        (
            {"backbone": flat},
            r"object.flat gave a function; a backbone factory must give a retrieval\.plugin\.B",
        ),
        ({"dataset": [1, 2]}, "is an object of type int. It must"),
        ({"loss": 3.0}, r"object of type float, which cannot be called"),
        ({"backbone": nn.Bilinear(3, 3, 3)}, r"The backbone object.Bilinear failed: TypeError"),
    ],
)
def test_what_breaks_a_contract_is_refused_before_anything_is_written(
    cache, tmp_path, part, sentence
):
    if isinstance(part.get("backbone"), nn.Conv2d):
        part["backbone"].preprocessing = retrieval.plugin.Preprocessing((8, 8), 1)
    with pytest.raises(retrieval.errors.RetrievalError, match=sentence):
        retrieval.train(SMALL, tmp_path / "run", progress=False, **part)
    assert not (tmp_path / "run").exists()


def test_a_frozen_modules_features_are_found_again_only_for_what_it_does(cache, tmp_path):
    class Mean(nn.Module):
        preprocessing = retrieval.plugin.Preprocessing((8, 8), 1)

        def __init__(self, reduce):
            super().__init__()
            self.reduce = reduce

        def forward(self, images):
            return self.reduce(images.flatten(1)).reshape(-1, 8)

    frozen = TABLES | {"backbone": {"frozen": True}, "loss": SMALL["loss"], "data": SMALL["data"]}
    made = [
        retrieval.train(frozen, tmp_path / name, progress=False, backbone=Mean(reduce))
        for name, reduce in (("a", lambda x: x[:, 24:32]), ("b", lambda x: x[:, 32:40]))
    ]
    first, second = (run.model.state_dict()["head.0.weight"] for run in made)
    assert not torch.equal(first, second)


class Pairs(torch.utils.data.Dataset[Any]):
    """A dataset of PyTorch that has never heard of this package."""

    noise = 0.0

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> Any:
        image = torch.from_numpy(DIGITS.images[index])[None] / 16
        return image * (1 - self.noise * torch.rand(1)), int(DIGITS.target[index])


def test_the_sides_of_a_dictionary_are_not_pooled(cache, tmp_path):
    recipe = {name: table for name, table in SMALL.items() if name not in ("data", "split")}
    sides = {"train": Pairs(), "test": (DIGITS.images[300:500] / 16, DIGITS.target[300:500])}
    with pytest.raises(retrieval.errors.RecipeError, match=r"mix the sides.*by = \"given\""):
        retrieval.train({**recipe, "split": {"by": "item"}}, tmp_path / "a", dataset=sides)
    run = retrieval.train(recipe, tmp_path / "b", dataset=sides, progress=False)
    assert len(run.splits.query) == 200 and "dictionary_of_sides, core.convnet" in repr(run)


def test_random_transforms_of_a_dataset_are_refused(tmp_path):
    random = Pairs()
    random.noise = 0.5
    with pytest.raises(retrieval.errors.DataError, match=r"item 0 differs.*\[augmentation\]"):
        retrieval.train(SMALL, tmp_path / "run", dataset=random)


def test_a_run_of_a_torch_dataset_is_evaluated_reported_and_compared_again(
    cache, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    recipe = {name: table for name, table in SMALL.items() if name != "data"}
    run = retrieval.train(recipe, "run", dataset=Pairs(), progress=False)
    again = retrieval.Run.open("run", dataset=Pairs())
    first, second = (r.evaluate(metrics="map_at_r", progress=False) for r in (run, again))
    assert first.metrics == second.metrics and again.labels("test").tolist()[0].isdigit()
    assert "Pairs, core.convnet" in repr(again)
    data = retrieval.as_dataset(Pairs())
    others = retrieval.evaluate(again.encode(data, progress=False), data.labels)
    assert others.queries == 300 and others.values["map_at_r"] > 0.3
    page = retrieval.report(again, map="none", progress=False).read_text(encoding="utf-8")
    assert "map" in page
    with pytest.raises(retrieval.errors.DataError, match="was trained with another dataset"):
        retrieval.load("run", dataset=(DIGITS.images[:300] / 16, DIGITS.target[1:301]))
    with pytest.raises(retrieval.errors.RecipeError, match=r"retrieval\.load\(…, dataset=…\)"):
        retrieval.load("run")
    other = {**recipe, "name": "other", "data": run.dataset, "loss": TripletMarginLoss()}
    result = retrieval.compare([again, other], seeds=2, pretrained="none", progress=False)
    assert result.recipes == ["small", "other"] and "±" in repr(result)
    assert retrieval.Recipe(**other) != run.recipe
    with pytest.raises(retrieval.errors.DataError, match="omit workers and ray"):
        retrieval.compare([again, other], "two", seeds=2, workers=2, progress=False)
    assert not Path("two").exists()
