"""Check data before training, and preview the images that the model will see."""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from retrieval.base.arrays import Array, Floats32, Ints
from retrieval.base.folder_kinds import StrPath
from retrieval.base.machine import ahead, cores
from retrieval.base.progress import Meter, Progress, shows_progress
from retrieval.bundle.bundle import Bundle
from retrieval.data.augment import Changes, built_transforms
from retrieval.data.loading import BatchMaker, LoadingJob, RawInputs, TrainBatches
from retrieval.data.splits import make_splits
from retrieval.errors import DataError, RecipeError
from retrieval.images.decoding import decode
from retrieval.images.preprocessing import few_levels, to_mode
from retrieval.index.near_pairs import near_pairs
from retrieval.index.parquet import holds_vectors
from retrieval.index.read_embeddings import in_memory
from retrieval.index.sources import Sources, collect, is_embedding, is_table
from retrieval.recipe.read import Recipe, naming, read_recipe
from retrieval.run.build import build_backbone, build_dataset, build_sampler

from retrieval_lab.checked_items import Subjects, of_dataset, of_sources
from retrieval_lab.findings import Alike, By, Findings, lone_labels, spelt_alike
from retrieval_lab.fingerprints import WIDTH, Fingerprint, fingerprint

PICTURES = 0.08
"""Largest distance between the small pictures of two images that count as the same."""
_AHEAD = 64
"""Number of items that are measured before they are needed."""
_COPIES = 256
"""Largest number of items that are compared with their JPEG copies to choose `within`."""
_QUALITY = 70
"""JPEG quality of the copies."""


@shows_progress
def check_data(
    data: StrPath | Sequence[StrPath] | Recipe,
    *,
    model: StrPath | Bundle | None = None,
    within: float | None = None,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
    progress: Progress = True,
) -> Findings:
    """Find faults in data: broken files, duplicates, leaks, and labels that are probably wrong.

    Each item is decoded once, as for training and serving. Hashes find files with identical bytes
    and images with identical pixels. Small pictures find images that look the same, for example
    because they were saved again or resized. With a model, the Euclidean distance of its index
    vectors finds further pairs. Memory grows with the number of items. Items that clearly differ
    are not compared one by one, so comparing a million pictures takes minutes.

    The sides of the data are the parts of its split (train, test, …); an item on two sides leaks.

    Args:
        data: a recipe or its `.toml` file, whose `[split]` defines the sides; or the sources of an
            index: folders, CSV files, Parquet tables, `.npz` features. Each of several sources is a
            side. In a single source, the subfolders `train`, `test`, … of a folder are sides, and
            so are the values of a table's `split` column.
        model: a bundle, or its folder.
        within: the largest distance of vectors at which two items count as the same. The default is
            the 95th percentile of the distances between up to 256 items and their copies, saved
            again as JPEG of quality 70. Required for a bundle that takes vectors.
        overrides: changes to the recipe, such as `"data.folder=photos"`.
        plugins: further plugin files or modules of the recipe.
        progress: True shows a bar, False nothing; a function is called with (what, done, total).

    Raises:
        DataError: the data do not exist, the model takes another kind of item, or no item can be
            read.
        RecipeError: the recipe is wrong.
        BundleError: the bundle cannot be used.
    """
    if within is not None and (model is None or not 0 <= within < float("inf")):
        raise DataError("within is a distance by a model: pass a model and a number of at least 0.")
    if model is None or isinstance(model, Bundle):
        bundle = model
    else:
        bundle = Bundle.open(model)
    name, subjects = _subjects(data, bundle, overrides, plugins)
    if bundle is not None and bundle.manifest.input.kind != subjects.kind:
        if subjects.kind == "image":
            kind = "images"
        else:
            kind = "vectors"
        raise DataError(f"The items are {kind}, but the bundle {bundle.path} takes no {kind}.")
    if bundle is not None and within is None and subjects.kind == "features":
        raise DataError(
            "For vectors, pass within: the largest distance at which two items are the same."
        )
    scan = _Scan(subjects, bundle)
    same, rows = scan.same()
    compared: dict[By, tuple[Ints, Floats32, float]] = {}
    pictured = rows[scan.has_picture[rows]]
    if len(pictured):
        compared["picture"] = pictured, scan.pictures, PICTURES
    if bundle is not None:
        if within is None:
            limit = scan.copy_distance(bundle, rows)
        else:
            limit = within
        compared["model"] = rows, scan.vectors, limit
    near: list[Alike] = []
    complete = True
    for by, (chosen, vectors, limit) in compared.items():
        values = scan.same_values[chosen]
        pairs = near_pairs(vectors[chosen], limit, same=values, what=f"comparing by {by}")
        ends = zip(chosen[pairs.first].tolist(), chosen[pairs.second].tolist(), strict=True)
        near += map(Alike, ends, repeat(by), pairs.distance.tolist())
        complete = complete and pairs.complete
    return Findings(
        checked=name,
        subjects=subjects.items,
        broken=sorted(scan.faults.items()),
        same=same,
        near=near,
        within={by: limit for by, (_, _, limit) in compared.items()},
        lone=lone_labels(subjects.items),
        spelt=spelt_alike(subjects.items),
        complete=complete,
        notes=subjects.notes,
        few_levels=sorted(scan.flat.items()),
    )


def _subjects(
    data: StrPath | Sequence[StrPath] | Recipe,
    bundle: Bundle | None,
    overrides: Sequence[str],
    plugins: Sequence[str],
) -> tuple[str, Subjects]:
    """Return the name of the data for messages, and their items."""
    if isinstance(data, Recipe):
        return f"the recipe '{data.name}'", _of_recipe(data)
    sources: Sequence[StrPath] = [data] if isinstance(data, str | os.PathLike) else data
    named = [str(source) for source in sources]
    recipes = [name for name in named if name.lower().endswith(".toml")]
    if recipes and len(named) > 1:
        raise DataError("A recipe is checked alone: pass one .toml file and nothing else.")
    if recipes:
        with naming(Path(recipes[0])):
            return recipes[0], _of_recipe(read_recipe(recipes[0], overrides, plugins))
    if overrides:
        raise DataError("Overrides change a recipe: pass its .toml file, or no overrides.")
    if not named:
        raise DataError("No data are named: pass a folder, a CSV file, a table or a recipe.")
    collected = [_collected(name, bundle) for name in named]
    if len({part.features is None for part in collected}) > 1:
        raise DataError("Images and vectors are checked separately: pass one kind at a time.")
    return ", ".join(named), of_sources(collected, named)


def _collected(name: str, bundle: Bundle | None) -> Sources:
    """Return a source's items, as vectors if it holds only vectors or the bundle takes vectors."""
    if is_embedding(name):
        items, vectors = in_memory(Path(name))
        return Sources(replace(items, rows=range(len(items))), vectors)
    if name.lower().endswith(".npz"):
        return collect([name], "features")
    if bundle is not None:
        return collect([name], bundle.manifest.input.kind)
    if is_table(name) and Path(name).exists():
        return collect([name], "features" if holds_vectors(Path(name)) else "image")
    return collect([name], "image")


def _of_recipe(recipe: Recipe) -> Subjects:
    dataset = build_dataset(recipe)
    return of_dataset(dataset, make_splits(dataset, recipe.split))


class _Scan:
    """Hashes, small pictures and embeddings of all N items, from one pass over them.

    Attributes:
        faults: why an item cannot be read, by the item's row (its index among the N items).
        flat: a sentence on each 16-bit image that has few levels left in 8 bits, by row.
        same_bytes: (N,) first row whose file has the same bytes; −1 if the item has no file of its
            own or cannot be read.
        same_values: (N,) first row with the same pixels or vector; −1 if the item cannot be read.
        pictures: (N, WIDTH) small pictures; no rows for vectors.
        has_picture: (N,) true for the rows that have a picture.
        vectors: (N, D) the model's index vectors; no columns without a model.

    Raises:
        DataError: no item can be read.
    """

    def __init__(self, subjects: Subjects, bundle: Bundle | None) -> None:
        size = len(subjects.items)
        self.subjects = subjects
        self.faults: dict[int, str] = {}
        self.flat: dict[int, str] = {}
        self.same_bytes = np.full(size, -1, np.int64)
        self.same_values = np.full(size, -1, np.int64)
        self.pictures = np.zeros((size if subjects.kind == "image" else 0, WIDTH), np.float32)
        self.has_picture = np.zeros(size, bool)
        if bundle is None:
            width = 0
        else:
            width = bundle.manifest.vector
        self.vectors = np.zeros((size, width), np.float32)
        first_with_bytes: dict[bytes, int] = {}
        first_with_values: dict[bytes, int] = {}
        work = partial(_measure, subjects, bundle)
        results = ahead(work, range(size), workers=min(8, cores()), most=_AHEAD)
        with Meter("checking", size, "items") as meter:
            for row, result in enumerate(results):
                meter.update()
                if isinstance(result, DataError):
                    self.faults[row] = str(result)
                    continue
                if result.flat is not None:
                    self.flat[row] = result.flat
                if result.file is not None:
                    self.same_bytes[row] = first_with_bytes.setdefault(result.file, row)
                self.same_values[row] = first_with_values.setdefault(result.hashes.values, row)
                if result.hashes.picture is not None:
                    self.pictures[row] = result.hashes.picture
                    self.has_picture[row] = True
                if result.vector is not None:
                    self.vectors[row] = result.vector
        if len(self.faults) == size:
            raise DataError(f"None of the {size:,} items can be read. The first: {self.faults[0]}")

    def same(self) -> tuple[list[Alike], Ints]:
        """Return the groups of identical items, and the rows to compare further.

        Of identical items with the same side and label, only the first is compared further.
        """
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for row, first in enumerate(self.same_values.tolist()):
            if first >= 0:
                groups[first].append(row)
        pairs: list[Alike] = []
        compared: list[int] = []
        for rows in groups.values():
            firsts: dict[tuple[str, str | None], int] = {}
            for row in rows:
                item = self.subjects.items[row]
                firsts.setdefault((item.side, item.label), row)
            compared += firsts.values()
            if len(rows) > 1:
                files = set(self.same_bytes[rows].tolist())
                by: By = "numbers" if self.subjects.kind == "features" else "pixels"
                if len(files) == 1 and -1 not in files:
                    by = "bytes"
                pairs.append(Alike(tuple(rows), by))
        return pairs, np.array(sorted(compared), np.int64)

    def copy_distance(self, bundle: Bundle, rows: Ints) -> float:
        """Return the 95th percentile of the distances of sampled items to their JPEG copies."""
        spaced = np.linspace(0, len(rows) - 1, min(_COPIES, len(rows)))
        chosen = rows[np.unique(spaced.round().astype(np.int64))]
        vectors = self.vectors[chosen].astype(np.float64)
        work = partial(_copy, self.subjects, bundle)
        copies = ahead(work, chosen.tolist(), workers=min(8, cores()), most=_AHEAD)
        distances = []
        with Meter("measuring copies", len(chosen), "items") as meter:
            for vector, copy in zip(vectors, copies, strict=True):
                distances.append(float(np.linalg.norm(copy - vector)))
                meter.update()
        return float(np.quantile(distances, 0.95))


class _Measured(NamedTuple):
    """Measurements of an item: its file's hash, fingerprint, vector, and sentence for `flat`."""

    file: bytes | None
    hashes: Fingerprint
    vector: Floats32 | None
    flat: str | None


def _measure(subjects: Subjects, bundle: Bundle | None, row: int) -> _Measured | DataError:
    """Return an item's measurements, or the error if it cannot be read."""
    name = subjects.items[row].name
    try:
        file, item = subjects.open(row)
    except DataError as fault:
        return fault
    try:
        flat = None
        vector = None
        if isinstance(item, Image.Image) and (lost := few_levels(item)):
            flat = f"{name} {lost}."
        if bundle is not None:
            inputs: Array
            if isinstance(item, Image.Image):
                inputs = bundle.preprocess(item)
            else:
                inputs = np.asarray(item, np.float32)
            vector = bundle.encode(inputs[None]).vector[0]
        return _Measured(file, fingerprint(item), vector, flat)
    except DataError as fault:
        return DataError(f"{name}: {fault}")


def _copy(subjects: Subjects, bundle: Bundle, row: int) -> Floats32:
    """Return the vector of an item's JPEG copy."""
    _, item = subjects.open(row)
    assert isinstance(item, Image.Image)
    out = io.BytesIO()
    to_mode(item, "L" if item.mode == "L" else "RGB").save(out, "JPEG", quality=_QUALITY)
    pixels = bundle.preprocess(decode(out.getvalue()))
    vector: Floats32 = bundle.encode(pixels[None]).vector[0]
    return vector


MOST = 64
"""Largest number of rows, and of columns, of a preview sheet."""
# in pixels: shortest side of an image, gap between images, height of the text above each row
_LEAST = 64
_GAP = 4
_TEXT = 14


def preview(recipe: Recipe, items: int = 8, draws: int = 8) -> Image.Image:
    """Return a sheet of training items, one per row: unchanged, then with random augmentations.

    Raises:
        RecipeError: the items are not images.
        DataError: an item cannot be read or augmented.
    """
    dataset = build_dataset(recipe)
    preprocessing = build_backbone(recipe, dataset).preprocessing
    if preprocessing is None:
        raise RecipeError("[data]: the items are vectors; only images can be previewed.")
    splits = make_splits(dataset, recipe.split)
    raw = RawInputs(dataset, preprocessing, budget=0)
    drawn = TrainBatches(
        dataset,
        splits.train,
        splits.train_labels,
        preprocessing,
        sampler=recipe.sampler,
        batch_sampler=build_sampler(recipe),
        augmentation=recipe.augmentation,
        seed=recipe.seed,
        raw=raw,
    ).draw(0)[0]
    spaced = np.linspace(0, len(drawn) - 1, min(items, MOST, len(drawn))).astype(np.int64)
    chosen = splits.train[drawn[spaced]]
    make = BatchMaker(raw, Changes(recipe.augmentation, built_transforms(recipe)), recipe.seed)
    whole = slice(0, len(chosen))
    columns = [raw.batch(chosen)]
    if recipe.augmentation.active:
        # each epoch draws other changes
        for epoch in range(min(draws, MOST)):
            columns.append(make(LoadingJob(chosen, epoch, 0, whole)).numpy())
    names = [f"{dataset.labels[item]}: {dataset.keys[item]}" for item in chosen.tolist()]
    return _sheet([[*map(_picture, row)] for row in zip(*columns, strict=True)], names)


def _picture(pixels: np.ndarray) -> Image.Image:
    """Return pixels (channels, H, W) as an image, enlarged by a whole factor if it is small."""
    if len(pixels) == 1:
        array = pixels[0]
    else:
        array = pixels.transpose(1, 2, 0)
    image = Image.fromarray(array).convert("RGB")
    factor = max(1, -(-_LEAST // min(image.size)))
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def font_of(names: list[str]) -> tuple[ImageFont.FreeTypeFont, list[str]]:
    """Return a font that has the names' letters, and the names as they can be drawn with it.

    The font is DejaVu Sans or, if that lacks letters, the system's font that lacks the fewest. A
    letter that the font lacks is replaced with its escape sequence in Python.
    """
    from matplotlib import font_manager
    from matplotlib.ft2font import FT2Font

    letters = set(map(ord, "".join(names)))
    file = str(font_manager.findfont("DejaVu Sans"))
    lacking = letters
    for candidate in [file, *(str(font.fname) for font in font_manager.fontManager.ttflist)]:
        with suppress(RuntimeError, OSError):  # a damaged font
            if len(rest := letters - FT2Font(candidate).get_charmap().keys()) < len(lacking):
                file = candidate
                lacking = rest
        if not lacking:
            break
    escapes = {letter: chr(letter).encode("unicode_escape").decode() for letter in lacking}
    return ImageFont.truetype(file, 11), [name.translate(escapes) for name in names]


def _sheet(rows: list[list[Image.Image]], names: list[str]) -> Image.Image:
    width, height = rows[0][0].size
    across = width + _GAP
    down = height + _GAP + _TEXT
    sheet = Image.new("RGB", (across * len(rows[0]) + 3 * _GAP, down * len(rows) + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    font, names = font_of(names)
    for number, (row, name) in enumerate(zip(rows, names, strict=True)):
        top = _GAP + number * down
        while font.getlength(name) > sheet.width - 2 * _GAP:
            name = f"{name[:-2]}…"
        draw.text((_GAP, top), name, fill="black", font=font)
        for column, image in enumerate(row):
            # The gap after the unchanged image is wider.
            left = _GAP + column * across + (2 * _GAP if column else 0)
            sheet.paste(image, (left, top + _TEXT))
    return sheet
