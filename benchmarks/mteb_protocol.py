"""MTEB's number for image retrieval beside that of the papers' protocol, for the same encoders.

    pip install 'embedding-retrieval[mteb]'
    OMP_NUM_THREADS=1 python benchmarks/mteb_protocol.py

The pictures are scikit-learn's 1,797 digits and 12,000 of Fashion-MNIST, 1,200 of each class. A net
trains on all pictures of the classes 0 to 4. MTEB runs on tasks that are built in memory from the
pictures, with the flags of its CUB200I2IRetrieval (the gallery holds the query's own picture, which
is not relevant, and the first hit is dropped), and again with the own picture dropped by its id.
`retrieval.evaluate` measures the embeddings that the same encoder returns.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import bench
from bench import decimals, markdown, page

if TYPE_CHECKING:
    from mteb.abstasks.retrieval import AbsTaskRetrieval

PER_CLASS = 1200
METRICS = ["recall_at_1", "map_at_r"]
SETS = {"digits": "core.digits", "fashion": "core.fashion_mnist"}
KEPT = ["hit_rate_at_1", "recall_at_1", "map_at_1000"]
TITLES = {"digits": "digits", "fashion": "Fashion-MNIST"}


def recipe(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "split": {"by": "class", "test": ["5", "6", "7", "8", "9"], "validation": 0.0},
        "sampler": {"classes": 5, "items": 24, "batches": 50},
        "backbone": {"name": "core.convnet", "size": 28, "width": 16},
        "head": {"embedding_size": 64},
        "loss": {"name": "pml.multi_similarity"},
        "miner": {"name": "pml.multi_similarity"},
        "optimizer": {"lr": 1e-3},
        "train": {"epochs": 2},
    }


def pictures_of(name: str) -> tuple[NDArray[np.uint8], NDArray[np.str_]]:
    """Return the images (N, side, side) of a set, and their labels (N,)."""
    from retrieval.host.plugins import create

    data: Any = create("dataset", SETS[name])
    labels = np.array(data.labels)
    drawn = [np.flatnonzero(labels == c)[:PER_CLASS] for c in np.unique(labels)]
    rows = np.sort(np.concatenate(drawn))
    return np.asarray(data.arrays)[rows], labels[rows]


def image_task(
    images: NDArray[np.uint8], labels: NDArray[Any], by_id: bool = False
) -> AbsTaskRetrieval:
    """Return a task that searches for each image among all; others of its label are relevant.

    Args:
        images: (N, H, W), the queries and the gallery.
        labels: (N,).
        by_id: drop the query's own picture by its id instead of dropping the first hit.
    """
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from PIL import Image

    from mteb import TaskMetadata

    class Task(AbsTaskRetrieval):
        skip_first_result = not by_id
        ignore_identical_ids = by_id
        metadata = TaskMetadata(
            name="InMemoryI2IRetrieval",
            description="Each image searches for the others of its class.",
            dataset={"path": "none", "revision": "none"},
            type="Any2AnyRetrieval",
            category="i2i",
            modalities=["image"],
            eval_langs=["eng-Latn"],
            main_score="hit_rate_at_1",
        )

    ids = [f"{number:05}" for number in range(len(labels))]
    data = Dataset.from_dict({"id": ids, "image": [Image.fromarray(image) for image in images]})
    relevant = {}
    for row, key in enumerate(ids):
        same = np.flatnonzero(labels == labels[row])
        relevant[key] = {ids[other]: 1 for other in same if other != row}
    task = Task()
    split: Any = {"queries": data, "corpus": data, "relevant_docs": relevant, "top_ranked": None}
    task.dataset = {"default": {"test": split}}
    task.data_loaded = True
    return task


def scores(encoder: Any, task: AbsTaskRetrieval) -> dict[str, Any]:
    """Return MTEB's scores of an encoder on a task."""
    import mteb

    result = mteb.evaluate(encoder, task, cache=None, show_progress_bar=False)
    return dict(result.task_results[0].scores["test"][0])


def pixel_encoder() -> Any:
    """Return an encoder of pixels that compares them by inner product, whatever their length."""
    from mteb.models import ModelMeta
    from mteb.models.abs_encoder import AbsEncoder
    from mteb.models.model_meta import ScoringFunction

    class Pixels(AbsEncoder):
        mteb_model_meta = ModelMeta.create_empty(
            {"modalities": ["image"], "similarity_fn_name": ScoringFunction.DOT_PRODUCT}
        )

        def encode(self, inputs: Any, **options: Any) -> Any:
            images = [np.asarray(image) for batch in inputs for image in batch["image"]]
            return np.stack(images).reshape(len(images), -1).astype(np.float32)

    return Pixels()


def sign_encoder(source: Any) -> Any:
    """Return an encoder of the signs of embeddings, of which many are equally far apart."""
    from retrieval_mteb import MtebEncoder

    class Signs(MtebEncoder):
        def encode(self, inputs: Any, **options: Any) -> Any:
            return np.sign(super().encode(inputs, **options))

    return Signs(source)


def cases(name: str, folder: Path) -> dict[str, tuple[Any, NDArray[np.uint8], NDArray[Any]]]:
    """Return by case: an encoder, and the images and labels that it searches."""
    import retrieval
    from retrieval.plugin import ArrayDataset

    from retrieval_mteb import MtebEncoder

    images, labels = pictures_of(name)
    dataset = ArrayDataset(images, labels.tolist())
    run = retrieval.train(recipe(name), folder / name, dataset=dataset, progress=False)
    unseen = np.flatnonzero(labels >= "5")
    half = np.arange(0, len(labels), 2)
    return {
        "net, unseen classes": (MtebEncoder(run), images[unseen], labels[unseen]),
        "net, half of all classes": (MtebEncoder(run), images[half], labels[half]),
        "its signs, unseen classes": (sign_encoder(run), images[unseen], labels[unseen]),
        "pixels by product, unseen classes": (pixel_encoder(), images[unseen], labels[unseen]),
    }


def negative_product(queries: Any, items: Any) -> Any:
    """Return distances (Q, N) that order items by their inner product with a query."""
    return -(queries @ items.T)


def measure(name: str, folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a set."""
    import retrieval
    import torch

    rows = []
    for case, (encoder, images, labels) in cases(name, folder).items():
        dropped = scores(encoder, image_task(images, labels))
        by_id = scores(encoder, image_task(images, labels, by_id=True))
        batches = [
            {"image": list(images[start : start + 32])} for start in range(0, len(images), 32)
        ]
        embeddings = encoder.encode(batches)
        similarity = torch.as_tensor(encoder.similarity(embeddings, embeddings))
        others = (similarity >= similarity.diag()[:, None]).sum(1) > 1
        distance: Callable[[Any, Any], Any] | None = None
        if case.startswith("pixels"):
            distance = negative_product
        paper = retrieval.evaluate(embeddings, labels, metrics=METRICS, distance=distance)
        rows.append(
            {
                "set": name,
                "case": case,
                "queries": len(labels),
                "mteb": {key: dropped[key] for key in KEPT},
                "mteb_by_id": {key: by_id[key] for key in KEPT},
                "paper": paper.values,
                "own_not_first": int(others.sum()),
            }
        )
        print(rows[-1], flush=True)
    return rows


def render(raw: dict[str, Any]) -> str:
    lines = []
    others = []
    for row in raw["rows"]:
        start = [TITLES[row["set"]], row["case"]]
        mteb, by_id, paper = row["mteb"], row["mteb_by_id"], row["paper"]
        first = [scores["hit_rate_at_1"] for scores in (mteb, by_id)]
        shown = [decimals(value) for value in (*first, paper["recall_at_1"])]
        lines.append([*start, f"{row['queries']:,}", *shown, f"{row['own_not_first']:,}"])
        pairs = [mteb["recall_at_1"], paper["recall_at_1"], mteb["map_at_1000"], paper["map_at_r"]]
        others.append([*start, *(decimals(value, 4) for value in pairs)])
    head = ["pictures", "encoder, gallery", "queries", "MTEB", "MTEB, own picture dropped"]
    head += ["the papers' Recall@1", "own picture not alone at the top"]
    names = ["pictures", "encoder, gallery", "MTEB `recall_at_1`", "Recall@1"]
    names += ["MTEB `map_at_1000`", "MAP@R"]
    return page(f"""
        # Image retrieval in MTEB and by the protocol of papers

        `python benchmarks/mteb_protocol.py`, {raw["versions"]}. The same embeddings, queries and
        gallery; each picture searches among all. *MTEB* is `hit_rate_at_1` with the flags of
        CUB200I2IRetrieval, which drops the first hit. In the next column, the query's own picture
        is dropped by its id. The last column counts queries for which another picture is at least
        as similar as the query's own.

        {markdown(head, lines)}

        Scores of MTEB that have a name like the papers' and another formula:

        {markdown(names, others)}

        The net trained on all pictures of the first five classes. *Unseen classes* are the
        other five, as in the papers' protocol. *Half of all classes* is every second picture of
        all ten. MTEB's CUB200I2IRetrieval is of this kind: the test half of all 200 classes.
    """)


def main() -> None:
    bench.arguments(__doc__).parse_args()
    bench.one_thread()
    raw: dict[str, Any] = {"versions": bench.versions("mteb", "torch"), "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        for name in SETS:
            raw["rows"] += measure(name, Path(folder))
    bench.finish("mteb_protocol", raw, render(raw))


if __name__ == "__main__":
    main()
