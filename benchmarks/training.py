"""One training epoch of the trainer beside a hand-written loop for the same work.

    python benchmarks/training.py                      # about 15 minutes of one core
    python benchmarks/training.py --only memory JPEGs  # cases with these words; nothing is kept
    python benchmarks/training.py --write              # writes the page from the kept results

Both sides have the same network, loss, miner, optimiser and batches, so the difference is the
trainer's. The hand-written loop augments a batch with torchvision and Pillow. Images on the disk
are Fashion-MNIST's, enlarged to 64 px, as JPEGs of two kilobytes, which are decoded and reduced
again. Epochs of both sides take turns in one process on one thread.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pytorch_metric_learning import samplers
from retrieval.base.progress import Meter
from retrieval.data.augment import built_transforms
from retrieval.data.loading import RawInputs, TrainBatches
from retrieval.recipe.read import check_recipe
from retrieval.run import checkpoint_format
from retrieval.run.open import Run, build_run
from retrieval.training.process import make_accelerator
from retrieval.training.trainer import Trainer
from torch import Tensor, nn
from torchvision.transforms import v2

from bench import RAW, arguments, finish, in_turns, machine_of, markdown, one_thread, page

SIZE, BATCHES, CLASSES, ITEMS = 28, 20, 8, 16
PICTURES = 6000
SMALL = {"name": "core.convnet", "size": SIZE, "width": 12, "layers": 1}
LARGE = {"name": "core.convnet", "size": SIZE}
AIM = 1.05
BARE, OURS = "by hand", "trainer"
Images = Callable[[Tensor], Tensor]
Epoch = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """One kind of work.

    Attributes:
        title: title of its row.
        augmentation: the recipe's table.
        change: augmentation of a batch's pixels (B, 1, 28, 28), uint8, in the hand-written loop.
        files: whether images are files, too many to keep in memory after decoding.
        picture: augmentation of an opened image in the hand-written loop.
        mix: whether two images are mixed.
        net: the backbone's table.
        variants: further settings of the trainer, by title.
    """

    title: str
    augmentation: Mapping[str, Any] = field(default_factory=dict)
    change: Images | None = None
    files: bool = False
    picture: Callable[[Image.Image], Image.Image] | None = None
    mix: bool = False
    net: Mapping[str, Any] = field(default_factory=lambda: SMALL)
    variants: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def views(self) -> int:
        """How often each item is in its batch."""
        return int(self.augmentation.get("views", 1))


def flipped(pixels: Tensor) -> Tensor:
    """Mirror half of a batch."""
    chosen = torch.rand(len(pixels)) < 0.5
    pixels[chosen] = pixels[chosen].flip(-1)
    return pixels


RAND_AUGMENT = v2.RandAugment()
RESIZE = v2.Resize((SIZE, SIZE), v2.InterpolationMode.BILINEAR)
VARIANTS: dict[str, dict[str, Any]] = {
    "`channels_last`": {"channels_last": True},
    '`precision = "bf16"`': {"precision": "bf16"},
}
CROP = {"crop_scale": [0.2, 1.0]}
CROPPED = v2.RandomResizedCrop(SIZE, (0.2, 1.0), (0.75, 1.3333))
CASES = (
    Case("arrays in memory"),
    Case("arrays, `horizontal_flip`", {"horizontal_flip": 0.5}, flipped),
    Case("arrays, `crop_scale`", CROP, picture=CROPPED),
    Case(
        "arrays, `RandAugment`",
        {"transforms": ["RandAugment"]},
        lambda x: torch.stack([*map(RAND_AUGMENT, x)]),
    ),
    Case("arrays, two `views`, mirrored", {"views": 2, "horizontal_flip": 0.5}, flipped),
    Case('arrays, `mix = "mixup"`', {"mix": "mixup"}, mix=True),
    Case("JPEGs", files=True, picture=RESIZE),
    Case("JPEGs, `crop_scale`", CROP, files=True, picture=CROPPED),
    Case("arrays in memory, `core.convnet` as it comes", net=LARGE, variants=VARIANTS),
)


def recipe(case: Case, pictures: Path, **train: Any) -> dict[str, Any]:
    table: dict[str, Any] = {
        "data": {"name": "core.fashion_mnist"},
        "split": {"by": "given", "validation": 0.0},
        "sampler": {"classes": CLASSES, "items": ITEMS // case.views, "batches": BATCHES},
        "augmentation": dict(case.augmentation),
        "backbone": dict(case.net),
        "loss": {"name": "pml.arc_face" if case.mix else "pml.multi_similarity"},
        "train": {"epochs": 1, "device": "cpu", **train},
    }
    if case.files:
        table["data"] = {"name": "core.image_folder", "folder": str(pictures)}
    if not case.mix:
        table["miner"] = {"name": "pml.multi_similarity"}
    return table


def write_pictures(folder: Path) -> None:
    """Write Fashion-MNIST's first training images as JPEGs of 64 px, in a folder of each class."""
    run = build_run(folder, check_recipe(recipe(CASES[0], folder)))
    pixels, labels = np.asarray(run.dataset.arrays), run.dataset.labels
    for number in range(PICTURES + 100):
        place = folder / ("train" if number < PICTURES else "test") / str(labels[number])
        place.mkdir(parents=True, exist_ok=True)
        large = Image.fromarray(pixels[number]).resize((64, 64), Image.Resampling.BICUBIC)
        large.save(place / f"{number}.jpg", quality=90)


def by_trainer(case: Case, folder: Path, pictures: Path, **train: Any) -> Epoch:
    """Return a function that runs an epoch of the trainer, without validation and checkpoints."""
    made = check_recipe(recipe(case, pictures, **train))
    checkpoint_format.seed_everything(0)
    run = build_run(folder, made)
    trainer = Trainer(run, make_accelerator(made))
    if case.files:
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
    """Return a function that runs an epoch of the hand-written loop."""
    checkpoint_format.seed_everything(0)
    run = build_run(folder, check_recipe(recipe(case, pictures)))
    assert run.objective is not None
    net = nn.Sequential(run.model.backbone, run.model.head).train()
    loss, miner = run.objective.loss, run.objective.miner
    optimizer = torch.optim.AdamW([*net.parameters(), *loss.parameters()], lr=1e-3)
    labels, images = torch.from_numpy(run.splits.train_labels), images_of(case, run)
    size, items = CLASSES * ITEMS // case.views, ITEMS // case.views

    def epoch() -> None:
        order = list(samplers.MPerClassSampler(labels, items, size, BATCHES * size))
        for rows in torch.tensor(order).repeat_interleave(case.views).split(size * case.views):
            pixels, y, other, weight = images(rows), labels[rows], None, 1.0
            if case.change is not None:
                pixels = case.change(pixels)
            if case.mix:
                weight, others = float(np.random.beta(1.0, 1.0)), torch.randperm(len(rows))
                pixels = weight * pixels.float() + (1 - weight) * pixels[others].float()
                other = y[others]
            embeddings = net((pixels.float() / 255 - 0.5) / 0.5)
            value = loss(embeddings, y, miner(embeddings, y)) if miner else loss(embeddings, y)
            if other is not None:
                value = weight * value + (1 - weight) * loss(embeddings, other)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            value.item()

    return epoch


def images_of(case: Case, run: Run) -> Images:
    """Return a function that returns the pixels (B, 1, 28, 28) of rows."""
    train = run.splits.train

    def stacked(opened: list[Image.Image]) -> Tensor:
        assert case.picture is not None
        return torch.from_numpy(np.stack([np.asarray(case.picture(one))[None] for one in opened]))

    if case.files:
        files = [run.dataset.files[item] for item in train]
        return lambda rows: stacked([Image.open(files[row]).convert("L") for row in rows.tolist()])
    pixels = torch.from_numpy(np.asarray(run.dataset.arrays)[train])[:, None]
    if case.picture is None:
        return lambda rows: pixels[rows]
    array = pixels[:, 0].numpy()
    return lambda rows: stacked([Image.fromarray(array[row]) for row in rows.tolist()])


def measure(repeats: int, only: list[str] | None) -> dict[str, Any]:
    """Return every epoch's seconds; the hand-written loop and the trainer take turns."""
    one_thread()
    torch.set_num_threads(1)
    raw = machine_of("torch", "torchvision", "pytorch-metric-learning")
    raw |= {"repeats": repeats, "cases": {}}
    with tempfile.TemporaryDirectory() as name:
        folder, pictures = Path(name), Path(name) / "pictures"
        write_pictures(pictures)
        for case in CASES:
            if only and not any(word in case.title for word in only):
                continue
            places = folder, pictures
            sides = {BARE: by_hand(case, *places), OURS: by_trainer(case, *places)}
            for title, train in case.variants.items():
                sides[f"{OURS}, {title}"] = by_trainer(case, folder, pictures, **train)
            raw["cases"][case.title] = rows = in_turns(sides, repeats)
            print(case.title, {side: f"{ratio(rows, side):.3f}" for side in rows}, flush=True)
    return raw


def ratio(rows: dict[str, Any], side: str, clock: str = "cpu") -> float:
    """Return a side's time over the hand-written loop's: the median of neighbouring epochs."""
    pairs = zip(rows[BARE][clock], rows[side][clock], strict=True)
    return statistics.median(own / bare for bare, own in pairs)


def render(raw: dict[str, Any]) -> str:
    lines = []
    for title, rows in raw["cases"].items():
        bare = statistics.median(rows[BARE]["cpu"])
        for side in list(rows)[1:]:
            own = statistics.median(rows[side]["cpu"])
            name = title if side == OURS else f"{title}, {side.partition(', ')[2]}"
            cells = [f"{BATCHES * CLASSES * ITEMS / bare:,.0f}", f"{bare:.2f}", f"{own:.2f}"]
            ratios = [f"{ratio(rows, side, clock):.2f} ×" for clock in ("cpu", "wall")]
            lines.append([name, *cells, *ratios])
    head = ["", "by hand, images a CPU second", "by hand, CPU s", "trainer, CPU s"]
    head += ["CPU, against by hand (median of pairs)", "wall"]
    return page(f"""
        # One training epoch

        `python benchmarks/training.py`. {raw["machine"]}, one thread, {raw["versions"]}; load
        average {raw["load"]} at the start. Fashion-MNIST at {SIZE} px, {BATCHES} batches of
        {CLASSES} × {ITEMS}, {raw["repeats"]} epochs of each side in turn after a warm-up. Rows
        without a net have a small one (`core.convnet` of width {SMALL["width"]}, one convolution a
        stage), which shows the trainer's own cost. Aim: {AIM} × the CPU seconds of the loop by
        hand.

        {markdown(head, lines)}

        The trainer does two things that the loop by hand does not: a named transform draws from its
        own generator, so a resumed run draws the same, and an image file's size is checked before
        it is decoded.
    """)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="cases with these words, which are not kept")
    parser.add_argument("--write", action="store_true", help="run nothing")
    options = parser.parse_args()
    if options.write:
        raw = json.loads((RAW / "training.json").read_text(encoding="utf-8"))
    else:
        raw = measure(options.repeats, options.only)
    finish("training", raw, render(raw), keep=not options.only, measured=not options.write)


if __name__ == "__main__":
    main()
