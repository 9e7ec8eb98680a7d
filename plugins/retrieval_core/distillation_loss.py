"""A loss that trains a model to reproduce the embeddings of another model, the teacher."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import NonNegativeFloat
from retrieval.errors import DataError
from retrieval.helpers import as_given, full_precision
from retrieval.plugin import Part, traits
from torch import Tensor, nn


class Distillation(nn.Module):
    """Compares a model's embeddings, and the distances between them, with those of a teacher.

    The loss takes row numbers of `teacher` in place of labels; `[augmentation] positives = "item"`
    provides them.

    Args:
        teacher: the teacher's embeddings (N, C) of the training items, of unit length.
        classes: the items' classes (N,), for `loss`.
        cosine: weight of the mean of 1 − cos(embedding, teacher's embedding).
        relational: weight of the relational loss.
        loss: a further loss of embeddings and classes.
        loss_weight: weight of `loss`.
    """

    teacher: Tensor
    classes: Tensor

    def __init__(
        self,
        teacher: Tensor,
        classes: Tensor,
        cosine: float = 1.0,
        relational: float = 1.0,
        loss: nn.Module | None = None,
        loss_weight: float = 1.0,
    ) -> None:
        super().__init__()
        if len(teacher) != len(classes):
            raise ValueError(
                f"there are {len(teacher)} embeddings of the teacher and {len(classes)} classes"
            )
        # not persistent, because a resumed run reads the teacher's file again
        self.register_buffer("teacher", teacher, persistent=False)
        self.register_buffer("classes", classes, persistent=False)
        self.cosine = cosine
        self.relational = relational
        self.loss = loss
        self.loss_weight = loss_weight

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """Return the weighted sum, a scalar; see `retrieval.plugin.Loss`."""
        if indices_tuple is not None or ref_emb is not None:
            raise ValueError("core.distillation accepts neither ref_emb nor a miner's indices")
        x = full_precision(embeddings)
        target = self.teacher[labels].to(x.dtype)
        total = self.cosine * (1 - nn.functional.cosine_similarity(x, target)).mean()
        if self.relational:
            total = total + self.relational * relations(x, target)
        if self.loss is not None:
            total = total + self.loss_weight * self.loss(x, self.classes[labels])
        return as_given(total, embeddings)


def relations(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the relational loss between two models' embeddings of a batch, a scalar.

    Each model gives a distance for every pair of items; its distances are divided by their mean.
    The loss is the mean Huber loss between these quotients. Source: Park et al., "Relational
    Knowledge Distillation", CVPR 2019, equations 4 to 6.

    Args:
        student: embeddings (B, C).
        teacher: embeddings (B, C') of the same items.
    """
    if len(student) < 2:
        return student.sum() * 0
    distances, target = (_relative_distances(x) for x in (student, teacher))
    return nn.functional.smooth_l1_loss(distances, target)


def _relative_distances(x: Tensor) -> Tensor:
    """Return the distances of all pairs (P,), divided by their mean."""
    i, j = torch.triu_indices(len(x), len(x), 1, device=x.device)
    squares = (x[i] - x[j]).square().sum(1)
    # The root has no finite gradient at zero, the distance of two equal embeddings.
    distances = squares.clamp(min=torch.finfo(x.dtype).tiny).sqrt()
    return distances / distances.mean().clamp(min=torch.finfo(x.dtype).eps)


@traits(ref_emb=False, miner=False)
def distillation(
    teacher: Path,
    embedding_size: int,
    classes: int,
    cosine: NonNegativeFloat = 1.0,
    relational: NonNegativeFloat = 1.0,
    loss: Annotated[nn.Module | None, Part("losses")] = None,
    loss_weight: NonNegativeFloat = 1.0,
) -> Distillation:
    """Learn a teacher's embeddings and the distances between them, without labels.

    The teacher is a larger model. The loss is the mean of 1 − cos(embedding, teacher's embedding)
    plus the relational loss of Park et al., "Relational Knowledge Distillation", CVPR 2019,
    equations 4 to 6. `retrieval distill` writes the teacher's file and the recipe, which sets
    `[augmentation] positives = "item"`.

    Args:
        teacher: NPZ file with `vectors` (N, embedding_size) and `classes` (N,), one row per
            training item, in order.
        cosine: weight of the distance to the teacher's embeddings.
        relational: weight of the relational loss.
        loss: a further loss, which compares items by their classes.
        loss_weight: weight of the further loss.
    """
    try:
        with np.load(teacher, allow_pickle=False) as file:
            vectors = file["vectors"]
            item_classes = file["classes"]
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(
            f"[loss] teacher: {teacher} is not a file of teacher embeddings ({error})."
            " `retrieval distill` writes such a file."
        ) from error
    if vectors.ndim != 2 or vectors.shape[1] != embedding_size or item_classes.dtype.kind != "i":
        raise ValueError(
            f"{teacher} must hold embeddings of shape (N, {embedding_size}) and integer classes,"
            f" but its embeddings have shape {vectors.shape} and its classes have type"
            f" {item_classes.dtype}"
        )
    # `classes` is the number of training items, as positives = "item" makes each item a class
    if len(vectors) < classes:
        raise ValueError(
            f"{teacher} holds embeddings of {len(vectors):,} items, but the training data have"
            f" {classes:,} items: the file belongs to other photos"
        )
    return Distillation(
        torch.from_numpy(vectors).float(),
        torch.from_numpy(item_classes).long(),
        cosine,
        relational,
        loss,
        loss_weight,
    )
