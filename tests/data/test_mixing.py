"""MixUp and CutMix: pixels, labels, and which losses take them."""

from typing import Any

import numpy as np
import pytest
import torch
from batches import batches as batches_of, digits_dataset
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
        # Distance of each row from its mean with each possible partner.
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
            partners = [
                i for i in range(len(own)) if bool(((image == own[row]) | (image == own[i])).all())
            ]
            assert any(int(classes[i]) == int(labels.other[row]) for i in partners)
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
    table = Augmentation(mix=mix, mix_alpha=0.4)
    mixes = [Mix.drawn(table, (0, 0, batch), 6, (20, 30)) for batch in range(400)]
    weights = np.array([mix.weight for mix in mixes])
    # The image's edge cuts some boxes, which makes their own label's weight larger.
    low, high = (0.44, 0.56) if mix == "mixup" else (0.6, 0.85)
    assert low < weights.mean() < high and weights.std() > 0.2
    for drawn in mixes:
        assert sorted(drawn.partner) == list(range(6))
        assert (drawn.box is None) == (mix == "mixup")
        if drawn.box is not None:
            rows, columns = drawn.box
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
    # In training mode, batch norm uses the batch's own statistics, so the three calls compare.
    assert mixed.item() == pytest.approx(0.3 * first.item() + 0.7 * second.item(), rel=1e-5)


def test_a_loss_of_pairs_is_refused():
    fine = run_one_batch(Recipe(**RECIPE, augmentation={"mix": "cutmix"}))
    assert fine[-1].endswith("The recipe is fine.")
    pairs = {**RECIPE, "loss": {"name": "pml.contrastive"}, "augmentation": {"mix": "cutmix"}}
    says = r"the loss pml\.contrastive compares items with one another"
    with pytest.raises(RecipeError, match=says):
        run_one_batch(Recipe(**pairs))
