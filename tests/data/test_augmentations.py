"""Transforms of training images by name, and several views of an item."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from batches import batches, digits_dataset
from PIL import Image
from retrieval.data.augment import Changes, Drawing
from retrieval.errors import DataError
from retrieval.host.plugins import load_plugins
from retrieval.recipe.read import Recipe, to_toml
from retrieval.recipe.tables import Augmentation, Sampler
from torch import Tensor

from retrieval_lab.check_data import font_of, preview

PLUGINS = load_plugins()
REQUIRED: dict[str, dict[str, Any]] = {
    "GaussianBlur": {"kernel_size": 3},
    "JPEG": {"quality": [20, 80]},
    "RandomAdjustSharpness": {"sharpness_factor": 2.0},
    "RandomAffine": {"degrees": 15, "translate": [0.1, 0.1], "shear": [-5.0, 5.0]},
    "RandomApply": {"transforms": ["RandomInvert", "GaussianNoise"]},
    "RandomChoice": {"transforms": ["RandomInvert", "RandAugment"], "p": [0.2, 0.8]},
    "RandomCrop": {"size": [24, 32], "padding": 4},
    "RandomOrder": {"transforms": ["RandomInvert", {"name": "GaussianNoise", "sigma": 0.2}]},
    "RandomPosterize": {"bits": 3},
    "RandomResizedCrop": {"size": [24, 32]},
    "RandomRotation": {"degrees": [-30.0, 30.0]},
    "RandomSolarize": {"threshold": 100.0},
    "ColorJitter": {"brightness": 0.5, "contrast": [0.5, 1.5]},
}
RECIPE: dict[str, Any] = {
    "data": {"name": "core.digits"},
    "backbone": {"name": "core.convnet", "width": 4, "depth": 2, "layers": 1, "size": 8},
    "split": {"by": "item"},
    "sampler": {"classes": 4, "items": 2, "batches": 3},
    "loss": {"name": "pml.contrastive"},
    "train": {"epochs": 1},
}


def built(name: str) -> Callable[[Tensor], Tensor]:
    return PLUGINS.build(
        "augmentations", {"name": name, **REQUIRED.get(name.removeprefix("core."), {})}
    )


def noise(channels: int) -> Tensor:
    return torch.randint(
        30, 220, (channels, 24, 32), generator=torch.Generator().manual_seed(1)
    ).to(torch.uint8)


@pytest.fixture(scope="module")
def digits():
    return digits_dataset()


@pytest.mark.parametrize("name", PLUGINS.factories("augmentations"))
@pytest.mark.parametrize("channels", [1, 3])
def test_every_transform_follows_from_the_seed_alone(name, channels):
    transform, pixels, before = built(name), noise(channels), torch.get_rng_state()

    def changed(seed):
        with Drawing(seed):
            return transform(pixels)

    first, again = ([changed(seed) for seed in range(12)] for _ in range(2))
    assert all(map(torch.equal, first, again))
    assert all(image.shape == pixels.shape and image.dtype == torch.uint8 for image in first)
    assert torch.equal(torch.get_rng_state(), before)
    if name.endswith(("Grayscale", "ChannelPermutation")) and channels == 1:
        return  # these cannot change a single channel
    assert len({image.numpy().tobytes() for image in first}) > 1


def test_transforms_in_threads_do_not_change_what_the_main_thread_draws():
    """The model's dropout draws from the global generator while other threads load images."""
    transform, pixels, stop = built("RandAugment"), noise(3), threading.Event()

    def change():
        for seed in itertools.count():
            if stop.is_set():
                return
            with Drawing(seed):
                transform(pixels)

    torch.manual_seed(7)
    alone = [torch.rand(50) for _ in range(200)]
    threads = [threading.Thread(target=change) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        torch.manual_seed(7)
        beside = [torch.rand(50) for _ in range(200)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True))


class TestViews:
    CHANGES = Augmentation(
        transforms=["RandomErasing", {"name": "RandomAffine", "degrees": 30}], views=3
    )

    def test_each_item_has_three_different_views(self, digits):
        loader = batches(digits, Sampler(classes=4, items=2, batches=1), self.CHANGES)
        ((inputs, labels),) = loader.epoch(0)
        assert inputs.shape == (24, 1, 8, 8) and len(labels) == 24
        assert all(len(set(row)) == 1 for row in labels.view(8, 3).tolist())
        assert len({image.numpy().tobytes() for image in inputs}) == 24
        unchanged = batches(digits, Sampler(classes=4, items=2, batches=1), Augmentation())
        ((plain, plain_labels),) = unchanged.epoch(0)
        assert torch.equal(labels.view(8, 3)[:, 0], plain_labels) and len(plain) == 8

    def test_with_items_as_positives_only_views_share_a_label(self, digits):
        changes = self.CHANGES.model_copy(update={"positives": "item"})
        loader = batches(digits, Sampler(classes=10, items=1, batches=2), changes)
        for inputs, labels in loader.epoch(0):
            assert len(inputs) == 30 and len(labels.unique()) == 10
            assert all(len(set(row)) == 1 for row in labels.view(10, 3).tolist())
        every = torch.cat([labels for _, labels in loader.epoch(0)])
        assert every.max() > 9  # numbers of items, not of the ten classes


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (
            lambda x: x[:, :4],
            r"transforms\.0 \(function\) gives a tensor of shape \(3, 4, 8\).*shape \(3, 8, 8\)",
        ),
        (lambda x: x / 255, r"shape \(3, 8, 8\) and type float32"),
        (lambda x: x.numpy(), "gives a numpy array"),
        (lambda x: x * (1 // 0), r"transforms\.0 \(function\) fails: ZeroDivisionError"),
        (
            lambda x: (x + torch.rand_like(x.float())).to(torch.uint8),
            r"calls torch\.rand_like.* Use torch\.rand,",
        ),
    ],
)
def test_a_transform_that_breaks_its_contract_is_named(transform, words):
    changes = Changes(Augmentation(transforms=["X"]), (transform,))
    draws = changes.draw(0, 0, 0, 1)[0]
    with pytest.raises(DataError, match=words):
        changes.transformed(np.zeros((3, 8, 8), np.uint8), draws)


FOG = """
import torch
from retrieval.plugin import hookimpl

class Fog:
    def __init__(self, most: int = 40) -> None:
        self.most = most

    def __call__(self, pixels):
        return (pixels.int() + torch.randint(1, self.most, (1,))).clamp(max=255).to(torch.uint8)

retrieval_augmentations = hookimpl(lambda: {"fog": Fog})
"""


class TestPreview:
    def test_a_plugins_transform_is_found_by_its_name(self, tmp_path):
        plugin = tmp_path / "fog.py"
        plugin.write_text(FOG)
        transforms = [{"name": "fog.fog", "most": 60}]
        recipe = Recipe(**RECIPE, plugins=[str(plugin)], augmentation={"transforms": transforms})
        sheet = np.asarray(preview(recipe, items=2, draws=3), np.int16)
        item, change = (sheet[18:82, left : left + 64, 0] for left in (4, 80))
        assert (change - item)[item < 180].min() >= 1 and (change - item).max() < 60

    def test_a_row_shows_the_item_and_then_its_changes(self):
        recipe = Recipe(**RECIPE, augmentation={"transforms": ["RandomInvert"]})
        sheet = np.asarray(preview(recipe, items=3, draws=5))
        assert sheet.shape == (3 * (64 + 18) + 4, 6 * 68 + 12, 3)
        first = sheet[18:82, 4:68, 0]
        others = [sheet[18:82, 12 + 68 * i : 76 + 68 * i, 0] for i in range(1, 6)]
        kinds = {
            "same" if (o == first).all() else "inverted" if (o == 255 - first).all() else "other"
            for o in others
        }
        assert kinds == {"same", "inverted"}

    def test_names_are_drawn_in_a_font_that_has_their_letters(self, monkeypatch):
        from matplotlib import font_manager

        font, names = font_of(["щука ∂ é", "ψάρι"])
        assert names == ["щука ∂ é", "ψάρι"] and font.getmask("щ") != font.getmask("\uffff")
        monkeypatch.setattr(font_manager.fontManager, "ttflist", [])  # no system's fonts
        assert font_of(["雪 a"])[1] == ["\\u96ea a"]

    def test_the_command_writes_it_and_says_when_nothing_changes(self, tmp_path, cli):
        recipe = tmp_path / "r.toml"
        recipe.write_text(to_toml(Recipe(**RECIPE)))
        show = ("data", "show", recipe, "--items", "2", "--output")
        done = cli(*show, tmp_path / "sheet.png")
        assert done.code == 0, done.out + done.err
        assert "changes nothing" in (done.out + done.err)
        with Image.open(tmp_path / "sheet.png") as sheet:
            assert sheet.height == 2 * (64 + 18) + 4
        wrong = cli(*show, tmp_path / "sheet.jpg")
        assert wrong.code == 2 and ".png" in wrong.err
