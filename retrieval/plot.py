"""Plots: the `neighbours` of queries, the `curves` of training, and a `map` of embeddings."""

from retrieval.evaluation.plot import curves, map, neighbours

__all__ = ["curves", "map", "neighbours"]
