"""Losses of images and their texts: SigLIP's sigmoid loss, and InfoNCE, the loss of CLIP.

Both compare all embeddings with all reference embeddings. Similarities are computed a chunk of rows
at a time, and once more in the backward pass, so the memory holds one chunk of them at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pydantic import PositiveFloat, PositiveInt
from retrieval.helpers import reduced_loss
from retrieval.plugin import CheckedLoss
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

MAX_SCALE = math.log(100)
"""Largest logarithm of InfoNCE's factor of the cosines, as in CLIP."""
Masks = tuple[Tensor, Tensor]
"""Which pairs of a chunk are positive, and which count at all, each (B, R)."""


class ChunkedLoss(CheckedLoss):
    """A loss of the pairs of N embeddings and R reference embeddings, a chunk of rows at a time.

    Without indices of a miner, pairs of equal labels are positive and all others negative; an
    embedding is no pair with itself. With indices, only the pairs that they list count.

    Args:
        chunk: number of embeddings whose pairs are in memory at a time.
    """

    def __init__(self, chunk: int) -> None:
        super().__init__()
        self.chunk = chunk

    def chunks(
        self,
        compute: Callable[[Tensor, Tensor, Masks], Any],
        embeddings: Tensor,
        reference: Tensor,
        labels: Any,
        ref_labels: Any,
        indices: Any,
    ) -> Iterator[Any]:
        """Yield `compute(rows, reference, masks)` of each chunk of rows, all of length 1."""
        rows = functional.normalize(embeddings)
        columns = rows
        if reference is not embeddings:
            columns = functional.normalize(reference)

        def masks(part: slice) -> Masks:
            if indices is not None:
                anchors = indices[2] if len(indices) == 4 else indices[0]
                positive = _mask(indices[0], indices[1], part, len(columns))
                return positive, positive | _mask(anchors, indices[-1], part, len(columns))
            positive = labels[part, None] == ref_labels
            counts = torch.ones_like(positive)
            if reference is embeddings:
                counts[:, part].fill_diagonal_(False)
            return positive & counts, counts

        for start in range(0, len(rows), self.chunk):
            part = slice(start, min(start + self.chunk, len(rows)))
            yield checkpoint(
                lambda x, y, part=part: compute(x, y, masks(part)),
                rows[part],
                columns,
                use_reentrant=False,
            )


def _mask(anchors: Tensor, partners: Tensor, part: slice, width: int) -> Tensor:
    """Return which pairs of a chunk's rows with all references the indices list."""
    mask = torch.zeros(part.stop - part.start, width, dtype=torch.bool, device=anchors.device)
    inside = (anchors >= part.start) & (anchors < part.stop)
    mask[anchors[inside] - part.start, partners[inside]] = True
    return mask


class SigmoidLoss(ChunkedLoss):
    """Decides for each pair of an image and a text whether they belong together.

    Zhai, Mustafa, Kolesnikov & Beyer, "Sigmoid Loss for Language Image Pre-Training" (ICCV 2023),
    §3.2. For N images x, texts y, all of length 1, and z_ij = 1 if i and j belong together, else
    −1, the loss is

        −1/N Σ_i Σ_j log σ(z_ij (exp(t') x_i · y_j + b))

    with learned t' and b. An image may have several texts, and a text several images. Images are
    the embeddings, texts the reference set.

    Args:
        scale: initial exp(t').
        bias: initial b. A negative number, as most pairs do not belong together.
        chunk: number of embeddings whose pairs are in memory at a time.
    """

    def __init__(
        self, scale: PositiveFloat = 10.0, bias: float = -10.0, chunk: PositiveInt = 1024
    ) -> None:
        super().__init__(chunk)
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale)))
        self.bias = nn.Parameter(torch.tensor(float(bias)))

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> dict[str, Any]:
        """Return the loss as one number."""

        def compute(rows: Tensor, columns: Tensor, masks: Masks) -> Tensor:
            positive, counts = masks
            logits = self.log_scale.exp().to(rows) * (rows @ columns.T) + self.bias.to(rows)
            signed = torch.where(positive, logits, -logits)
            return (functional.logsigmoid(signed) * counts).sum()

        sums = [
            *self.chunks(compute, embeddings, ref_emb, labels, ref_labels, indices_tuple),
            embeddings.sum() * 0.0,
        ]
        return reduced_loss(-torch.stack(sums).sum() / max(1, len(embeddings)))


class InfoNCE(ChunkedLoss):
    """Picks the right texts of each image among all texts, and the right images of each text.

    Radford et al., "Learning Transferable Visual Models From Natural Language Supervision" (ICML
    2021), figure 3, the loss of CLIP. With several right answers, it is the mean of their losses,
    as in Yang et al., "Unified Contrastive Learning in Image-Text-Label Space" (CVPR 2022),
    equations 2 and 3. For s_ij = exp(t) x_i · y_j, vectors of length 1, and the right answers P(i)
    of i, the loss is

        ½ mean_i (−1/|P(i)| Σ_{p ∈ P(i)} log (exp(s_ip) / Σ_j exp(s_ij)))

    over all images i that have a right text, plus the same over all texts that have a right image,
    with rows and columns swapped. t is learned, and at most log 100. Images are the embeddings,
    texts the reference set. Without a reference set, embeddings are compared with one another.

    Args:
        temperature: initial exp(−t).
        chunk: number of embeddings whose pairs are in memory at a time.
    """

    def __init__(self, temperature: PositiveFloat = 0.07, chunk: PositiveInt = 1024) -> None:
        super().__init__(chunk)
        self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature)))

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> dict[str, Any]:
        """Return the loss as one number."""

        def compute(rows: Tensor, columns: Tensor, masks: Masks) -> tuple[Tensor, ...]:
            positive, counts = masks
            scale = self.log_scale.clamp(max=MAX_SCALE).exp().to(rows)
            logits = (scale * (rows @ columns.T)).masked_fill(~counts, -torch.inf)
            right = torch.where(positive, logits, 0.0)
            # no row is empty, as the logarithm of an empty sum has no gradient
            floor = logits.new_full((1,), -1e4)
            by_row = torch.cat([logits, floor.expand(len(rows), 1)], 1).logsumexp(1)
            by_column = torch.cat([logits, floor.expand(1, len(columns))]).logsumexp(0)
            return (
                by_row,
                right.sum(1),
                positive.sum(1),
                by_column,
                right.sum(0),
                positive.sum(0),
            )

        parts = [*self.chunks(compute, embeddings, ref_emb, labels, ref_labels, indices_tuple)]
        if not parts:
            return self.zero_losses()
        by_row, right_of_row, of_row, by_column, right_of_column, of_column = zip(
            *parts, strict=True
        )
        rows = _mean_loss(torch.cat(by_row), torch.cat(right_of_row), torch.cat(of_row))
        columns = _mean_loss(
            torch.stack(by_column).logsumexp(0),
            torch.stack(right_of_column).sum(0),
            torch.stack(of_column).sum(0),
        )
        return reduced_loss((rows + columns) / 2)


def _mean_loss(total: Tensor, right: Tensor, count: Tensor) -> Tensor:
    """Return the mean loss of those that have a right answer; 0 if none has one.

    Args:
        total: (N,), logarithm of the sum of exp(s) over all answers.
        right: (N,), sum of s over the right answers.
        count: (N,), number of right answers.
    """
    losses = torch.where(count > 0, total - right / count.clamp(min=1), 0.0)
    return losses.sum() / (count > 0).sum().clamp(min=1)
