"""The losses, miners, reducers, regularisers and distances of pytorch-metric-learning.

`ContrastiveLoss` is `pml.contrastive`, `TripletMarginMiner` is the miner `pml.triplet_margin`, and
so on. Abstract classes are left out, and so are parameters without a meaning here, such as a
distance where the formula holds for one only.
"""

from __future__ import annotations

from retrieval.plugin import Factories, hookimpl


@hookimpl
def retrieval_losses() -> Factories:
    """Every loss, and those that wrap other losses."""
    from retrieval_pml import (
        class_losses,
        pair_losses,
        ranking_losses,
        triplet_losses,
        view_losses,
        wrapper_losses,
    )

    return {
        **pair_losses.FACTORIES,
        **triplet_losses.FACTORIES,
        **ranking_losses.FACTORIES,
        **class_losses.FACTORIES,
        **view_losses.FACTORIES,
        **wrapper_losses.FACTORIES,
    }


@hookimpl
def retrieval_miners() -> Factories:
    """Every miner."""
    from retrieval_pml import miners

    return miners.FACTORIES


@hookimpl
def retrieval_reducers() -> Factories:
    """Every reducer."""
    from retrieval_pml import parts

    return parts.REDUCERS


@hookimpl
def retrieval_regularizers() -> Factories:
    """Every regulariser, of embeddings and of class weights."""
    from retrieval_pml import parts

    return parts.REGULARIZERS


@hookimpl
def retrieval_distances() -> Factories:
    """Every distance and similarity."""
    from retrieval_pml import parts

    return parts.DISTANCES
