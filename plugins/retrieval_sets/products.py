"""Stanford Online Products, and In-Shop Clothes Retrieval."""

from __future__ import annotations

from pathlib import Path

from retrieval.data.counts import Count, Counts
from retrieval.data.datasets import Box
from retrieval.errors import DataError
from retrieval.plugin import Dataset

from retrieval_sets.lists import Lines, numbers
from retrieval_sets.published import Published, Row, assemble

SOP = Published(
    "Stanford Online Products",
    "Stanford (cvgl.stanford.edu/projects/lifted_struct)",
    "Ebay_train.txt, Ebay_test.txt and the folders of images that they name (bicycle_final/ and"
    " so on)",
    {"train": [Count(59_551, 11_318)], "test": [Count(60_502, 11_316)]},
)
IN_SHOP = Published(
    "In-Shop Clothes Retrieval",
    "the Chinese University of Hong Kong"
    " (mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html)",
    "img/ and list_eval_partition.txt (also as Img/img/ and Eval/list_eval_partition.txt), for crop"
    " = true also list_bbox_inshop.txt",
    {
        "train": [Count(25_882, 3_997)],
        "query": [Count(14_218, 3_985)],
        "gallery": [Count(12_612, 3_985)],
    },
)
_ROLES = {"train": ("train", ""), "query": ("test", "query"), "gallery": ("test", "gallery")}
_MOST = 10**9


def stanford_online_products(
    folder: Path, counts: Counts = "published", skip_bad: bool = False
) -> Dataset:
    """Load Stanford Online Products: 120,053 photographs of 22,634 products from eBay, in twelve
    categories.

    Oh Song, Xiang, Jegelka & Savarese, "Deep Metric Learning via Lifted Structured Feature
    Embedding", CVPR 2016. Nothing is downloaded. 11,318 products train (59,551 images), 11,316
    others test (60,502). Each item's metadata names its category ("bicycle").

    Args:
        folder: the folder `Stanford_Online_Products`, or the one that holds it.
        counts: "published" refuses a folder with other numbers than the published ones; "any" takes
            what is there.
        skip_bad: whether images that cannot be read are named and left out; otherwise the first one
            ends the run.

    Raises:
        DataError: with every problem: missing files, wrong lines, other numbers than the published
            ones.
    """
    lists = ("Ebay_train.txt", "Ebay_test.txt")
    root = SOP.root(folder, *lists, inside=["Stanford_Online_Products"])
    problems: list[str] = []
    rows = []
    for name, side in zip(lists, ("train", "test"), strict=True):
        lines = Lines(root / name, 4, skip=1)
        for line, (*ids, path) in lines:
            if (found := numbers(root / name, line, ids, problems, 1, _MOST)) is not None:
                category = path.split("/")[0].removesuffix("_final")
                rows.append(Row(path, str(found[1]), side, metadata={"category": category}))
        problems += lines.problems
    both = {row.label for row in rows if row.split == "train"} & {
        row.label for row in rows if row.split == "test"
    }
    if both:
        problems.append(f"{len(both):,} products are on both sides, to train and to test.")
    return assemble(SOP, root, rows, problems, counts, where=folder, skip_bad=skip_bad)


def in_shop(
    folder: Path, crop: bool = False, counts: Counts = "published", skip_bad: bool = False
) -> Dataset:
    """Load In-Shop Clothes Retrieval (DeepFashion): 52,712 photographs of 7,982 clothing items.

    Liu, Luo, Qiu, Wang & Tang, "DeepFashion: Powering Robust Clothes Recognition and Retrieval with
    Rich Annotations", CVPR 2016. Nothing is downloaded. 3,997 items train (25,882 images); of 3,985
    others 14,218 images are queries and 12,612 the gallery. The images of `img.zip` are cut out and
    centred already.

    Args:
        folder: the folder that holds them.
        crop: whether images are cut to the boxes of `list_bbox_inshop.txt`.
        counts: "published" refuses a folder with other numbers than the published ones; "any" takes
            what is there.
        skip_bad: whether images that cannot be read are named and left out; otherwise the first one
            ends the run.

    Raises:
        DataError: with every problem: missing files, wrong lines, other numbers than the published
            ones, queries that nothing in the gallery answers.
    """
    images = next(
        (folder / place for place in ("", "Img") if (folder / place / "img").is_dir()), folder
    )
    if images == folder:
        IN_SHOP.root(folder, "img")
    listed = _beside(folder, "Eval", "list_eval_partition.txt")
    problems: list[str] = []
    boxes = _boxes(_beside(folder, "Anno", "list_bbox_inshop.txt"), problems) if crop else {}
    lines = Lines(listed, 3, skip=2)
    rows = []
    for line, (path, item, status) in lines:
        if status not in _ROLES:
            problems.append(
                f"{listed.name}, line {line}: {status!r} is not train, query or gallery."
            )
            continue
        if crop and path not in boxes:
            problems.append(f"{path} has no box in list_bbox_inshop.txt.")
        split, role = _ROLES[status]
        rows.append(Row(path, item, split, role, boxes.get(path)))
    return assemble(
        IN_SHOP,
        images,
        rows,
        problems + lines.problems,
        counts,
        where=folder,
        crop=crop,
        skip_bad=skip_bad,
    )


def _beside(folder: Path, inner: str, name: str) -> Path:
    """Return a list that lies in the folder, or where its archive has it."""
    for place in (folder / inner / name, folder / name):
        if place.is_file():
            return place
    raise DataError(f"{folder} is not {IN_SHOP.title}: {name} is not there. {IN_SHOP.advice}")


def _boxes(path: Path, problems: list[str]) -> dict[str, Box]:
    """Return the boxes by image: left, top, right, bottom, after the kinds of clothes and pose."""
    lines = Lines(path, 7, skip=2)
    found: dict[str, Box] = {}
    for line, (name, _, _, *words) in lines:
        if (edges := numbers(path, line, words, problems, 0, 1 << 20)) is not None:
            left, top, right, bottom = edges
            found[name] = (left, top, right, bottom)
    problems += lines.problems
    return found
