"""Large batches in little memory: `[train] chunk`.

A loss of pairs needs all embeddings of a batch at once, but not the activations that led to them.
Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (RepL4NLP
2021), embed the batch chunk by chunk without a graph, compute the gradient of the loss with respect
to the embeddings, and embed each chunk again to propagate that gradient to the weights. Here,
torch's activation checkpointing recomputes each chunk, so the rest of a step is as without chunks.
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
"""Warning for a run that trains batch norm in chunks."""


def in_little_memory(
    forward: Callable[[Tensor], tuple[Tensor, Tensor]], model: nn.Module, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `forward(rows)` without keeping activations; backward computes them again.

    The recomputation uses the same random numbers (for dropout) and the same buffers (batch norm's
    running statistics) as the first computation, and leaves both as they were before it.
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

    # To stop a recomputation early, torch raises an exception, which `calling` around a plugin's
    # part would report as the part's error.
    with set_checkpoint_early_stop(False):
        parts: tuple[Tensor, Tensor] = checkpoint(
            forward, rows, use_reentrant=False, context_fn=contexts
        )
    return parts


@contextmanager
def _holding(buffers: list[Tensor], values: list[Tensor]) -> Iterator[None]:
    """Context manager that sets buffers to `values` and restores their contents at the end."""
    own = [buffer.clone() for buffer in buffers]
    _fill(buffers, values)
    try:
        yield
    finally:
        _fill(buffers, own)


def _fill(buffers: list[Tensor], values: list[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.data.copy_(value)
