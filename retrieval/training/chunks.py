"""Large batches in little memory: `[train] chunk`.

A loss that compares pairs needs all embeddings of a batch at once, but not the activations from
which they were computed. Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory
Limited Setup" (RepL4NLP 2021), therefore embed each chunk twice: first without a graph, to compute
the gradient of the loss with respect to the embeddings, then to propagate this gradient to the
weights. Here, torch's activation checkpointing embeds each chunk again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

OWN_STATISTICS = (
    "[train] chunk: batch norm computes its mean and variance over each chunk of {chunk} rows, so"
    " the result differs from training on the whole batch. Layer norm, group norm and frozen batch"
    " norm are not affected."
)
"""Warning about a run that trains batch norm in chunks."""


def in_little_memory(
    forward: Callable[[Tensor], tuple[Tensor, Tensor]], model: nn.Module, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `forward(rows)` without keeping activations; the backward pass recomputes them.

    The second computation uses the random numbers (of dropout) and the buffers (batch norm's
    running statistics) of the first one. Then it restores the generators and the buffers.
    """
    buffers = [
        buffer
        for module in model.modules()
        if module.training
        for buffer in module.buffers(recurse=False)
    ]
    before = [buffer.clone() for buffer in buffers]

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _holding(buffers, before)

    # torch stops a recomputation early by an exception. If it passed through a plugin's part,
    # `calling` would report it as the part's error.
    with set_checkpoint_early_stop(False):
        parts: tuple[Tensor, Tensor] = checkpoint(
            forward, rows, use_reentrant=False, context_fn=contexts
        )
    return parts


@contextmanager
def _holding(buffers: list[Tensor], values: list[Tensor]) -> Iterator[None]:
    """Context manager that sets buffers to `values` and, at the end, to their own contents."""
    own = [buffer.clone() for buffer in buffers]
    _fill(buffers, values)
    try:
        yield
    finally:
        _fill(buffers, own)


def _fill(buffers: list[Tensor], values: list[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.data.copy_(value)
