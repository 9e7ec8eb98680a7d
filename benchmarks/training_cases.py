"""What `training.py` measures with a small net: each case is a recipe, and the loop that one writes by hand for the same work.

Both sides have the same network, loss, miner and optimiser, so what differs is the trainer. By hand a batch is changed as one would write it with
torchvision and Pillow. Pictures on the disk are Fashion-MNIST's, enlarged to 64 px, as JPEGs of two kilobytes, which are decoded and made smaller again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pytorch_metric_learning import samplers
from retrieval.data.augment import built_transforms
from retrieval.data.encode import encode
from retrieval.data.loading import TrainBatches
from retrieval.data.raw import RawInputs
from retrieval.recipe.read import check_recipe
from retrieval.run import checkpoint
from retrieval.run.open import Run, build_run
from retrieval.serving.progress import Meter
from retrieval.training.process import make_accelerator
from retrieval.training.trainer import Trainer
from retrieval.training.validate import validate
from torch import Tensor, nn
from torchvision.transforms import v2

SIZE, BATCHES, CLASSES, ITEMS = 28, 20, 8, 16
PICTURES = 6000
NET = {"name": "core.convnet", "size": SIZE, "width": 12, "layers": 1}
Images = Callable[[Tensor], Tensor]
Epoch = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """One kind of work.

    Attributes:
        title: of its row.
        augmentation: the recipe's table.
        change: by hand, what becomes of a batch's pixels (B, 1, 28, 28), uint8.
        files: pictures are files: "kept" once decoded, as it comes, or "never", as where they are too many.
        picture: by hand, what is made of one opened picture.
        loss: the recipe's.
        items: of a class in a batch.
        mix: by hand, how two pictures become one.
    """

    title: str
    augmentation: Mapping[str, Any] = field(default_factory=dict)
    change: Images | None = None
    files: str | None = None
    picture: Callable[[Image.Image], Image.Image] | None = None
    loss: str = "pml.multi_similarity"
    mix: str | None = None

    @property
    def views(self) -> int:
        """How often each item is in its batch."""
        return int(self.augmentation.get("views", 1))

    @property
    def alone(self) -> bool:
        """Whether only views of one item are alike."""
        return self.augmentation.get("positives") == "item"


def flipped(pixels: Tensor) -> Tensor:
    """Mirror half of a batch."""
    chosen = torch.rand(len(pixels)) < 0.5
    pixels[chosen] = pixels[chosen].flip(-1)
    return pixels


def each(transform: Callable[[Tensor], Tensor]) -> Images:
    """Change each picture of a batch by itself."""
    return lambda pixels: torch.stack([transform(one) for one in pixels])


def small(picture: Image.Image) -> Image.Image:
    """Return a picture in the net's size."""
    return picture.resize((SIZE, SIZE), Image.Resampling.BILINEAR)


CROP = {"crop_scale": [0.2, 1.0]}
CASES = (
    Case("arrays in memory"),
    Case("arrays, `horizontal_flip`", {"horizontal_flip": 0.5}, flipped),
    Case("arrays, `crop_scale`", CROP, picture=v2.RandomResizedCrop(SIZE, (0.2, 1.0), (0.75, 1.3333))),
    Case("arrays, `RandAugment`", {"transforms": ["RandAugment"]}, each(v2.RandAugment())),
    Case(
        "arrays, `RandomAffine`",
        {"transforms": [{"name": "RandomAffine", "degrees": 15}]},
        each(v2.RandomAffine(15)),
    ),
    Case("arrays, two `views`, mirrored", {"views": 2, "horizontal_flip": 0.5}, flipped),
    Case(
        'arrays, two `views`, `positives = "item"`',
        {"views": 2, "horizontal_flip": 0.5, "positives": "item"},
        flipped,
    ),
    Case('arrays, `mix = "mixup"`', {"mix": "mixup"}, loss="pml.arc_face", mix="mixup"),
    Case('arrays, `mix = "cutmix"`', {"mix": "cutmix"}, loss="pml.arc_face", mix="cutmix"),
    Case("JPEGs, kept in memory once decoded", files="kept", picture=small),
    Case("JPEGs, too many to keep", files="never", picture=small),
    Case(
        "JPEGs, `crop_scale`", CROP, files="never", picture=v2.RandomResizedCrop(SIZE, (0.2, 1.0), (0.75, 1.3333))
    ),
)  # fmt: skip


def recipe(case: Case, pictures: Path) -> dict[str, Any]:
    """Return the recipe of a case."""
    views = case.views
    data = {"name": "core.fashion_mnist"}
    if case.files:
        data = {"name": "core.image_folder", "folder": str(pictures)}
    table: dict[str, Any] = {
        "data": data,
        "split": {"by": "given", "validation": 0.0},
        "sampler": {"classes": CLASSES, "items": ITEMS // views, "batches": BATCHES},
        "augmentation": dict(case.augmentation),
        "backbone": NET,
        "loss": {"name": case.loss},
        "train": {"epochs": 1},
    }
    if case.alone:
        table["sampler"] |= {"classes": CLASSES * ITEMS // views, "items": 1}
    if case.mix is None:
        table["miner"] = {"name": "pml.multi_similarity"}
    return table


def write_pictures(folder: Path) -> None:
    """Write Fashion-MNIST's first training images as JPEGs of 64 px, a folder for each class."""
    checkpoint.seed_everything(0)
    run = build_run(folder, check_recipe(recipe(CASES[0], folder)))
    pixels, labels = np.asarray(run.dataset.arrays), run.dataset.labels
    for number in range(PICTURES + 100):
        place = folder / ("train" if number < PICTURES else "test") / str(labels[number])
        place.mkdir(parents=True, exist_ok=True)
        large = Image.fromarray(pixels[number]).resize((64, 64), Image.Resampling.BICUBIC)
        large.save(place / f"{number}.jpg", quality=90)


VALIDATED = {
    "the small net": (NET, 1),
    "`core.convnet` as it comes": ({"name": "core.convnet", "size": SIZE}, 5),
}
"""Nets that validation is measured with, and of how many parts of an epoch one is trained and counted so many times."""


def validation(folder: Path) -> dict[str, dict[str, float]]:
    """Return, for each net, the CPU seconds of a whole epoch on Fashion-MNIST, of validating after it, and of the encoding in that: the median of three."""
    found = {}
    for title, (net, parts) in VALIDATED.items():
        sampler = {"classes": CLASSES, "items": ITEMS, "batches": 48_000 // (CLASSES * ITEMS * parts)}
        made = check_recipe(
            {
                "data": {"name": "core.fashion_mnist"},
                "sampler": sampler,
                "backbone": net,
                "loss": {"name": CASES[0].loss},
                "miner": {"name": "pml.multi_similarity"},
                "train": {"epochs": 1},
            }
        )
        checkpoint.seed_everything(0)
        run = build_run(folder, made)
        trainer = Trainer(run, make_accelerator(made))
        seconds: dict[str, list[float]] = {"epoch": [], "validate": [], "encode": []}
        for _ in range(3):
            start = time.process_time()
            trainer._epoch(Meter("training", 0, "batches", show=False))
            trainer.progress.step, trainer.progress.sums, trainer.progress.counts = 0, {}, {}
            seconds["epoch"].append((time.process_time() - start) * parts)
            start = time.process_time()
            validate(run, trainer.dataset, False, trainer.raw)
            seconds["validate"].append(time.process_time() - start)
            start = time.process_time()
            encode(run.model, trainer.dataset, run.splits.validation, device=run.device, raw=trainer.raw)
            seconds["encode"].append(time.process_time() - start)
            trainer.progress.epoch += 1
        found[title] = {name: statistics.median(values) for name, values in seconds.items()} | {
            "trained": len(trainer.batches) * trainer.batches.batch_size * parts,
            "validated": len(run.splits.validation),
        }
    return found


def framework(case: Case, folder: Path, pictures: Path) -> Epoch:
    """An epoch by the framework's trainer, without validation and checkpoints."""
    made = check_recipe(recipe(case, pictures))
    checkpoint.seed_everything(0)
    run = build_run(folder, made)
    trainer = Trainer(run, make_accelerator(made))
    if case.files == "never":
        trainer.raw = RawInputs(run.dataset, run.model.preprocessing, budget=0)
        trainer.batches = TrainBatches(
            run.dataset,
            run.splits.train,
            run.splits.train_labels,
            run.model.preprocessing,
            sampler=made.sampler,
            augmentation=made.augmentation,
            transforms=built_transforms(made),
            seed=made.seed,
            raw=trainer.raw,
        )

    def epoch() -> None:
        trainer._epoch(Meter("training", 0, "batches", show=False))
        trainer.progress.step, trainer.progress.sums, trainer.progress.counts = 0, {}, {}
        trainer.progress.epoch += 1

    return epoch


def by_hand(case: Case, folder: Path, pictures: Path) -> Epoch:
    """The loop that one writes by hand."""
    checkpoint.seed_everything(0)
    run = build_run(folder, check_recipe(recipe(case, pictures)))
    assert run.objective is not None
    net = nn.Sequential(run.model.backbone, run.model.head).train()
    loss, miner = run.objective.loss, run.objective.miner
    optimizer = torch.optim.AdamW([*net.parameters(), *loss.parameters()], lr=1e-3)
    labels, images = torch.from_numpy(run.splits.train_labels), _images(case, run)

    def epoch() -> None:
        for rows in _drawn(case, labels):
            pixels, y = images(rows), rows if case.alone else labels[rows]
            if case.change is not None:
                pixels = case.change(pixels)
            pixels, other, weight = _mixed(case, pixels, y)
            codes = net((pixels.float() / 255 - 0.5) / 0.5)
            value = loss(codes, y) if miner is None else loss(codes, y, miner(codes, y))
            if other is not None:
                value = weight * value + (1 - weight) * loss(codes, other)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            value.item()

    return epoch


def _drawn(case: Case, labels: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of each batch."""
    size = CLASSES * ITEMS // case.views
    if case.alone:
        rows = torch.cat([torch.randperm(len(labels))[:size] for _ in range(BATCHES)])
    else:
        length = BATCHES * size
        rows = torch.tensor(list(samplers.MPerClassSampler(labels, ITEMS // case.views, size, length)))
    return rows.repeat_interleave(case.views).split(size * case.views)


def _images(case: Case, run: Run) -> Images:
    """Return what gives the pixels (B, 1, 28, 28) of rows."""
    train = run.splits.train
    if case.files:
        files = [run.dataset.files[item] for item in train]
        return lambda rows: _stacked(case, [Image.open(files[row]).convert("L") for row in rows.tolist()])
    pixels = torch.from_numpy(np.asarray(run.dataset.arrays)[train])[:, None]
    if case.picture is None:
        return lambda rows: pixels[rows]
    array = pixels[:, 0].numpy()
    return lambda rows: _stacked(case, [Image.fromarray(array[row]) for row in rows.tolist()])


def _stacked(case: Case, opened: list[Image.Image]) -> Tensor:
    """Return pictures as a batch, each made what the net takes."""
    assert case.picture is not None
    return torch.from_numpy(np.stack([np.asarray(case.picture(one)) for one in opened]))[:, None]


def _mixed(case: Case, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None, float]:
    """Return a batch in which each picture is mixed with another, the others' labels, and the own ones' weight."""
    if case.mix is None:
        return pixels, None, 1.0
    weight, order = float(np.random.beta(1.0, 1.0)), torch.randperm(len(pixels))
    if case.mix == "mixup":
        return weight * pixels.float() + (1 - weight) * pixels[order].float(), labels[order], weight
    half = int(SIZE * (1 - weight) ** 0.5) // 2
    (top, bottom), (left, right) = (
        (max(0, at - half), min(SIZE, at + half)) for at in np.random.randint(SIZE, size=2).tolist()
    )
    mixed = pixels.clone()
    mixed[:, :, top:bottom, left:right] = pixels[order][:, :, top:bottom, left:right]
    return mixed, labels[order], 1 - (bottom - top) * (right - left) / SIZE**2
