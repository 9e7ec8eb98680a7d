"""The tables of a recipe, and reading and checking recipes."""
