"""Build an index from a bundle and items, open it, change it and search it."""
