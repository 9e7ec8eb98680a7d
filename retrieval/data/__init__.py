"""Items and splits, batches for training and evaluation, features kept on disk."""
