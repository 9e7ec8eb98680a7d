"""One training epoch of the trainer beside a hand-written loop for the same work.

    python benchmarks/training.py                      # about 10 minutes
    python benchmarks/training.py --only memory JPEGs  # cases with these words; nothing is kept
    python benchmarks/training.py --write              # writes the page from the kept results

Both sides have the same network, loss, miner, optimiser and batches, so the difference is the
trainer's. The hand-written loop augments a batch with torchvision and Pillow; it loads photos by
torch's `DataLoader`, with as many processes. Small JPEGs on the disk are Fashion-MNIST's images,
enlarged to 64 px, of two kilobytes; photos are crops of scikit-learn's two, 640 × 480. Epochs of
both sides take turns in one process on one thread and one core, with worker processes on all cores.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
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
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.utils import data
from torchvision.transforms import InterpolationMode, v2

from bench import RAW, arguments, finish, in_turns, machine_of, markdown, one_thread, page

SIZE, BATCHES, CLASSES, ITEMS = 28, 20, 8, 16
IMAGES = BATCHES * CLASSES * ITEMS
PICTURES, PHOTOS = 6000, 256
SMALL = {"name": "core.convnet", "size": SIZE, "width": 12, "layers": 1}
LARGE = {"name": "core.convnet", "size": SIZE}
LITE = {"name": "core.efficientnet_lite0"}
AIM = 1.05
BARE, OURS = "by hand", "trainer"
Images = Callable[[Tensor], Tensor]
Batches = Sequence[Tensor]
Epoch = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """One kind of work.

    Attributes:
        title: title of its row.
        augmentation: the recipe's table.
        change: augmentation of a batch's pixels (B, 1, 28, 28), uint8, in the hand-written loop.
        files: whether images are small JPEGs, too many to keep in memory after decoding.
        photos: whether images are photos on the disk, likewise.
        vectors: whether items are vectors.
        workers: number of processes that load photos.
        batches: number of batches in an epoch.
        size: number P of classes, and of items of each, in a batch.
        picture: augmentation of an opened image in the hand-written loop.
        mix: whether two images are mixed.
        net: the backbone's table.
        variants: further settings of the trainer, by title.
    """

    title: str
    augmentation: Mapping[str, Any] = field(default_factory=dict)
    change: Images | None = None
    files: bool = False
    photos: bool = False
    vectors: bool = False
    workers: int = 0
    batches: int = BATCHES
    size: tuple[int, int] = CLASSES, ITEMS
    picture: Callable[[Image.Image], Image.Image] | None = None
    mix: bool = False
    net: Mapping[str, Any] = field(default_factory=lambda: SMALL)
    variants: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def views(self) -> int:
        """How often each item is in its batch."""
        return int(self.augmentation.get("views", 1))

    @property
    def images(self) -> int:
        """Number of images in an epoch."""
        return self.batches * self.size[0] * self.size[1]


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
RANDOM: dict[str, Any] = {"transforms": ["RandAugment"]}
PHOTO: dict[str, Any] = {"photos": True, "batches": 8}
FINE: dict[str, Any] = {"photos": True, "batches": 4, "size": (4, 4), "net": LITE}
CASES = (
    Case("vectors of 784 numbers", vectors=True, net={"name": "core.features"}, batches=200),
    Case("arrays in memory"),
    Case("arrays, `horizontal_flip`", {"horizontal_flip": 0.5}, flipped),
    Case("arrays, `crop_scale`", CROP, picture=CROPPED),
    Case(
        "arrays, `RandAugment`",
        RANDOM,
        lambda x: torch.stack([*map(RAND_AUGMENT, x)]),
    ),
    Case("arrays, two `views`, mirrored", {"views": 2, "horizontal_flip": 0.5}, flipped),
    Case('arrays, `mix = "mixup"`', {"mix": "mixup"}, mix=True),
    Case("JPEGs", files=True, picture=RESIZE),
    Case("JPEGs, `crop_scale`", CROP, files=True, picture=CROPPED),
    Case("photos", **PHOTO),
    Case("photos, `workers = 2`", workers=2, **PHOTO),
    Case("photos, EfficientNet-Lite0, `RandAugment`", RANDOM, **FINE),
    Case("photos, EfficientNet-Lite0, `RandAugment`, `workers = 2`", RANDOM, workers=2, **FINE),
    Case("arrays in memory, `core.convnet` as it comes", net=LARGE, variants=VARIANTS),
)


def recipe(case: Case, folder: Path, **train: Any) -> dict[str, Any]:
    classes, items = case.size
    table: dict[str, Any] = {
        "data": {"name": "core.fashion_mnist"},
        "split": {"by": "given", "validation": 0.0},
        "sampler": {"classes": classes, "items": items // case.views, "batches": case.batches},
        "augmentation": dict(case.augmentation),
        "backbone": dict(case.net),
        "loss": {"name": "pml.arc_face" if case.mix else "pml.multi_similarity"},
        "train": {"epochs": 1, "device": "cpu", "workers": case.workers, **train},
    }
    if case.files or case.photos:
        pictures = folder / ("photos" if case.photos else "pictures")
        table["data"] = {"name": "core.image_folder", "folder": str(pictures)}
    if case.vectors:
        table["data"] = {"name": "core.features", "file": str(folder / "vectors.npz")}
    if not case.mix:
        table["miner"] = {"name": "pml.multi_similarity"}
    return table


def write_data(folder: Path) -> None:
    """Write small JPEGs and photos, in a folder of each class, and vectors.

    Small JPEGs are Fashion-MNIST's first training images at 64 px, vectors their pixels.
    """
    run = build_run(folder, check_recipe(recipe(Case(""), folder)))
    pixels, labels = np.asarray(run.dataset.arrays), run.dataset.labels
    whole = [Image.fromarray(photo) for photo in load_sample_images().images]
    random = np.random.default_rng(0)

    def place(kind: str, number: int, count: int, label: str) -> Path:
        parent = folder / kind / ("train" if number < count else "test") / label
        parent.mkdir(parents=True, exist_ok=True)
        return parent / f"{number}.jpg"

    for number in range(PICTURES + 100):
        large = Image.fromarray(pixels[number]).resize((64, 64), Image.Resampling.BICUBIC)
        large.save(place("pictures", number, PICTURES, str(labels[number])), quality=90)
    for number in range(PHOTOS + 16):
        left, top, width = (int(random.integers(*span)) for span in ((0, 80), (0, 7), (200, 560)))
        part = whole[number % 2].crop((left, top, left + width, top + width * 3 // 4))
        part = part.resize((640, 480))
        part.save(place("photos", number, PHOTOS, str(number % 8)), quality=85)
    vectors = pixels[:PICTURES].reshape(PICTURES, -1).astype(np.float32) / 255
    splits = np.where(np.arange(PICTURES) < PICTURES - 100, "train", "test")
    names = np.array(labels[:PICTURES])
    np.savez(folder / "vectors.npz", features=vectors, labels=names, splits=splits)


def by_trainer(case: Case, folder: Path, **train: Any) -> Epoch:
    """Return a function that runs an epoch of the trainer, without validation and checkpoints."""
    made = check_recipe(recipe(case, folder, **train))
    checkpoint_format.seed_everything(0)
    run = build_run(folder, made)
    trainer = Trainer(run, make_accelerator(made))
    if case.files or case.photos:
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
            workers=case.workers,
            raw=trainer.raw,
        )

    def epoch() -> None:
        trainer._epoch(Meter("training", 0, "batches", show=False))
        trainer.progress.step, trainer.progress.sums, trainer.progress.counts = 0, {}, {}
        trainer.progress.epoch += 1

    return epoch


def by_hand(case: Case, folder: Path) -> Epoch:
    """Return a function that runs an epoch of the hand-written loop."""
    checkpoint_format.seed_everything(0)
    run = build_run(folder, check_recipe(recipe(case, folder)))
    assert run.objective is not None
    net = nn.Sequential(run.model.backbone, run.model.head).train()
    loss, miner = run.objective.loss, run.objective.miner
    optimizer = torch.optim.AdamW([*net.parameters(), *loss.parameters()], lr=1e-3)
    labels, images = torch.from_numpy(run.splits.train_labels), images_of(case, run)
    items = case.size[1] // case.views
    size = case.size[0] * items
    mean = std = torch.tensor(0.0)
    if preprocessing := run.model.preprocessing:
        mean, std = (
            torch.tensor(v)[:, None, None] for v in (preprocessing.mean, preprocessing.std)
        )

    def epoch() -> None:
        order = list(samplers.MPerClassSampler(labels, items, size, case.batches * size))
        batches = torch.tensor(order).repeat_interleave(case.views).split(size * case.views)
        for rows, pixels in zip(batches, images(batches), strict=True):
            y, other, weight = labels[rows], None, 1.0
            if case.change is not None:
                pixels = case.change(pixels)
            if case.mix:
                weight, others = float(np.random.beta(1.0, 1.0)), torch.randperm(len(rows))
                pixels = weight * pixels.float() + (1 - weight) * pixels[others].float()
                other = y[others]
            embeddings = net(pixels if case.vectors else (pixels.float() / 255 - mean) / std)
            value = loss(embeddings, y, miner(embeddings, y)) if miner else loss(embeddings, y)
            if other is not None:
                value = weight * value + (1 - weight) * loss(embeddings, other)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            value.item()

    return epoch


class Photos(data.Dataset[Tensor]):
    """Photos on the disk, as a user of torch and torchvision would load them."""

    def __init__(self, files: Sequence[Path], change: Callable[[Image.Image], Tensor]) -> None:
        self.files = files
        self.change = change

    def __getitem__(self, row: int) -> Tensor:
        with Image.open(self.files[row]) as photo:
            return self.change(photo)


def images_of(case: Case, run: Run) -> Callable[[Batches], Iterable[Tensor]]:
    """Return a function that yields the inputs of batches, (B, channels, H, W) or (B, F)."""
    train, files = run.splits.train, getattr(run.dataset, "files", [])
    if case.photos:
        return loaded(case, run, [files[item] for item in train])

    def stacked(opened: list[Image.Image]) -> Tensor:
        assert case.picture is not None
        return torch.from_numpy(np.stack([np.asarray(case.picture(one))[None] for one in opened]))

    def each(images: Images) -> Callable[[Batches], Iterable[Tensor]]:
        return lambda batches: map(images, batches)

    if case.files:
        return each(
            lambda rows: stacked([Image.open(files[train[row]]).convert("L") for row in rows])
        )
    array = np.asarray(run.dataset.arrays)[train]
    inputs = torch.from_numpy(array if case.vectors else array[:, None])
    if case.picture is None:
        return each(lambda rows: inputs[rows])
    return each(lambda rows: stacked([Image.fromarray(array[row]) for row in rows.tolist()]))


def loaded(case: Case, run: Run, files: list[Path]) -> Callable[[Batches], Iterator[Tensor]]:
    """Return a function that yields batches of photos from a `DataLoader`."""
    preprocessing = run.model.preprocessing
    assert preprocessing is not None
    size, method = list(preprocessing.size), InterpolationMode(preprocessing.interpolation)
    steps = [v2.Resize(preprocessing.resize or size, method)]
    if preprocessing.resize:
        steps.append(v2.CenterCrop(size))
    if preprocessing.channels == 1:
        steps.insert(0, v2.Grayscale())
    steps += [v2.PILToTensor(), *([RAND_AUGMENT] if case.augmentation else [])]
    # The loader keeps this list while its processes live.
    rows: list[list[int]] = []
    loader = data.DataLoader(
        Photos(files, v2.Compose(steps)),
        batch_sampler=rows,
        num_workers=case.workers,
        persistent_workers=case.workers > 0,
        multiprocessing_context="spawn" if case.workers else None,
    )

    def batches_of(batches: Batches) -> Iterator[Tensor]:
        rows[:] = [batch.tolist() for batch in batches]
        yield from loader

    return batches_of


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its child processes, ended ones too."""
    children = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    running = sum(times.user + times.system for times in children)
    return time.process_time() + running + ended.ru_utime + ended.ru_stime


def measure(repeats: int, only: list[str] | None) -> dict[str, Any]:
    """Return every epoch's seconds; the hand-written loop and the trainer take turns."""
    one_thread()
    torch.set_num_threads(1)
    raw = machine_of("torch", "torchvision", "pytorch-metric-learning")
    where = "on one core, or on all with `workers`, whose CPU time counts too"
    raw |= {"repeats": repeats, "where": where, "cases": {}}
    cores = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        for case in CASES:
            if only and not any(word in case.title for word in only):
                continue
            # On a core of two threads, work at the same time takes more CPU time.
            os.sched_setaffinity(0, cores if case.workers else {min(cores)})
            sides = {BARE: by_hand(case, folder), OURS: by_trainer(case, folder)}
            for title, train in case.variants.items():
                sides[f"{OURS}, {title}"] = by_trainer(case, folder, **train)
            rows = in_turns(sides, repeats, cpu_seconds)
            raw["cases"][case.title] = rows | {"images": case.images}
            # Worker processes end now, and not while the next case is measured.
            del sides
            gc.collect()
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
        for side in [side for side in rows if side.startswith(OURS)]:
            own = statistics.median(rows[side]["cpu"])
            name = title if side == OURS else f"{title}, {side.partition(', ')[2]}"
            cells = [f"{rows.get('images', IMAGES) / bare:,.0f}", f"{bare:.2f}", f"{own:.2f}"]
            ratios = [f"{ratio(rows, side, clock):.2f} ×" for clock in ("cpu", "wall")]
            lines.append([name, *cells, *ratios])
    head = ["", "by hand, items a CPU second", "by hand, CPU s", "trainer, CPU s"]
    head += ["CPU, against by hand (median of pairs)", "wall"]
    return page(f"""
        # One training epoch

        `python benchmarks/training.py`. {raw["machine"]}, one thread, {raw["versions"]}; load
        average {raw["load"]} at the start. Fashion-MNIST at {SIZE} px, {BATCHES} batches of
        {CLASSES} × {ITEMS}; photos are JPEGs of 640 × 480, which the loop by hand loads by torch's
        `DataLoader`. {raw["repeats"]} epochs of each side in turn after a warm-up,
        {raw.get("where", "on all cores")}. Rows without a net have a small one (`core.convnet` of
        width {SMALL["width"]}, one convolution a stage), which shows the trainer's own cost. Aim:
        {AIM} × the CPU seconds of the loop by hand.

        {markdown(head, lines)}

        The trainer does two things that the loop by hand does not: a named transform draws from its
        own generator, so a resumed run draws the same, and an image file's size is checked before
        it is decoded. Per image the first takes a tenth of a millisecond, which only images as
        small as these show.
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
