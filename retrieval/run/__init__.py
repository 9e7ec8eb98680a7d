"""Runs: build a recipe's parts, write the run's folder and checkpoints, open a run again."""
