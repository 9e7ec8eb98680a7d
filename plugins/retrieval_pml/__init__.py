"""The losses, miners, reducers, regularisers and distances of pytorch-metric-learning.

`ContrastiveLoss` is `pml.contrastive`, `TripletMarginMiner` is the miner `pml.triplet_margin`, and
so on. Abstract classes are left out. So are parameters that have no meaning here, such as the
distance of a loss whose formula holds for one distance only.
"""

from __future__ import annotations

from retrieval.plugin import Factories, hookimpl


@hookimpl
def retrieval_losses() -> Factories:
    """All losses, including those that wrap other losses."""
    from retrieval_pml import (
        class_losses,
        pair_losses,
        ranking_losses,
        triplet_losses,
        wrapper_losses,
    )

    return {
        **pair_losses.FACTORIES,
        **triplet_losses.FACTORIES,
        **ranking_losses.FACTORIES,
        **class_losses.FACTORIES,
        **wrapper_losses.FACTORIES,
    }


@hookimpl
def retrieval_miners() -> Factories:
    """All miners."""
    from retrieval_pml import miners

    return miners.FACTORIES


@hookimpl
def retrieval_reducers() -> Factories:
    """All reducers."""
    from retrieval_pml import parts

    return parts.REDUCERS


@hookimpl
def retrieval_regularizers() -> Factories:
    """All regularisers, of embeddings and of class weights."""
    from retrieval_pml import parts

    return parts.REGULARIZERS


@hookimpl
def retrieval_distances() -> Factories:
    """All distances and similarities."""
    from retrieval_pml import parts

    return parts.DISTANCES
