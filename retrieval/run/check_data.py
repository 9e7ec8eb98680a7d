"""Check data before training, and preview the images that the model will see."""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from retrieval.data.augment import Changes, built_transforms
from retrieval.data.findings import Alike, By, Findings, lone_labels, spelt_alike
from retrieval.data.loading import BatchMaker, Job, RawInputs, TrainBatches
from retrieval.data.near import WIDTH, Fingerprint, Near, Rows, fingerprint, near_pairs
from retrieval.data.splits import make_splits
from retrieval.data.subjects import Content, Subjects, of_dataset, of_sources
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
    seen = _Seen(subjects, bundle)
    same, alone = seen.same()
    limits: dict[str, float] = {}
    near: list[Alike] = []
    complete = True
    pictured = alone[seen.pictured[alone]]
    if len(pictured):
        limits["picture"] = PICTURES
        numbers, what = seen.numbers[pictured], "comparing pictures"
        pairs = near_pairs(seen.pictures[pictured], PICTURES, same=numbers, what=what)
        near += _pairs(pairs, pictured, "picture")
        complete = pairs.complete
    if bundle is not None:
        limits["model"] = seen.copied(bundle, alone) if within is None else within
        pairs = seen.near(bundle, alone, limits["model"])
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
    return ", ".join(named), of_sources(collected, named)


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


def _of_recipe(recipe: Recipe) -> Subjects:
    dataset = build_dataset(recipe)
    return of_dataset(dataset, make_splits(dataset, recipe.split))


class _Seen:
    """Hashes, small pictures and embeddings of all N items, each opened once.

    Attributes:
        faults: why an item cannot be read, by the item's row (its index among the N items).
        flat: why a 16-bit image keeps only a few levels in 8 bits, by the image's row.
        contents: (N,) first row whose file has the same bytes; −1 if the item is not a file.
        numbers: (N,) first row with the same pixels or vector; −1 if the item cannot be read.
        pictures: (N, WIDTH) small pictures; no rows for vectors.
        pictured: (N,) true for the rows that have a picture.
        encoded: the model's output for N items, if there is a model.

    Raises:
        DataError: no item can be read.
    """

    encoded: Encoded

    def __init__(self, subjects: Subjects, bundle: Bundle | None) -> None:
        size = len(subjects.items)
        self.subjects = subjects
        self.faults: dict[int, str] = {}
        self.flat: dict[int, str] = {}
        self.contents = np.full(size, -1, np.int64)
        self.numbers = np.full(size, -1, np.int64)
        self.pictures = np.zeros((size if subjects.kind == "image" else 0, WIDTH), np.float32)
        self.pictured = np.zeros(size, bool)
        if bundle is not None:
            self.encoded = _empty(bundle, size)
        contents: dict[bytes, int] = {}
        numbers: dict[bytes, int] = {}
        waiting: list[tuple[int, NDArray[Any]]] = []
        work = partial(_opened, subjects, bundle)
        with Meter("checking", size, "items") as meter:
            items = subjects.read(range(size))
            for row, opened in ahead(work, items, workers=min(8, cores()), most=2 * _BATCH):
                meter.update()
                if isinstance(opened, DataError):
                    self.faults[row] = str(opened)
                    continue
                if opened.flat is not None:
                    self.flat[row] = opened.flat
                if opened.file is not None:
                    self.contents[row] = contents.setdefault(opened.file, row)
                self.numbers[row] = numbers.setdefault(opened.hashes.values, row)
                if opened.hashes.picture is not None:
                    self.pictures[row], self.pictured[row] = opened.hashes.picture, True
                if bundle is not None and opened.pixels is not None:
                    waiting.append((row, opened.pixels))
                    if len(waiting) == _BATCH:
                        self._encode(bundle, waiting)
            if bundle is not None and waiting:
                self._encode(bundle, waiting)
        if len(self.faults) == size:
            raise DataError(f"None of the {size:,} items can be read. The first: {self.faults[0]}")

    def _encode(self, bundle: Bundle, waiting: list[tuple[int, NDArray[Any]]]) -> None:
        """Encode the waiting items, and clear the list."""
        rows = [row for row, _ in waiting]
        encoded = bundle.encode(np.stack([pixels for _, pixels in waiting]), batch=_BATCH)
        self.encoded.vector[rows], self.encoded.query[rows] = encoded.vector, encoded.query
        if self.encoded.code is not None:
            self.encoded.code[rows] = encoded.code
        waiting.clear()

    def same(self) -> tuple[list[Alike], Rows]:
        """Return groups of identical items, and the items to compare further.

        Each group keeps one item per side and label for further comparison.
        """
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for row, number in enumerate(self.numbers.tolist()):
            if number >= 0:
                groups[number].append(row)
        pairs: list[Alike] = []
        alone: list[int] = []
        for rows in groups.values():
            items = {row: self.subjects.items[row] for row in reversed(rows)}
            alone += {(item.side, item.label): row for row, item in items.items()}.values()
            if len(rows) > 1:
                files = set(self.contents[rows].tolist())
                by: By = "numbers" if self.subjects.kind == "features" else "pixels"
                by = "bytes" if len(files) == 1 and -1 not in files else by
                pairs.append(Alike(tuple(rows), by))
        return pairs, np.array(sorted(alone), np.int64)

    def near(self, bundle: Bundle, rows: Rows, within: float) -> Near:
        """Return the pairs of items whose model distance is at most `within`."""
        manifest = bundle.manifest
        spans = [(part.start, part.stop) for part in manifest.subspaces if manifest.merge == "min"]
        plain = not (bundle.has_code or spans or manifest.distance.measure == "inner")

        def measure(query: int, items: Rows) -> NDArray[np.float64]:
            return self._distances(bundle, self.encoded, int(rows[query]), rows[items])

        return near_pairs(
            np.ascontiguousarray(self.encoded.vector[rows]),
            within,
            same=self.numbers[rows],
            spans=spans or (None,),
            measure=None if plain else measure,
            candidates=0 if manifest.rescorer is None else manifest.rescorer.candidates,
            what="comparing by the model",
        )

    def copied(self, bundle: Bundle, rows: Rows) -> float:
        """Return the distance within which 95 % of the sampled items find their own copies."""
        places = np.linspace(0, len(rows) - 1, min(_COPIES, len(rows))).round().astype(np.int64)
        chosen = rows[np.unique(places)]
        work: Callable[[Any], Any] = partial(_copy, self.subjects, bundle)
        items = self.subjects.read(chosen.tolist())
        apart = []
        with Meter("measuring copies", len(chosen), "items") as meter:
            for row, pixels in ahead(work, items, workers=min(8, cores()), most=_BATCH):
                copy = bundle.encode(pixels[None])
                apart.append(float(self._distances(bundle, copy, 0, np.array([row]))[0]))
                meter.update()
        return float(np.quantile(apart, 0.95))

    def _distances(
        self, bundle: Bundle, queries: Encoded, number: int, rows: Rows
    ) -> NDArray[np.float64]:
        """Return a query's distances to items: the model's own, or Euclidean if it only scores."""
        query, vectors = queries.query[number], self.encoded.vector[rows]
        code = None if queries.code is None else queries.code[number]
        codes = None if self.encoded.code is None else self.encoded.code[rows]
        if bundle.manifest.merge == "score" and code is None:
            return np.asarray(np.linalg.norm(vectors.astype(np.float64) - query, axis=1))
        return measured(bundle, query, code, vectors, codes, len(rows))


class _Opened(NamedTuple):
    """An item's file's hash, fingerprint, input to the model, and why it has few levels."""

    file: bytes | None
    hashes: Fingerprint
    pixels: NDArray[Any] | None
    flat: str | None


def _opened(
    subjects: Subjects, bundle: Bundle | None, numbered: tuple[int, Content]
) -> tuple[int, _Opened | DataError]:
    """Return an item's row with its measurements, or with the reason why it cannot be read."""
    row, content = numbered
    name = subjects.items[row].name
    try:
        file, item = subjects.open(row, content)
    except DataError as fault:
        return row, fault
    try:
        image = item if isinstance(item, Image.Image) else None
        flat = None if image is None else few_levels(image)
        pixels = None
        if bundle is not None:
            pixels = np.asarray(item, np.float32) if image is None else bundle.preprocess(image)
        return row, _Opened(file, fingerprint(item), pixels, flat and f"{name} {flat}.")
    except DataError as fault:
        return row, DataError(f"{name}: {fault}")


def _empty(bundle: Bundle, size: int) -> Encoded:
    """Return zeros for the embeddings of `size` items."""
    manifest = bundle.manifest
    vector = np.zeros((size, manifest.vector), np.float32)
    query = np.zeros_like(vector) if manifest.query_vectors else vector
    code = np.zeros((size, manifest.code or 0), np.float32) if bundle.has_code else None
    return Encoded(vector, query, code)


def _pairs(near: Near, rows: Rows, by: By) -> list[Alike]:
    return [
        Alike((int(rows[row]), int(rows[other])), by, float(apart))
        for row, other, apart in zip(near.first, near.second, near.distance, strict=True)
    ]


def _copy(
    subjects: Subjects, bundle: Bundle, numbered: tuple[int, Content]
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
    return _sheet([[*map(_picture, row)] for row in zip(*columns, strict=True)], names)


def _picture(pixels: np.ndarray) -> Image.Image:
    """Return pixels (channels, H, W) as an image; small ones are enlarged by a whole number."""
    array = pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)
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
