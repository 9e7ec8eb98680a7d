"""Training with texts: what a batch says is right, resuming, evaluation both ways, and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import retrieval
import torch
import worded
from PIL import Image
from retrieval.data.datasets import ArrayDataset
from retrieval.data.texts import EncodedTexts, ItemTexts
from retrieval.errors import DataError, PluginError, RecipeError
from retrieval.host.plugins import create
from retrieval.model.model import TextPart
from retrieval.recipe.read import check_recipe
from retrieval.recipe.tables import Text
from retrieval.training.trainer import train_run
from torch import nn
from trained_weights import apart, fit, moved, start, weights

PLUGINS = [str(Path(__file__).with_name("toolbox.py")), worded.__file__]
BASE: dict[str, Any] = {
    "name": "texts",
    "plugins": PLUGINS,
    "data": {"name": "worded.digits"},
    "split": {"by": "item", "test": 0.3},
    "sampler": {"name": "core.random", "classes": 16, "items": 4},
    "backbone": {"name": "toolbox.net"},
    "head": {"embedding_size": 16},
    "text": {"name": "worded.words"},
    "loss": {"name": "core.info_nce"},
    "optimizer": {"lr": 0.02},
    "train": {"epochs": 2, "device": "cpu"},
    "evaluate": {"metrics": ["recall_at_1", "recall_at_5", "map_at_r"]},
}
LEARNS = {
    "backbone": {"name": "toolbox.net", "width": 16, "dropout": 0.0},
    "train": {"epochs": 40, "device": "cpu"},
}
"""Enough for words to find digits."""


@pytest.fixture
def make(monkeypatch, tmp_path):
    """A function that returns the recipe `BASE` with some tables replaced; `None` removes one."""
    monkeypatch.setenv("RETRIEVAL_CACHE", str(tmp_path / "cache"))

    def build(**tables: Any) -> Any:
        return check_recipe({k: v for k, v in {**BASE, **tables}.items() if v is not None})

    return build


# --- the texts of items, and of a batch


def items_with(*texts: Any) -> ItemTexts:
    pixels = np.zeros((len(texts), 2, 2), np.uint8)
    rows = [{"text": text} for text in texts]
    return ItemTexts(ArrayDataset(pixels, ["x"] * len(texts), metadata=rows), Text(name="x"))


def test_texts_are_lines_or_a_list_each_once_and_without_characters_that_no_text_has():
    texts = items_with(" red mug\n\nmug ", ["mug", "", "mug"], None, "a\0b\ud800")
    assert texts.of(range(4)) == [["red mug", "mug"], ["mug"], [], ["a b\\ud800"]]
    assert texts.distinct == ["red mug", "mug", "a b\\ud800"]


def test_without_a_text_an_error_names_the_columns():
    data = ArrayDataset(np.zeros((2, 2, 2), np.uint8), ["x", "y"], metadata=[{"texts": "a"}] * 2)
    with pytest.raises(DataError, match=r"column 'text' .the data have: texts.. Did you mean"):
        ItemTexts(data, Text(name="x"))


def test_texts_come_from_csv_from_parquet_and_from_hugging_face(tmp_path):
    wanted = [["red mug", "mug"], ['two"dogs']]
    for name in "ab":
        Image.new("L", (4, 4)).save(tmp_path / f"{name}.png")
    csv = tmp_path / "photos.csv"
    csv.write_text('path,label,text\na.png,a,"red mug\nmug"\nb.png,b,"two""dogs"\n')
    data = [create("dataset", "core.csv", manifest=str(csv))]
    arrow = pytest.importorskip("pyarrow")
    columns = {"label": ["a", "b"], "text": wanted}
    vectors = arrow.array([[1.0, 2.0], [3.0, 4.0]], arrow.list_(arrow.float32()))
    parquet = pytest.importorskip("pyarrow.parquet")
    words = arrow.array(wanted, arrow.list_(arrow.string()))
    for number, text in enumerate(
        (
            ["red mug\nmug", 'two"dogs'],
            words,
            words.cast(arrow.large_list(arrow.large_string())),
            words.cast(arrow.list_(arrow.dictionary(arrow.int32(), arrow.string()))),
        )
    ):
        file = tmp_path / f"{number}.parquet"
        lines = {"key": ["a", "b"], "label": ["a", "b"], "text": text}
        parquet.write_table(arrow.table({"features": vectors, **lines}), file)
        data.append(create("dataset", "core.parquet", path=str(file)))
    paths = tmp_path / "paths.parquet"
    images = [str(tmp_path / "a.png"), str(tmp_path / "b.png")]
    parquet.write_table(arrow.table({"path": images, **columns}), paths)
    pandas = pytest.importorskip("pandas")
    data.append(retrieval.as_dataset(pandas.read_parquet(paths)))
    datasets = pytest.importorskip("datasets", reason="the extra huggingface is not installed")
    data.append(retrieval.as_dataset(datasets.Dataset.from_dict({"image": images, **columns})))
    loaded = datasets.Dataset.from_parquet(str(paths), cache_dir=str(tmp_path / "cache"))
    data.append(retrieval.as_dataset(loaded))
    datasets.DatasetDict({"train": loaded.cast_column("path", datasets.Image())}).save_to_disk(
        tmp_path / "saved"
    )
    options = {"source": str(tmp_path / "saved"), "image": "path", "test": None}
    data.append(create("dataset", "core.huggingface", **options))
    for dataset in data:
        assert ItemTexts(dataset, Text(name="x")).of([0, 1]) == wanted


def labels_of(texts: ItemTexts, items: Any, batch: int = 0) -> Any:
    encoded = EncodedTexts(texts, TextPart(worded.Words(), nn.Identity()), torch.device("cpu"))
    return encoded.labels(np.asarray(items), np.zeros(len(items), np.int64), (0, 0, batch))


def right_of(labels: Any) -> list[list[bool]]:
    """Which texts of a batch are right for each image, as the loss is told."""
    if labels.pairs is None:
        return (labels.own[:, None] == labels.of_texts).tolist()
    right = torch.zeros(len(labels.own), len(labels.of_texts), dtype=torch.bool)
    right[labels.pairs[0], labels.pairs[1]] = True
    wrong = torch.zeros_like(right)
    wrong[labels.pairs[2], labels.pairs[3]] = True
    assert torch.equal(wrong, ~right)
    return right.tolist()


def test_a_text_is_right_for_every_image_of_the_batch_that_has_it():
    listed = [["one", "odd"], ["two"], ["three", "odd"], []]
    texts = items_with(*listed)
    with_pairs = 0
    for batch in range(20):
        items = [0, 1, 2, 3]
        labels = labels_of(texts, items, batch)
        numbers, _ = texts.drawn(np.array(items), (0, 0, batch))
        drawn = [texts.distinct[number] for number in numbers]
        assert right_of(labels) == [[text in listed[item] for text in drawn] for item in items]
        assert len(labels.texts) == len(drawn) == len(set(drawn))
        with_pairs += labels.pairs is not None
    # both ways to say it occur
    assert 0 < with_pairs < 20


def test_images_that_share_no_text_need_no_pairs_and_each_draws_one_of_its_texts():
    texts = items_with(["one", "a one"], ["two", "a two"], ["six", "a six"])
    seen = set()
    for batch in range(20):
        labels = labels_of(texts, [0, 1, 2], batch)
        assert labels.pairs is None and len(labels.texts) == 3
        seen.update(texts.drawn(np.arange(3), (0, 0, batch))[0].tolist())
    assert len(seen) == 6


# --- training


def test_training_makes_words_find_images_and_images_their_words(make, tmp_path):
    run = retrieval.train(make(**LEARNS), tmp_path / "run")
    metrics = run.evaluate().metrics
    assert list(metrics) == ["trained", "text to image", "image to text"]
    assert metrics["text to image"]["recall_at_1"] > 0.9
    assert metrics["image to text"]["recall_at_1"] > 0.8
    assert metrics["text to image"]["map_at_r"] > 0.6
    # the same numbers as by hand, from the vectors of texts and images
    images = run.encode("test")
    items = run.splits.query
    texts = sorted({text for digit in range(10) for text in worded.texts_of(digit)})
    nearest = np.argmax(run.encode_text(texts) @ images.T, axis=1)
    digits = [int(run.dataset.labels[items[row]]) for row in nearest]
    right = [text in worded.texts_of(digit) for text, digit in zip(texts, digits, strict=True)]
    assert metrics["text to image"]["recall_at_1"] == pytest.approx(np.mean(right))
    assert run.history[-1]["validation_recall_at_1"] > 0.9


@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_encoder_stays_and_its_head_trains(make, tmp_path, frozen):
    recipe = make(text={"name": "worded.words", "frozen": frozen})
    changed = moved(start(tmp_path, recipe), weights(fit(tmp_path, recipe)))
    assert ("model.text.encoder.vectors.weight" in changed) != frozen
    assert "model.text.head.0.weight" in changed and "model.head.0.weight" in changed


@pytest.mark.parametrize("loss", ["core.sigmoid_loss", "pml.nt_xent"])
def test_a_frozen_encoder_learns_as_one_that_a_phase_does_not_train(make, tmp_path, loss):
    """The features that are computed once are those of the texts."""
    encoder = {"name": "worded.words"}
    still = {"loss": {"name": loss}, "backbone": {"name": "toolbox.net", "dropout": 0.0}}
    once = make(text=encoder | {"frozen": True}, **still)
    again = make(
        text=encoder, optimizer={"lr": 0.02, "lr_factor": {"*.vectors.weight": 0}}, **still
    )
    assert apart(fit(tmp_path / "once", once), fit(tmp_path / "again", again)) < 1e-5


def test_a_stopped_run_ends_with_the_same_weights(make, resumes):
    resumes(make(), batch=5)


def test_chunks_give_the_same_weights(make, tmp_path):
    still = {"backbone": {"name": "toolbox.net", "dropout": 0.0, "batch_norm": False}}
    train = {"epochs": 1, "device": "cpu"}
    whole = fit(tmp_path / "whole", make(train=train, **still))
    parts = fit(tmp_path / "parts", make(train=train | {"chunk": 10}, **still))
    assert apart(whole, parts) < 1e-5


def test_images_without_texts_train_too_and_real_weight_compares_images(make, tmp_path):
    data = {"name": "worded.digits", "bare": 200}
    train = {"epochs": 1, "device": "cpu", "real_weight": 1.0}
    alone = fit(tmp_path / "a", make(data=data, train=train | {"real_weight": 0.0}))
    both = fit(tmp_path / "b", make(data=data, train=train))
    assert apart(alone, both) > 1e-4


MINERS = ["pml.multi_similarity", "pml.triplet_margin"]


@pytest.mark.parametrize(
    ("miner", "loss"),
    [
        ({"name": "pml.multi_similarity"}, {"name": "core.info_nce"}),
        (
            {"name": "pml.triplet_margin", "margin": 0.4},
            {"name": "pml.triplet_margin", "margin": 0.4},
        ),
    ],
)
def test_a_miner_picks_pairs_of_images_and_texts(make, tmp_path, miner, loss):
    tables = LEARNS | {"miner": miner, "loss": loss}
    run = retrieval.train(make(**tables), tmp_path / "run")
    assert run.history[0]["mined"] > 0
    assert run.evaluate().metrics["text to image"]["recall_at_1"] > 0.7


def test_no_mined_pair_contradicts_what_is_right():
    """Images share texts, so numbers of items cannot say which pairs are right."""
    listed = [["one", "odd"], ["two"], ["three", "odd"], []]
    texts = items_with(*listed)
    torch.manual_seed(0)
    for batch in range(20):
        labels = labels_of(texts, [0, 1, 2, 3], batch)
        right = torch.tensor(right_of(labels))
        codes, words = torch.randn(4, 5), torch.randn(len(labels.of_texts), 5)
        for name in MINERS:
            miner = create("miner", name)
            mined = miner(codes, labels.own, words, labels.of_texts)
            kept = labels.right_among(mined)
            if len(kept) == 3:
                good = right[mined[0], mined[1]] & ~right[mined[0], mined[2]]
                assert [part.tolist() for part in kept] == [part[good].tolist() for part in mined]
                continue
            assert right[kept[0], kept[1]].all() and not right[kept[2], kept[3]].any()
            assert len(kept[0]) == right[mined[0], mined[1]].sum()
            assert len(kept[2]) == (~right[mined[2], mined[3]]).sum()


def test_two_processes_train_as_one(make, trains_as_one):
    """Of a frozen encoder and of one that learns; with shared texts and without; with a miner."""
    steady = {
        "backbone": {"name": "toolbox.net", "dropout": 0.0, "batch_norm": False},
        "train": {"epochs": 1, "device": "cpu", "real_weight": 1.0},
    }
    recipes = {
        "learns": make(**steady),
        "frozen": make(**steady, text={"name": "worded.words", "frozen": True}),
        "mined": make(**steady, miner={"name": "pml.multi_similarity"}),
        "sigmoid": make(
            **steady,
            loss={"name": "core.sigmoid_loss"},
            data={"name": "worded.digits", "shared": False, "bare": 200},
        ),
    }
    lines = trains_as_one(recipes, 2)
    assert not any(line["error"] for line in lines)


# --- export


def test_a_run_becomes_a_bundle_that_finds_images_by_words(make, tmp_path):
    run = retrieval.train(make(**LEARNS), tmp_path / "run")
    encoder = run.export(tmp_path / "bundle", progress=False)
    entry = encoder.bundle.manifest.text
    assert entry is not None and entry.probe is not None and entry.length == 6
    assert 0 < entry.verified.largest_difference < entry.verified.tolerance
    texts = ["a seven", "even", "two", "digit nine two"]
    assert np.abs(encoder.encode_text(texts) - run.encode_text(texts)).max() < 1e-5
    images = encoder.encode(run.dataset.arrays[run.splits.query], progress=False)
    nearest = np.argmax(encoder.encode_text("a seven") @ images.T)
    assert run.dataset.labels[run.splits.query[nearest]] == "7"
    # a run without its data verifies on the texts that it kept
    alone = retrieval.load(tmp_path / "run")
    assert np.array_equal(alone.encode_text(texts), run.encode_text(texts))
    short = run.export(tmp_path / "short", dimensions=8, progress=False)
    assert short.encode_text(texts).shape == (4, 8)


@pytest.mark.parametrize("with_gallery", [False, True])
def test_a_bundle_is_measured_both_ways_by_its_own_encoders(make, tmp_path, with_gallery):
    recipe = make(**LEARNS)
    data = worded.digits()
    if with_gallery:
        splits = ["train" if n % 3 else "test" for n in range(len(data))]
        roles = ["" if n % 3 else ("query", "gallery")[n % 2] for n in range(len(data))]
        data = ArrayDataset(
            data.arrays, data.labels, splits=splits, roles=roles, metadata=data.metadata
        )
    run = retrieval.train(recipe, tmp_path / "run", dataset=data)
    run.export(tmp_path / "bundle", progress=False)
    names = ["recall_at_1", "recall_at_10", "map_at_r"]
    metrics = run.evaluate(metrics=names, bundle=tmp_path / "bundle").metrics
    for way in ("text to image", "image to text"):
        # map_at_r looks at a whole ranking, which a server does not return
        assert metrics[f"bundle, {way}"] == pytest.approx(
            {name: metrics[way][name] for name in names[: len(metrics[f"bundle, {way}"])]}, abs=2e-3
        )
        assert metrics[f"bundle, {way}"].keys() >= {"recall_at_1", "recall_at_10"}
    # the text encoder of the bundle is what is measured
    other = run.export(tmp_path / "short", dimensions=2, progress=False)
    short = run.evaluate(metrics=["recall_at_1"], bundle=tmp_path / "short").metrics
    assert short["bundle, text to image"]["recall_at_1"] < metrics["text to image"]["recall_at_1"]
    assert other.bundle.takes_text


def test_a_pair_of_encoders_is_exported_as_it_comes(make, tmp_path):
    whole = {"frozen": True, "name": "worded.words"}
    recipe = make(
        backbone={"name": "toolbox.net", "width": 4, "frozen": True},
        head={"identity": True},
        text=whole | {"identity": True},
    )
    run = retrieval.train(recipe, tmp_path / "run", progress=False)
    encoder = run.export(progress=False)
    texts = ["a seven", "even"]
    part = run.model.text
    assert part is not None
    expected = part.features(part.tokens(texts)).detach().numpy()
    assert np.abs(encoder.encode_text(texts) - expected).max() < 1e-5


# --- refusals


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"miner": {"name": "worded.images_only"}}, "picks only among images"),
        ({"combiner": {"name": "toolbox.local"}}, r"\[text\] cannot be combined with a \[comb"),
        ({"loss": {"name": "pml.arc_face"}}, "compares only images with one another"),
        ({"augmentation": {"mix": "mixup"}}, "a mixed image has no text"),
        ({"text": {"name": "worded.words", "identity": True, "hidden": [4]}}, "no head for hidden"),
        ({"text": {"name": "worded.word"}}, "worded.words"),
        ({"text": {"name": "worded.words", "separator": ""}}, "separator"),
    ],
)
def test_a_recipe_that_texts_do_not_fit_is_refused(make, tables, says):
    with pytest.raises(RecipeError, match=says):
        make(**tables)


def test_parts_that_do_not_fit_are_refused_before_training(make, tmp_path):
    with pytest.raises(PluginError, match="must use the mask"):
        train_run(tmp_path / "a", make(text={"name": "worded.words", "masked": False}))
    with pytest.raises(RecipeError, match="gives 8 features, but the embedding of an image has 16"):
        train_run(tmp_path / "b", make(text={"name": "worded.words", "identity": True}))
    with pytest.raises(DataError, match="no item has a text in a metadata column 'words'"):
        train_run(tmp_path / "c", make(text={"name": "worded.words", "column": "words"}))
    assert not (tmp_path / "a").exists()
