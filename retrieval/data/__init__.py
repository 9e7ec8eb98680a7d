"""Datasets, splits, batches for training and evaluation, and the cache of features."""
