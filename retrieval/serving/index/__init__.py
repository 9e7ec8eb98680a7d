"""Build an index folder from a bundle and items, open it, search it."""
