"""Check data before training, and preview the images that the model will see."""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from retrieval.data.augment import Changes, built_transforms
from retrieval.data.findings import Alike, By, Findings, lone_labels, spelt_alike
from retrieval.data.loading import BatchMaker, Job, RawInputs, TrainBatches
from retrieval.data.near import WIDTH, Fingerprint, Measure, Near, Rows, fingerprint, near_pairs
from retrieval.data.splits import make_splits
from retrieval.data.subjects import OfDataset, OfSources, Subjects
from retrieval.errors import DataError, RecipeError
from retrieval.host.cores import cores
from retrieval.recipe.read import Recipe, naming, read_recipe
from retrieval.run.build import build_backbone, build_dataset, build_sampler
from retrieval.serving.bundle import Bundle, Encoded
from retrieval.serving.files.places import StrPath
from retrieval.serving.images import decode, few_levels, to_mode
from retrieval.serving.index.embedded import in_memory
from retrieval.serving.index.locations import Sources, is_embedding, is_table
from retrieval.serving.index.parquet import holds_vectors
from retrieval.serving.index.sources import collect
from retrieval.serving.merging import measured
from retrieval.serving.progress import Meter, Progress, shown
from retrieval.serving.sessions import ahead

PICTURES = 0.08
"""Two images count as the same if the distance of their small pictures is at most this."""
_BATCH = 32
_COPIES = 256
"""Number of items that are compared with copies of themselves to choose `within`."""
_QUALITY = 70
"""JPEG quality of these copies."""


@shown
def check_data(
    data: StrPath | Sequence[StrPath] | Recipe,
    *,
    model: StrPath | Bundle | None = None,
    within: float | None = None,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
    progress: Progress = True,
) -> Findings:
    """Find what is wrong with data: broken files, duplicates, leaks, labels likely wrong.

    Each item is decoded once, by the decoder that training and serving share. Hashes find files
    with identical bytes and images with identical pixels. Small pictures of the images find those
    that look the same, for example because they were saved again or resized. If there is a model,
    its distance finds further pairs. Memory grows with the number of items, and the time of the
    comparison with its square.

    The sides of the data (train, test, …) are those of the split; an item on two sides is a leak.

    Args:
        data: a recipe or its `.toml` file, whose `[split]` defines the sides; or the sources of an
            index: folders, CSV files, Parquet tables, `.npz` features. Of several sources, each is
            a side. The subfolders `train`, `test`, … of a single folder are sides too, and so are
            the values of a table's `split` column.
        model: a bundle, or its folder.
        within: the largest model distance at which two items count as the same. By default, up to
            256 items are saved again as JPEG of quality 70, and 95 % of these copies are within the
            distance of their originals. Required for a bundle that takes vectors.
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
        raise DataError("within is a model's distance: pass a model, and a number of at least 0.")
    bundle = model if model is None or isinstance(model, Bundle) else Bundle.open(model)
    checked, subjects = _subjects(data, bundle, overrides, plugins)
    if bundle is not None and bundle.manifest.input.kind != subjects.kind:
        theirs = "images" if subjects.kind == "image" else "vectors"
        raise DataError(f"The items are {theirs}, but the bundle {bundle.path} does not take any.")
    if bundle is not None and within is None and subjects.kind == "features":
        raise DataError(
            "For vectors, pass within: the largest model distance at which two items are the same."
        )
    seen = _look(subjects, bundle)
    same, alone = _same(subjects, seen)
    limits: dict[str, float] = {}
    near: list[Alike] = []
    complete = True
    pictured = alone[seen.pictured[alone]]
    if len(pictured):
        limits["picture"] = PICTURES
        pairs = near_pairs(
            seen.pictures[pictured],
            PICTURES,
            same=seen.numbers[pictured],
            what="comparing pictures",
        )
        near += _pairs(pairs, pictured, "picture")
        complete = pairs.complete
    if bundle is not None:
        limits["model"] = _copied(subjects, seen, bundle, alone) if within is None else within
        pairs = _model_pairs(seen, bundle, alone, limits["model"])
        near += _pairs(pairs, alone, "model")
        complete = complete and pairs.complete
    return Findings(
        checked,
        subjects.items,
        sorted(seen.faults.items()),
        same,
        near,
        limits,
        lone_labels(subjects.items),
        spelt_alike(subjects.items),
        complete,
        subjects.notes,
        sorted(seen.flat.items()),
    )


def _subjects(
    data: StrPath | Sequence[StrPath] | Recipe,
    bundle: Bundle | None,
    overrides: Sequence[str],
    plugins: Sequence[str],
) -> tuple[str, Subjects]:
    """Return the data's name for messages, and their items."""
    if isinstance(data, Recipe):
        return f"the recipe '{data.name}'", _of_recipe(data)
    named = [str(source) for source in ([data] if isinstance(data, str | os.PathLike) else data)]
    recipes = [name for name in named if name.lower().endswith(".toml")]
    if recipes and len(named) > 1:
        raise DataError("A recipe is checked alone: pass one .toml file and nothing else.")
    if recipes:
        with naming(Path(recipes[0])):
            return recipes[0], _of_recipe(read_recipe(recipes[0], overrides, plugins))
    if overrides:
        raise DataError("Overrides change a recipe: pass its .toml file, or no overrides.")
    if not named:
        raise DataError(
            "There is nothing to check: pass a folder, a CSV file, a table or a recipe."
        )
    collected = [_collected(name, bundle) for name in named]
    if len({part.features is None for part in collected}) > 1:
        raise DataError("Images and vectors are checked separately: pass one kind at a time.")
    return ", ".join(named), OfSources(collected, named)


def _collected(name: str, bundle: Bundle | None) -> Sources:
    """Return a source's items: as vectors if it holds only vectors or the bundle takes vectors."""
    if is_embedding(name):
        items, vectors = in_memory(Path(name))
        return Sources([replace(item, row=row) for row, item in enumerate(items)], vectors)
    if name.lower().endswith(".npz"):
        return collect([name], "features")
    if bundle is not None:
        return collect([name], bundle.manifest.input.kind)
    if is_table(name) and Path(name).exists():
        return collect([name], "features" if holds_vectors(Path(name)) else "image")
    return collect([name], "image")


def _of_recipe(recipe: Recipe) -> OfDataset:
    # imports torch, which folders and tables do not need
    from retrieval.run.build import build_dataset

    dataset = build_dataset(recipe)
    return OfDataset(dataset, make_splits(dataset, recipe.split))


@dataclass(frozen=True)
class _Seen:
    """Hashes, small pictures and embeddings of all N items.

    Attributes:
        faults: why an item cannot be read, by the item's row (its index among the N items).
        flat: why a 16-bit image keeps only a few levels in 8 bits, by the image's row.
        contents: (N,) first row whose file has the same bytes; −1 if the item is not a file.
        numbers: (N,) first row with the same pixels or vector; −1 if the item cannot be read.
        pictures: (N, WIDTH) small pictures; no rows for vectors.
        pictured: (N,) true for the rows that have a small picture.
        encoded: the model's output for the N items; `None` without a model.
    """

    faults: dict[int, str]
    flat: dict[int, str]
    contents: Rows
    numbers: Rows
    pictures: NDArray[np.float32]
    pictured: NDArray[np.bool_]
    encoded: Encoded | None


def _look(subjects: Subjects, bundle: Bundle | None) -> _Seen:
    """Open each item once.

    Raises:
        DataError: no item can be read.
    """
    size, image = len(subjects.items), subjects.kind == "image"
    seen = _Seen(
        {},
        {},
        np.full(size, -1, np.int64),
        np.full(size, -1, np.int64),
        np.zeros((size if image else 0, WIDTH), np.float32),
        np.zeros(size, bool),
        None if bundle is None else _empty(bundle, size),
    )
    contents: dict[bytes, int] = {}
    numbers: dict[bytes, int] = {}
    waiting: list[tuple[int, NDArray[Any]]] = []
    work = partial(_opened, subjects, bundle)
    with Meter("checking", size, "items") as meter:
        items = subjects.read(range(size))
        for row, seen_item in ahead(work, items, workers=min(8, cores()), most=2 * _BATCH):
            meter.update()
            if isinstance(seen_item, DataError):
                seen.faults[row] = str(seen_item)
                continue
            own, content_hash, pixels, flat = seen_item
            if flat is not None:
                seen.flat[row] = flat
            if own is not None:
                seen.contents[row] = contents.setdefault(own, row)
            seen.numbers[row] = numbers.setdefault(content_hash.values, row)
            if content_hash.picture is not None:
                seen.pictures[row], seen.pictured[row] = content_hash.picture, True
            if pixels is not None:
                waiting.append((row, pixels))
            if bundle is not None and len(waiting) == _BATCH:
                _encode(bundle, seen.encoded, waiting)
        if bundle is not None:
            _encode(bundle, seen.encoded, waiting)
    if len(seen.faults) == size:
        raise DataError(f"None of the {size:,} items can be read. The first: {seen.faults[0]}")
    return seen


def _opened(
    subjects: Subjects, bundle: Bundle | None, numbered: tuple[int, bytes | DataError | None]
) -> tuple[int, tuple[bytes | None, Fingerprint, NDArray[Any] | None, str | None] | DataError]:
    """Open an item; return its row with its measurements or the error that prevented them.

    The measurements are the hash of the item's file, its fingerprint (hash of the pixels and small
    picture), its input to the model, and the sentence on a 16-bit image with few levels.
    """
    row, content = numbered
    name = subjects.items[row].name
    try:
        own, item = subjects.open(row, content)
        try:
            flat = few_levels(item) if isinstance(item, Image.Image) else None
            flat = flat and f"{name} {flat}."
            return row, (
                own,
                fingerprint(item),
                None if bundle is None else _input(bundle, item),
                flat,
            )
        except DataError as fault:
            raise DataError(f"{name}: {fault}") from fault
    except DataError as fault:
        return row, fault


def _input(bundle: Bundle, item: Image.Image | NDArray[Any]) -> NDArray[Any]:
    return (
        bundle.preprocess(item) if isinstance(item, Image.Image) else np.asarray(item, np.float32)
    )


def _empty(bundle: Bundle, size: int) -> Encoded:
    """Return zeros for the embeddings of `size` items."""
    manifest = bundle.manifest
    vector = np.zeros((size, manifest.vector), np.float32)
    query = np.zeros_like(vector) if manifest.query_vectors else vector
    return Encoded(
        vector, query, np.zeros((size, manifest.code or 0), np.float32) if bundle.has_code else None
    )


def _encode(bundle: Bundle, into: Encoded | None, waiting: list[tuple[int, NDArray[Any]]]) -> None:
    """Encode the waiting items into their rows of `into`, and clear the list."""
    if not waiting or into is None:
        return
    rows = [row for row, _ in waiting]
    encoded = bundle.encode(np.stack([pixels for _, pixels in waiting]), batch=_BATCH)
    into.vector[rows], into.query[rows] = encoded.vector, encoded.query
    if into.code is not None:
        into.code[rows] = encoded.code
    waiting.clear()


def _same(subjects: Subjects, seen: _Seen) -> tuple[list[Alike], Rows]:
    """Return groups of identical items, and the rows of the items to compare further.

    Of identical items, one per side and label is compared further.
    """
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for row, number in enumerate(seen.numbers.tolist()):
        if number >= 0:
            groups[number].append(row)
    pairs: list[Alike] = []
    alone: list[int] = []
    for rows in groups.values():
        alone += {
            (subjects.items[row].side, subjects.items[row].label): row for row in reversed(rows)
        }.values()
        if len(rows) > 1:
            files = set(seen.contents[rows].tolist())
            by: By = "numbers" if subjects.kind == "features" else "pixels"
            pairs.append(Alike(tuple(rows), "bytes" if len(files) == 1 and -1 not in files else by))
    return pairs, np.array(sorted(alone), np.int64)


def _pairs(near: Near, rows: Rows, by: By) -> list[Alike]:
    return [
        Alike((int(rows[row]), int(rows[other])), by, float(apart))
        for row, other, apart in zip(near.first, near.second, near.distance, strict=True)
    ]


def _model_pairs(seen: _Seen, bundle: Bundle, rows: Rows, within: float) -> Near:
    """Return the pairs of items whose model distance is at most `within`."""
    assert seen.encoded is not None
    vector, manifest = np.ascontiguousarray(seen.encoded.vector[rows]), bundle.manifest
    spans = [(space.start, space.stop) for space in manifest.subspaces if manifest.merge == "min"]
    measure = (
        _measure(bundle, seen.encoded, rows)
        if bundle.has_code or spans or manifest.distance.measure == "inner"
        else None
    )
    return near_pairs(
        vector,
        within,
        same=seen.numbers[rows],
        spans=spans or (None,),
        measure=measure,
        candidates=0 if manifest.rescorer is None else manifest.rescorer.candidates,
        what="comparing by the model",
    )


def _measure(bundle: Bundle, encoded: Encoded, rows: Rows) -> Measure:
    def measure(query: int, rows_of_items: Rows) -> NDArray[np.float64]:
        return _distances(bundle, encoded, int(rows[query]), encoded, rows[rows_of_items])

    return measure


def _distances(
    bundle: Bundle, queries: Encoded, number: int, encoded: Encoded, rows: Rows
) -> NDArray[np.float64]:
    """Return an item's distances to other items.

    They are the model's own distances. If the model gives scores instead and has no code to compare
    by, they are Euclidean.
    """
    query, vectors = queries.query[number], encoded.vector[rows]
    code, codes = (
        (None, None)
        if queries.code is None or encoded.code is None
        else (queries.code[number], encoded.code[rows])
    )
    if bundle.manifest.merge == "score" and code is None:
        return np.asarray(np.linalg.norm(vectors.astype(np.float64) - query, axis=1))
    return measured(bundle, query, code, vectors, codes, len(rows))


def _copied(subjects: Subjects, seen: _Seen, bundle: Bundle, rows: Rows) -> float:
    """Return the distance within which 95 % of the sampled items find their own copies."""
    assert seen.encoded is not None
    chosen = rows[
        np.unique(np.linspace(0, len(rows) - 1, min(_COPIES, len(rows))).round().astype(np.int64))
    ]
    work: Callable[[Any], Any] = partial(_copy, subjects, bundle)
    items = subjects.read(chosen.tolist())
    apart = []
    with Meter("measuring copies", len(chosen), "items") as meter:
        for row, pixels in ahead(work, items, workers=min(8, cores()), most=_BATCH):
            copy = bundle.encode(pixels[None])
            apart.append(float(_distances(bundle, copy, 0, seen.encoded, np.array([row]))[0]))
            meter.update()
    return float(np.quantile(apart, 0.95))


def _copy(
    subjects: Subjects, bundle: Bundle, numbered: tuple[int, bytes | DataError | None]
) -> tuple[int, NDArray[Any]]:
    _, item = subjects.open(*numbered)
    assert isinstance(item, Image.Image)
    out = io.BytesIO()
    to_mode(item, "L" if item.mode == "L" else "RGB").save(out, "JPEG", quality=_QUALITY)
    return numbered[0], bundle.preprocess(decode(out.getvalue()))


MOST = 64
"""Largest number of rows, and of columns, of a preview sheet."""
# pixels: least shorter side of an image, gap between images, height of the text above each row
_LEAST, _GAP, _TEXT = 64, 4, 14


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
    places = np.linspace(0, len(drawn) - 1, min(items, MOST, len(drawn))).astype(np.int64)
    chosen = splits.train[drawn[places]]
    make = BatchMaker(raw, Changes(recipe.augmentation, built_transforms(recipe)), recipe.seed)
    whole = slice(0, len(chosen))
    columns = [raw.batch(chosen)]
    if recipe.augmentation.active:
        columns += [make(Job(chosen, epoch, 0, whole)).numpy() for epoch in range(min(draws, MOST))]
    names = [f"{dataset.labels[item]}: {dataset.keys[item]}" for item in chosen.tolist()]
    return _sheet(
        [[_picture(column[row]) for column in columns] for row in range(len(chosen))], names
    )


def _picture(pixels: np.ndarray) -> Image.Image:
    """Return pixels (channels, H, W) as an image; small images are enlarged by a whole factor."""
    image = Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)).convert(
        "RGB"
    )
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
    file, lacking = str(font_manager.findfont("DejaVu Sans")), letters
    for candidate in [file, *(str(font.fname) for font in font_manager.fontManager.ttflist)]:
        with suppress(RuntimeError, OSError):  # a damaged font
            if len(rest := letters - FT2Font(candidate).get_charmap().keys()) < len(lacking):
                file, lacking = candidate, rest
        if not lacking:
            break
    escapes = {letter: chr(letter).encode("unicode_escape").decode() for letter in lacking}
    return ImageFont.truetype(file, 11), [name.translate(escapes) for name in names]


def _sheet(rows: list[list[Image.Image]], names: list[str]) -> Image.Image:
    width, height = rows[0][0].size
    across, down = width + _GAP, height + _GAP + _TEXT
    sheet = Image.new("RGB", (across * len(rows[0]) + 3 * _GAP, down * len(rows) + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    font, names = font_of(names)
    for number, (row, name) in enumerate(zip(rows, names, strict=True)):
        top = _GAP + number * down
        while font.getlength(name) > sheet.width - 2 * _GAP:
            name = f"{name[:-2]}…"
        draw.text((_GAP, top), name, fill="black", font=font)
        for column, image in enumerate(row):
            # a wider gap after the unchanged image
            left = _GAP + column * across + (2 * _GAP if column else 0)
            sheet.paste(image, (left, top + _TEXT))
    return sheet
