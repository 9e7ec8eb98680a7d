"""Sets of single things, animals and copies: GPR1200, Met, ILIAS, DISC21 and WildlifeReID-10k."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from retrieval.errors import DataError
from retrieval.helpers import Count, Counts, CsvTable, strict_loads
from retrieval.plugin import Dataset, find_images

from retrieval_sets.published import (
    Listing,
    Published,
    Row,
    annotation_bytes,
    documented,
    gallery_images,
    read_lines,
)

_MAX_JSON_BYTES = 512 << 20
GPR = Published(
    "GPR1200",
    "its makers (github.com/Visual-Computing/GPR1200)",
    "images/, with names such as 17_x.jpg that begin with the number of a category",
    {"test": [Count(12_000, 1_200)]},
)
_GPR_NAME = re.compile(r"(\d{1,6})_.*\.\w+")
_MET_QUERIES = {"test": Count(19_319), "validation": Count(2_165)}
DISC = Published(
    "DISC21",
    "Meta AI (ai.meta.com/datasets/disc21-dataset)",
    "queries/, references/ and the file of ground_truth",
    {"query": [Count(25_000), Count(50_000)], "gallery": [Count(1_000_000)]},
    unknown=True,
)
WILDLIFE = Published(
    "a data set in the layout of WildlifeReID-10k",
    "its makers (kaggle.com/datasets/wildlifedatasets/wildlifereid-10k)",
    "metadata.csv with the columns identity, path and split, and the images of its paths",
    unknown=True,
)
_WILDLIFE_ROLES = {"train": "gallery", "database": "gallery", "test": "query", "query": "query"}


@documented
def gpr1200(folder: Path, counts: Counts = "published", skip_bad: bool = False) -> Dataset:
    """Load GPR1200: 12,000 images of 1,200 categories, which are all queries and the gallery.

    Schall, Barthel, Hezel & Jung, "GPR1200: A Benchmark for General-Purpose Content-Based Image
    Retrieval", MMM 2022. Nothing is downloaded. An image's name begins with its category. The
    metric is `sets.gpr1200_ap`. All images are of the test side.

    Args:
        folder: the folder `GPR1200`, or its parent.
    """
    listing = GPR.listing(folder, "images", inside=["GPR1200"])
    for path in find_images(listing.root / "images").images:
        key = path.relative_to(listing.root).as_posix()
        if match := _GPR_NAME.fullmatch(path.name):
            listing.rows.append(Row(key, match[1], "test"))
        else:
            listing.problems.append(
                f"{key}: its name does not begin with the number of a category."
            )
    return listing.dataset(counts, skip_bad)


@documented
def met(
    folder: Path,
    queries: Literal["test", "validation"] = "test",
    counts: Counts = "published",
    skip_bad: bool = False,
) -> Dataset:
    """Load the Met dataset: photographs of exhibits by visitors, among 397,121 of the museum's.

    Ypsilantis, Garcia, Han, Ibrahimi, van Noord & Tolias, "The Met Dataset: Instance-level
    Recognition for Artworks", NeurIPS Datasets 2021. Nothing is downloaded. 1,003 of the 19,319
    test queries (129 of 2,165 for validation) show one of 224,408 exhibits; the others have no
    answer. The metrics are `sets.met_gap` (GAP, and GAP− with `distractors = false`) and
    `sets.met_accuracy`; the paper chooses their `k` and `temperature` on the validation queries.
    All images are of the test side.

    Args:
        folder: the folder that holds `ground_truth` and `images`.
        queries: which queries to load.
    """
    query_file = {"test": "testset.json", "validation": "valset.json"}[queries]
    lists = {"gallery": "MET_database.json", "query": query_file}
    published = Published(
        "the Met dataset",
        "its makers (cmp.felk.cvut.cz/met)",
        f"images/ and ground_truth/ with {' and '.join(lists.values())}",
        {"gallery": [Count(397_121, 224_408)], "query": [_MET_QUERIES[queries]]},
        unknown=True,
    )
    names = [f"ground_truth/{name}" for name in lists.values()]
    listing = published.listing(folder, "images", *names)
    for role, name in lists.items():
        label_key = "id" if role == "gallery" else "MET_id"
        for number, entry in enumerate(_entries(listing.root / "ground_truth" / name)):
            path = entry.get("path")
            # a query of no exhibit has no id
            label = entry.get(label_key, "no exhibit" if role == "query" else None)
            if isinstance(path, str) and isinstance(label, str | int):
                listing.rows.append(Row(f"images/{path}", str(label), "test", role))
            else:
                listing.problems.append(f"{name}: entry {number} lacks 'path' or {label_key!r}.")
    return listing.dataset(counts, skip_bad)


def _entries(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a JSON list."""
    try:
        content = strict_loads(annotation_bytes(path, _MAX_JSON_BYTES))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}.") from error
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise DataError(f"{path} must be a list of objects.")
    return content


@documented
def ilias(
    folder: Path, distractors: str = "", counts: Counts = "published", skip_bad: bool = False
) -> Dataset:
    """Load ILIAS: 1,232 images as queries for 1,000 objects, and 4,715 images that show them.

    Kordopatis-Zilos et al., "ILIAS: Instance-Level Image retrieval At Scale", CVPR 2025. Nothing is
    downloaded. Texts as queries are left out. The metric is `map_at_1000`, with 100 million
    distractors or a part of them. All images are of the test side.

    Args:
        folder: the folder `ilias_core`, or its parent.
        distractors: subfolder or link in the folder `ilias_core` with the images of YFCC100M; by
            default, none.
    """
    root = folder
    if (folder / "ilias_core").is_dir():
        root = folder / "ilias_core"
    unrelated = gallery_images(root, distractors, "distractor") if distractors else []
    unrelated_keys = {row.path for row in unrelated}
    published = Published(
        "ILIAS",
        "its makers (vrg.fel.cvut.cz/ilias)",
        "OBJECT/query/ and OBJECT/pos/ with images for each object",
        {"query": [Count(1_232, 1_000)], "gallery": [Count(4_715 + len(unrelated))]},
    )
    listing = Listing(published, folder, published.root(root))
    for role, name in (("query", "query"), ("gallery", "pos")):
        for path in sorted(root.glob(f"*/{name}/*.jpg")):
            key = path.relative_to(root).as_posix()
            if key not in unrelated_keys:
                listing.rows.append(Row(key, key.partition("/")[0], "test", role))
    if not listing.rows:
        raise DataError(f"{folder} is not ILIAS: OBJECT/query is missing. {published.advice}")
    listing.rows += unrelated
    return listing.dataset(counts, skip_bad)


@documented
def disc21(
    folder: Path,
    ground_truth: str = "public_ground_truth.csv",
    counts: Counts = "published",
    skip_bad: bool = False,
) -> Dataset:
    """Load DISC21: edited copies as queries, of which most have no source among 1,000,000 images.

    Douze et al., "The 2021 Image Similarity Dataset and Challenge", arXiv:2106.09672. Nothing is
    downloaded. The metadata of a query list its sources in `relevant`: set `[evaluate] relevant =
    ["relevant"]`. The metric is `sets.micro_ap`. All images are of the test side; a label is the
    image's own name, since only the list says what is relevant.

    Args:
        folder: the folder that holds `queries`, `references` and the file of the ground truth.
        ground_truth: the file whose queries are loaded, with lines "query_id,reference_id". The
            second value is empty for a query without a source.
    """
    listing = DISC.listing(folder, "queries", "references", ground_truth)
    root = listing.root
    sources: dict[str, list[str]] = {}
    for _, (query, reference) in read_lines(root / ground_truth, 2, listing.problems, comma=True):
        if query != "query_id":
            listed = sources.setdefault(query, [])
            if reference:
                listed.append(f"references/{reference}.jpg")
    for query, keys in sources.items():
        key = f"queries/{query}.jpg"
        metadata = {"relevant": ";".join(keys)}
        listing.rows.append(Row(key, key, "test", "query", metadata=metadata))
    listing.rows += gallery_images(root, "references")
    return listing.dataset(counts, skip_bad)


@documented
def wildlife_reid10k(folder: Path, skip_bad: bool = False) -> Dataset:
    """Load WildlifeReID-10k or data in its layout: known and new animals, as in AnimalCLEF 2025.

    Adam, Čermák, Papafitsoros & Picek, "WildlifeReID-10k: Wildlife re-identification dataset with
    10k individual animals", arXiv:2406.09211. Nothing is downloaded, and no counts are checked,
    since its releases differ. Images of the split "train" or "database" are the gallery, those of
    "test" or "query" the queries. A query whose individual the gallery lacks shows a new animal.
    The metrics are `sets.baks` and `sets.baus`. The metadata of an item have its `dataset` and
    `species`, where they are given. All images are of the test side.

    Args:
        folder: the folder that holds `metadata.csv` and its images.
    """
    listing = WILDLIFE.listing(folder, "metadata.csv")
    path = listing.root / "metadata.csv"
    table = CsvTable(str(path), ["identity", "path", "split"], lambda: path.open("rb"))
    listing.problems += [f"metadata.csv, line {line}: {text}" for line, text in table.problems]
    for line, row in table.rows:
        role = _WILDLIFE_ROLES.get(row["split"].lower())
        if role is None or not row["identity"]:
            listing.problems.append(
                f"metadata.csv, line {line}: the split must be train, database, test or query, and"
                " the identity must be given."
            )
            continue
        metadata = {name: row[name] for name in ("dataset", "species") if row.get(name)}
        listing.rows.append(Row(row["path"], row["identity"], "test", role, metadata=metadata))
    return listing.dataset("any", skip_bad)
