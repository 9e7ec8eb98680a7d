"""Recipes compared fairly: one budget, one tuning, the same seeds, and what the figures allow to be
said.
"""
