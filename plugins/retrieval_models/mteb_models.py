"""Models of MTEB as encoders of images."""

from __future__ import annotations

from typing import Any

import numpy as np
from retrieval.base.arrays import Array, Ints, unit_rows
from retrieval.errors import DataError, needing
from retrieval.helpers import Meter, hub_from_cache_when_away
from retrieval.plugin import Dataset

from retrieval_models.pictures import pictures

TASK = "CUB200I2IRetrieval"
"""MTEB's task of finding images by images; a model that has prompts chooses them by its task."""
_CHUNK = 256
_BATCH = 32


class MtebModel:
    """A model of MTEB by name, run as MTEB runs it in its image tasks: `mteb:NAME`.

    Args:
        address: the address.

    Raises:
        DataError: the model cannot be loaded, does not embed images, or compares vectors otherwise
            than by cosine or Euclidean distance.
        MissingDependency: mteb is not installed.
    """

    def __init__(self, address: str) -> None:
        with needing("mteb is not installed", "mteb"):
            import mteb
        self.name = address.partition(":")[2]
        self.task = mteb.get_task(TASK).metadata
        try:
            meta = mteb.get_model_meta(self.name)
            kind = getattr(meta.similarity_fn_name, "value", meta.similarity_fn_name)
            # before its weights are downloaded
            if "image" not in meta.modalities or kind not in ("cosine", "euclidean"):
                raise DataError(
                    f"{self.name} embeds {', '.join(meta.modalities)} and compares by {kind}; a"
                    " model is needed that embeds images and compares by cosine or euclidean."
                )
            with hub_from_cache_when_away():
                self.model: Any = meta.load_model()
        except DataError:
            raise
        except Exception as error:  # each model's loader raises its own errors
            reason = " ".join(str(error).split()).strip('"')
            raise DataError(f"MTEB cannot load {self.name}: {reason}") from error
        self.is_cosine = kind == "cosine"

    def __call__(self, dataset: Dataset, items: Ints) -> Array:
        """Return the vectors (N, D) of items by index (N,)."""
        import datasets
        from torch.utils.data import DataLoader

        features = datasets.Features({"image": datasets.Image()})
        parts = []
        with Meter("embedding", len(items), "images") as meter:
            for start in range(0, len(items), _CHUNK):
                chunk = items[start : start + _CHUNK]
                table = datasets.Dataset.from_dict(
                    {"image": list(pictures(dataset, chunk))}, features=features
                )
                loader: Any = DataLoader(table, _BATCH, collate_fn=_collated)
                vectors = self.model.encode(
                    loader,
                    task_metadata=self.task,
                    hf_split="test",
                    hf_subset="default",
                    batch_size=_BATCH,
                    show_progress_bar=False,
                )
                parts.append(np.asarray(vectors, np.float32))
                meter.update(len(chunk))
        joined = np.concatenate(parts)
        if self.is_cosine:
            return unit_rows(joined)
        return joined


def _collated(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"image": [row["image"] for row in rows]}
