"""A sheet of what the net sees in training: each item as it is, and after its random changes."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw

from retrieval.data.augment import Changes, built_transforms
from retrieval.data.loading import BatchMaker, Job, RawInputs, check_sampler, draw_epoch
from retrieval.data.splits import make_splits
from retrieval.errors import RecipeError
from retrieval.recipe.read import Recipe
from retrieval.run.build import build_backbone, build_dataset

MOST = 64
"""Rows and columns of a sheet."""
_LEAST, _GAP, _TEXT = (
    64,
    4,
    14,
)  # pixels: of a picture's shorter side, between pictures, of the line above each row


def preview(recipe: Recipe, items: int = 8, draws: int = 8) -> Image.Image:
    """Return a picture of items of the run's first batch: a row for each, first without changes,
    then as they are changed in further epochs.

    Args:
        recipe: a checked recipe.
        items: rows, up to 64.
        draws: changed pictures in a row, up to 64.

    Raises:
        RecipeError: its items are no images.
        DataError: they cannot be read or changed.
    """
    dataset = build_dataset(recipe)
    preprocessing = build_backbone(recipe, dataset).preprocessing
    if preprocessing is None:
        raise RecipeError(["[data]: its items are vectors, of which there is nothing to show."])
    splits = make_splits(dataset, recipe.split)
    check_sampler(splits.train_labels, recipe.sampler)
    drawn = draw_epoch(splits.train_labels, recipe.sampler, recipe.seed, 0)[0]
    places = np.linspace(0, len(drawn) - 1, min(items, MOST, len(drawn))).astype(np.int64)
    chosen = splits.train[drawn[places]]
    raw = RawInputs(dataset, preprocessing, budget=0)
    make = BatchMaker(
        raw, Changes(recipe.augmentation, built_transforms(recipe)), recipe.seed, len(chosen)
    )
    whole = slice(0, len(chosen))
    columns = [raw.batch(chosen)]
    if recipe.augmentation.active:
        columns += [make(Job(chosen, epoch, 0, whole)).numpy() for epoch in range(min(draws, MOST))]
    names = [f"{dataset.labels[item]}: {dataset.keys[item]}" for item in chosen.tolist()]
    return _sheet(
        [[_picture(column[row]) for column in columns] for row in range(len(chosen))], names
    )


def _picture(pixels: np.ndarray) -> Image.Image:
    """Return pixels (channels, H, W) as an image, enlarged by a whole number where it is small."""
    image = Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)).convert(
        "RGB"
    )
    factor = max(1, -(-_LEAST // min(image.size)))
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def _sheet(rows: list[list[Image.Image]], names: list[str]) -> Image.Image:
    width, height = rows[0][0].size
    across, down = width + _GAP, height + _GAP + _TEXT
    sheet = Image.new("RGB", (across * len(rows[0]) + 3 * _GAP, down * len(rows) + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (row, name) in enumerate(zip(rows, names, strict=True)):
        top = _GAP + number * down
        fits = sheet.width // 6  # of Pillow's own font, some six pixels a letter
        draw.text((_GAP, top), name if len(name) <= fits else f"{name[: fits - 1]}…", fill="black")
        for column, image in enumerate(row):
            left = (
                _GAP + column * across + (2 * _GAP if column else 0)
            )  # what is unchanged stands apart
            sheet.paste(image, (left, top + _TEXT))
    return sheet
