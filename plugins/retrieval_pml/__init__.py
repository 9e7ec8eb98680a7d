"""Everything of pytorch-metric-learning under its own names: losses, miners, reducers, regularisers
and distances.

`ContrastiveLoss` is `pml.contrastive`, `TripletMarginMiner` is the miner `pml.triplet_margin`, and
so on. The classes and parameters that are left out are listed in `retrieval_pml.excluded`, with the
reasons.
"""

from __future__ import annotations

from retrieval import hookimpl
from retrieval.host.hookspecs import Factories


@hookimpl
def retrieval_losses() -> Factories:
    """Every loss: of pairs, triplets, rankings, proxies and views, and those that wrap other
    losses.
    """
    from retrieval_pml import (
        losses_classifiers,
        losses_pairs,
        losses_proxies,
        losses_ranking,
        losses_softmax,
        losses_views,
        wrappers,
    )

    return {
        **losses_pairs.FACTORIES,
        **losses_softmax.FACTORIES,
        **losses_ranking.FACTORIES,
        **losses_classifiers.FACTORIES,
        **losses_proxies.FACTORIES,
        **losses_views.FACTORIES,
        **wrappers.FACTORIES,
    }


@hookimpl
def retrieval_miners() -> Factories:
    """Every miner."""
    from retrieval_pml import miners

    return miners.FACTORIES


@hookimpl
def retrieval_reducers() -> Factories:
    """Every reducer."""
    from retrieval_pml import reducers

    return reducers.FACTORIES


@hookimpl
def retrieval_regularizers() -> Factories:
    """Every regulariser, of embeddings and of class weights."""
    from retrieval_pml import regularizers

    return regularizers.FACTORIES


@hookimpl
def retrieval_distances() -> Factories:
    """Every distance and similarity."""
    from retrieval_pml import distances

    return distances.FACTORIES
