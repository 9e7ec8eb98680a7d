"""Images that are two in one: pixels, labels, and which losses take them."""

from typing import Any

import numpy as np
import pytest
import torch
from batches import batches as batches_of
from batches import digits_dataset
from retrieval.data.augment import Mix, MixedLabels
from retrieval.data.loading import TrainBatches
from retrieval.errors import RecipeError
from retrieval.recipe.read import Recipe
from retrieval.recipe.tables import Augmentation, Sampler
from retrieval.training.check import run_one_batch

RECIPE: dict[str, Any] = {
    "data": {"name": "core.digits"},
    "split": {"by": "item"},
    "backbone": {"name": "core.convnet", "width": 4, "depth": 2, "layers": 1, "size": 8},
    "sampler": {"classes": 4, "items": 2, "batches": 3},
    "loss": {"name": "pml.arc_face"},
    "train": {"epochs": 1},
}


def batches(mix: Any, **more: Any) -> TrainBatches:
    sampler = Sampler(classes=4, items=3, batches=6)
    return batches_of(digits_dataset(), sampler, Augmentation(mix=mix, **more), seed=4)


def test_mixup_is_the_weighted_mean_of_two_images_and_their_labels():
    plain = list(batches(None).epoch(1))
    for (inputs, labels), (own, classes) in zip(batches("mixup").epoch(1), plain, strict=True):
        assert isinstance(labels, MixedLabels) and torch.equal(labels.own, classes)
        assert 0 <= labels.weight <= 1
        whole = own.double()
        means = labels.weight * whole[:, None] + (1 - labels.weight) * whole[None]
        # of each row to each partner
        far = (means - inputs.double()[:, None]).abs().amax((2, 3, 4))
        assert float(far.amin(1).max()) <= 0.51
        assert torch.equal(labels.other, classes[far.argmin(1)])


def test_cutmix_puts_a_box_of_another_image_in_and_weighs_by_its_area():
    areas = set()
    plain = list(batches(None).epoch(0))
    for (inputs, labels), (own, classes) in zip(batches("cutmix").epoch(0), plain, strict=True):
        assert isinstance(labels, MixedLabels)
        boxes = []
        for row, image in enumerate(inputs):
            fits = [
                o for o in range(len(own)) if bool(((image == own[row]) | (image == own[o])).all())
            ]
            assert any(int(classes[o]) == int(labels.other[row]) for o in fits)
            boxes.append((image != own[row]).flatten())
        changed = torch.stack(boxes).any(0).view(8, 8)
        rows, columns = changed.any(1).nonzero(), changed.any(0).nonzero()
        if len(rows):
            box = int(rows.max() - rows.min() + 1) * int(columns.max() - columns.min() + 1)
            assert box <= round((1 - labels.weight) * 64)
        areas.add(round((1 - labels.weight) * 64))
        assert (1 - labels.weight) * 64 == pytest.approx(round((1 - labels.weight) * 64))
    assert len(areas) > 2


@pytest.mark.parametrize("mix", ["mixup", "cutmix"])
def test_weights_follow_their_distribution_and_boxes_stay_inside(mix):
    drawn = [
        Mix.drawn(Augmentation(mix=mix, mix_alpha=0.4), (0, 0, b), 6, (20, 30)) for b in range(400)
    ]
    weights = np.array([one.weight for one in drawn if one is not None])
    # a box that its image's edge cuts is smaller than was drawn
    low, high = (0.44, 0.56) if mix == "mixup" else (0.6, 0.85)
    assert len(weights) == 400 and low < weights.mean() < high
    assert weights.std() > 0.2
    for one in drawn:
        assert one is not None and sorted(one.partner) == list(range(6))
        if one.box is not None:
            rows, columns = one.box
            assert 0 <= rows.start <= rows.stop <= 20 and 0 <= columns.start <= columns.stop <= 30


def test_the_loss_is_the_weighted_mean_of_both_labels_losses(tmp_path):
    from accelerate import Accelerator
    from retrieval.run.open import build_run
    from retrieval.training.step import Step

    recipe = Recipe(**RECIPE, augmentation={"mix": "mixup"})
    torch.manual_seed(0)
    run = build_run(tmp_path, recipe)
    assert run.objective is not None
    step = Step(run.model, run.objective, recipe, recipe.phases[0], 1, Accelerator(cpu=True))
    inputs = torch.randint(0, 256, (8, 1, 8, 8), dtype=torch.uint8)
    own, other = torch.arange(8) % 4, torch.arange(8).flip(0) % 4
    mixed = step.losses(inputs, MixedLabels(own, other, 0.3)).metric
    first, second = step.losses(inputs, own).metric, step.losses(inputs, other).metric
    assert mixed is not None and first is not None and second is not None
    # batch norm moves on with each call, and dropout is none: in training mode the batch's own
    # statistics count
    assert mixed.item() == pytest.approx(0.3 * first.item() + 0.7 * second.item(), rel=1e-5)


class TestRefusals:
    def test_a_loss_of_pairs(self):
        recipe = Recipe(
            **{**RECIPE, "loss": {"name": "pml.contrastive"}}, augmentation={"mix": "cutmix"}
        )
        with pytest.raises(
            RecipeError, match=r"the loss pml\.contrastive compares items with one another"
        ):
            run_one_batch(recipe)

    def test_a_miner(self):
        with pytest.raises(RecipeError, match="needs one label per item"):
            Recipe(**RECIPE, miner={"name": "pml.multi_similarity"}, augmentation={"mix": "cutmix"})

    def test_a_recipe_that_mixes_runs(self):
        assert "The recipe is fine." in "\n".join(
            run_one_batch(Recipe(**RECIPE, augmentation={"mix": "cutmix"}))
        )
