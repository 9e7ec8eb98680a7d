"""Objects made in Python in place of named parts."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import retrieval
import torch
from numpy.typing import NDArray
from pytorch_metric_learning.losses import ContrastiveLoss, TripletMarginLoss
from pytorch_metric_learning.miners import MultiSimilarityMiner
from refusals import refusal
from retrieval.errors import DataError, RecipeError, RetrievalError
from retrieval.run.folder import _difference
from sklearn.datasets import load_digits
from torch import Tensor, nn

from .conftest import SMALL, Net

DIGITS = load_digits()


def same(weights: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    for name, value in weights.items():
        assert torch.equal(value, others[name]), name


class Digits(retrieval.plugin.Dataset):
    """A dataset as written in a notebook."""

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
"""A recipe without the three parts that `objects` returns."""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own") / "run"
    return retrieval.train(TABLES, folder, progress=False, **objects())


def test_copies_of_the_objects_are_trained(own, tmp_path):
    parts = objects()
    before = {name: value.clone() for name, value in parts["backbone"].state_dict().items()}
    run = retrieval.train(TABLES, tmp_path / "run", progress=False, **parts)
    same(parts["backbone"].state_dict(), before)
    trained = run.model.state_dict()
    assert not torch.equal(trained["backbone.module.layers.1.weight"], before["layers.1.weight"])
    same(own.model.state_dict(), trained)  # the same objects and seed


def test_a_module_without_preprocessing_gets_images_as_for_imagenet():
    from retrieval.model.checked_parts import IMAGENET, ModuleBackbone

    module = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
    backbone = ModuleBackbone(module, "object.Sequential", None)
    assert backbone.preprocessing == IMAGENET and IMAGENET.size == (224, 224)
    assert backbone.features == 12


def test_a_module_gets_vectors_unchanged(tmp_path):
    from retrieval.data.datasets import ArrayDataset

    pixels = DIGITS.data.astype(np.float32) / 16
    vectors = ArrayDataset(pixels, [str(t) for t in DIGITS.target], kind="features")
    recipe, net = TABLES | {"loss": SMALL["loss"]}, nn.Linear(64, 24)
    run = retrieval.train(recipe, tmp_path / "run", dataset=vectors, backbone=net, progress=False)
    assert run.model.backbone.features == 24 and run.model.preprocessing is None


def test_the_folder_records_the_objects(own):
    assert own.model.backbone.features == 32  # measured
    text = (own.path / "recipe.toml").read_text(encoding="utf-8")
    assert 'name = "object.Net"' in text
    assert "# [loss] object.TripletMarginLoss was made in Python" in text
    record = json.loads((own.path / "run.json").read_text(encoding="utf-8"))["objects"]
    assert set(record) == {"data", "backbone", "loss"}
    assert record["loss"]["settings"]["margin"] == 0.2 and record["data"]["items"] == 1797


def test_a_run_is_opened_with_the_same_objects_and_evaluated(own):
    opened = retrieval.load(str(own.path), **objects())
    same(opened.model.state_dict(), own.model.state_dict())
    opened.evaluate(progress=False)
    report = json.loads((own.path / "evaluation-test.json").read_text(encoding="utf-8"))
    assert report["metrics"]["trained"]["recall_at_1"] > 0.5


def test_a_run_encodes_and_exports_without_its_dataset_and_loss(own, tmp_path):
    opened = retrieval.load(own.path, backbone=objects()["backbone"])
    photos = DIGITS.images[:5] * 15
    photos = list(photos.astype(np.uint8))
    expected = own.encode(photos, progress=False)
    assert np.array_equal(opened.encode(photos, progress=False), expected)
    bundle = opened.export(tmp_path / "bundle", progress=False)
    np.testing.assert_allclose(bundle.encode(photos, progress=False), expected, atol=1e-5)
    for use in (opened.evaluate, opened.verify, opened.labels):
        assert "Pass the same object: retrieval.load(…, dataset=…)" in refusal(DataError, use)


def test_opening_without_the_backbone_names_it(own):
    missing = refusal(RecipeError, retrieval.load, own.path)
    assert "has 1 problem" in missing and "retrieval.load(…, backbone=…)" in missing
    recipe, resume = own.path / "recipe.toml", {"resume": True, "progress": False}
    assert "made in Python" in refusal(RecipeError, retrieval.train, recipe, own.path, **resume)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"margin": 0.3}, "another loss: its margin was 0.2, and is 0.3"),
        ({"width": 16}, "checkpoint does not match the model"),
        ({"count": 900}, "it had 1,797 items, and has 900 now"),
    ],
)
def test_other_objects_are_refused(own, settings, sentence):
    assert sentence in refusal(DataError, retrieval.load, own.path, **objects(**settings))


def test_a_setting_may_have_the_name_of_an_entry_on_a_dataset():
    for name in ("items", "content"):
        before, now = ({"class": "a.Loss", "settings": {name: value}} for value in ("few", "many"))
        assert _difference(before, now) == f"its {name} was few, and is many now"


def test_objects_of_other_classes_or_items_are_refused(own, trained):
    other = refusal(DataError, retrieval.load, own.path, **objects() | {"loss": ContrastiveLoss()})
    assert re.search(
        "another loss: its class was .*TripletMarginLoss, and is .*ContrastiveLoss now", other
    )
    changed = objects()
    changed["dataset"].arrays[17, 3, 3] ^= 1
    differ = refusal(DataError, retrieval.load, own.path, **changed)
    assert "items, labels or sides differ" in differ
    named = refusal(DataError, retrieval.load, trained.path, backbone=Net())
    assert "[backbone] core.convnet, not with an object. Leave backbone=… out" in named


def test_a_resumed_run_ends_as_one_that_was_never_stopped(tmp_path):
    longer, quiet = TABLES | {"train": {"epochs": 2}}, {"progress": False}
    whole = retrieval.train(longer, tmp_path / "whole", **quiet, **objects())
    half = (longer, tmp_path / "half")
    retrieval.train(TABLES, half[1], **quiet, **objects())
    resume = {"resume": True, **quiet}
    wrong = refusal(DataError, retrieval.train, *half, **resume, **objects(margin=0.4))
    assert "another loss: its margin was 0.2" in wrong
    resumed = retrieval.train(*half, **resume, **objects())
    same(whole.model.state_dict(), resumed.model.state_dict())


def test_a_run_of_objects_is_exported(own, tmp_path):
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


def test_a_loss_whose_distance_is_the_combiner_trains_the_models_copy(tmp_path):
    combiner = Half()
    loss = TripletMarginLoss(margin=0.2, distance=combiner)
    parts = {"combiner": combiner, "loss": loss, "miner": MultiSimilarityMiner()}
    run = retrieval.train(SMALL, tmp_path / "run", progress=False, **parts)
    assert run.objective is not None and run.model.combiner is not combiner
    assert run.objective.loss.distance is run.model.combiner
    assert loss.distance is combiner
    assert run.recipe.miner is not None and run.recipe.miner.name == "object.MultiSimilarityMiner"
    parts = {"combiner": combiner, "loss": TripletMarginLoss(), "progress": False}
    text = refusal(RecipeError, retrieval.train, SMALL, tmp_path / "b", **parts)
    assert "[combiner] object.Half needs a loss that takes a `distance`" in text


class Inverted(Half):
    def __init__(self) -> None:
        super().__init__()
        self.is_inverted = True


INVERTED = Inverted()


def flat(x: Tensor) -> Tensor:
    return x


MAPS = nn.Conv2d(1, 4, 3)
MAPS.preprocessing = retrieval.plugin.Preprocessing((8, 8), 1)


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ({"backbone": MAPS}, "object.Conv2d gave a tensor of shape (2, 4, "),
        (
            {"combiner": INVERTED, "loss": TripletMarginLoss(distance=INVERTED)},
            "is_inverted = True",
        ),
        ({"backbone": flat}, "object.flat gave a function; a backbone factory must give a retr"),
        ({"loss": 3.0}, "object of type float, which cannot be called"),
        ({"backbone": nn.Bilinear(3, 3, 3)}, "The backbone object.Bilinear failed: TypeError"),
    ],
)
def test_what_breaks_a_contract_is_refused_before_anything_is_written(tmp_path, part, sentence):
    output = tmp_path / "run"
    text = refusal(RetrievalError, retrieval.train, SMALL, output, progress=False, **part)
    assert sentence in text and not output.exists()


def test_cached_features_of_a_module_depend_on_what_it_computes(tmp_path):
    class Mean(nn.Module):
        preprocessing = retrieval.plugin.Preprocessing((8, 8), 1)

        def __init__(self, reduce):
            super().__init__()
            self.reduce = reduce

        def forward(self, images):
            return self.reduce(images.flatten(1)).reshape(-1, 8)

    frozen = TABLES | {"backbone": {"frozen": True}, "loss": SMALL["loss"], "data": SMALL["data"]}
    runs = [
        retrieval.train(frozen, tmp_path / name, progress=False, backbone=Mean(reduce))
        for name, reduce in (("a", lambda x: x[:, 24:32]), ("b", lambda x: x[:, 32:40]))
    ]
    first, second = (run.model.state_dict()["head.0.weight"] for run in runs)
    assert not torch.equal(first, second)


class Pairs(torch.utils.data.Dataset[Any]):
    """A PyTorch dataset that knows nothing of this package."""

    noise = 0.0

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> Any:
        image = torch.from_numpy(DIGITS.images[index])[None] / 16
        return image * (1 - self.noise * torch.rand(1)), int(DIGITS.target[index])


def test_the_sides_of_a_dictionary_are_not_pooled(tmp_path):
    recipe = {name: table for name, table in SMALL.items() if name not in ("data", "split")}
    sides = {"train": Pairs(), "test": (DIGITS.images[300:500] / 16, DIGITS.target[300:500])}
    mixed = {**recipe, "split": {"by": "item"}}
    text = refusal(RecipeError, retrieval.train, mixed, tmp_path / "a", dataset=sides)
    assert "mix the sides" in text and 'by = "given"' in text
    run = retrieval.train(recipe, tmp_path / "b", dataset=sides, progress=False)
    assert len(run.splits.query) == 200 and "dictionary_of_sides, core.convnet" in repr(run)


def test_random_transforms_of_a_dataset_are_refused(tmp_path):
    random = Pairs()
    random.noise = 0.5
    text = refusal(DataError, retrieval.train, SMALL, tmp_path / "run", dataset=random)
    assert "item 0 differs" in text and "[augmentation]" in text


def test_a_run_of_a_torch_dataset_is_evaluated_reported_and_compared_again(tmp_path, monkeypatch):
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
    shifted = (DIGITS.images[:300] / 16, DIGITS.target[1:301])
    text = refusal(DataError, retrieval.load, "run", dataset=shifted)
    assert "was trained with another dataset" in text
    other = {**recipe, "name": "other", "data": run.dataset, "loss": TripletMarginLoss()}
    result = retrieval.compare([again, other], seeds=2, pretrained="none", progress=False)
    assert result.recipes == ["small", "other"] and "±" in repr(result)
    assert retrieval.Recipe(**other) != run.recipe
    options = {"seeds": 2, "workers": 2, "progress": False}
    text = refusal(DataError, retrieval.compare, [again, other], "two", **options)
    assert "omit workers and ray" in text and not Path("two").exists()


class Inverted(nn.Module):
    """A transform as written in a notebook: the negative of some images."""

    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        self.share = share

    def forward(self, image: Tensor) -> Tensor:
        assert image.dtype == torch.uint8 and image.ndim == 3
        return 255 - image if float(torch.rand(())) < self.share else image


def test_an_augmentation_object_changes_the_training_images(tmp_path):
    def weights(name: str, **options: Any) -> dict[str, Tensor]:
        run = retrieval.train(SMALL, tmp_path / name, epochs=1, progress=False, **options)
        return dict(run.model.state_dict())

    never, half = weights("never"), weights("half", augmentation=Inverted())
    same(never, weights("zero", augmentation=Inverted(0.0)))
    assert any(not torch.equal(never[name], half[name]) for name in never)
    record = json.loads((tmp_path / "half" / "run.json").read_text())["objects"]["augmentation"]
    assert record["settings"]["share"] == 0.5
    assert "augmentation=…" in (tmp_path / "half" / "recipe.toml").read_text()
    call = {"epochs": 2, "resume": True, "progress": False}
    said = refusal(RetrievalError, retrieval.train, SMALL, tmp_path / "half", **call)
    assert "augmentation" in said
    other = {"augmentation": Inverted(0.1)}
    said = refusal(DataError, retrieval.train, SMALL, tmp_path / "half", **call, **other)
    assert "another augmentation: its share was 0.5, and is 0.1 now" in said
    resumed = retrieval.train(SMALL, tmp_path / "half", augmentation=Inverted(), **call)
    assert len(resumed.history) == 2
    # only training needs the object
    assert retrieval.load(tmp_path / "half").evaluate(progress=False).queries
    table = SMALL | {"augmentation": Inverted(), "name": "table"}
    assert retrieval.Recipe(**table).augmentation.transforms == ["object.Inverted"]


@pytest.mark.parametrize("batch_size", [None, 16])
def test_a_sampler_of_items_is_divided_into_batches(batch_size, tmp_path):
    from pytorch_metric_learning.samplers import MPerClassSampler

    labels = [i % 5 for i in range(300)]
    sampler = MPerClassSampler(labels, m=4, batch_size=batch_size, length_before_new_iter=200)
    recipe = SMALL | {"sampler": {"classes": 5, "items": 4}}
    run = retrieval.train(recipe, tmp_path / "run", epochs=1, sampler=sampler, progress=False)
    assert run.history[0]["step"] == (10 if batch_size is None else 12)
    whole = SMALL | {"sampler": {"classes": 100, "items": 4}, "name": "whole"}
    few = MPerClassSampler(labels, m=4, length_before_new_iter=200)
    said = refusal(DataError, retrieval.train, whole, tmp_path / "x", sampler=few, progress=False)
    assert "draws 200 items in an epoch, which are too few for a batch of 400" in said
