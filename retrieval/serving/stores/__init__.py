"""Stores: where the items of an index are kept, and what an index asks of them."""
