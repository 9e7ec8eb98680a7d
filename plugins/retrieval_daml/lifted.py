"""The lifted structure of equations 10 and 11."""

from __future__ import annotations

from typing import Any, Literal

import torch
from retrieval.model.loss import Distance, Reducer, nothing
from torch import Tensor

from retrieval_daml.base import Measure, PaperLoss


class LiftedLoss(PaperLoss):
    """Each positive pair against the negatives of both of its items.

    Oh Song, Xiang, Jegelka & Savarese, CVPR 2016; Duan, Lu, Zheng & Zhou, "Deep Adversarial Metric
    Learning", equations 10 and 11. The mean over positive pairs (i, j) of ½ [ J ]₊ with, as the
    latter print it,

        J = max( max_{n of i} α − D(i, n), max_{n of j} α − D(j, n) ) + D(i, j)

    With `form = "original"` it is ½ [ J ]₊² with the log-exp sum over both items' negatives in
    place of the maximum. A positive's own negatives count where it is an anchor too: without a
    reference set, and with one that begins with the batch, as with a generator. A pair without
    negatives costs nothing.

    Args:
        margin: α, a distance.
        form: "printed", or "original" for the square and the log-exp sum.
        distance: how two embeddings are compared; the Euclidean distance, without normalising, by
            default.
        reducer: how the pairs' losses become one number; the mean by default.
    """

    def __init__(
        self,
        margin: float = 1.0,
        form: Literal["printed", "original"] = "printed",
        distance: Distance = None,
        reducer: Reducer = None,
    ) -> None:
        super().__init__(distance, reducer)
        if form not in ("printed", "original"):
            raise ValueError(f'form is {form!r} and must be "printed" or "original"')
        self.margin = margin
        self.form = form

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Any,
    ) -> dict[str, dict[str, Any]]:
        """Return the pairs' losses, as pytorch-metric-learning's reducers read them."""
        a, p, b, n = self.pairs(labels, indices_tuple, embeddings, ref_emb, ref_labels)
        if len(a) == 0 or len(b) == 0:
            return {"loss": nothing(embeddings, ref_emb)}
        measure = Measure(self.distance, embeddings, ref_emb)
        push = self._by_anchor(self.margin - measure.plain(b, n), b, len(embeddings))
        lowest = torch.finfo(push.dtype).min / 4
        others = torch.where(
            _is_anchor(embeddings, ref_emb, p), push[p.clamp_max(len(push) - 1)], lowest
        )
        both = torch.stack([push[a], others])
        reach = both.amax(0) if self.form == "printed" else both.logsumexp(0)
        losses = (reach + measure.plain(a, p)).relu()
        if self.form == "original":
            losses = losses.square()
        return {"loss": {"losses": losses / 2, "indices": (a, p), "reduction_type": "pos_pair"}}

    def _by_anchor(self, values: Tensor, anchors: Tensor, size: int) -> Tensor:
        """Return the maximum or log-exp sum (B,) of each anchor's values; of none a number below
        all others.
        """
        lowest = values.new_full((size,), torch.finfo(values.dtype).min / 4)
        if self.form == "printed":
            return lowest.scatter_reduce(0, anchors, values, "amax")
        largest = lowest.scatter_reduce(0, anchors, values.detach(), "amax")
        total = torch.zeros_like(lowest).index_add(0, anchors, (values - largest[anchors]).exp())
        return torch.where(total > 0, largest + total.clamp_min(1e-30).log(), lowest)


def _is_anchor(query: Tensor, reference: Tensor, columns: Tensor) -> Tensor:
    """Whether these references are the batch's items of the same number."""
    begins = reference is query or (
        len(reference) >= len(query) and torch.equal(reference[: len(query)], query)
    )
    return (columns < len(query)) & begins
