"""A run: what a recipe builds, its folder and its checkpoints, and opening it again."""
