"""Ray as the cluster of `retrieval compare --ray` and `retrieval embed --ray`."""

from __future__ import annotations

from retrieval.plugin import Factories, hookimpl


@hookimpl
def retrieval_clusters() -> Factories:
    """Ray: trainings and embeddings on many computers."""
    return {"cluster": "retrieval_ray.cluster:RayCluster"}
