"""Recipes compared fairly: one budget, one tuning, the same seeds, tests and sentences."""
