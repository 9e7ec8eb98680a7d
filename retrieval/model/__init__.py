"""A model and its parts: what the host asks of each, and what a part of one's own may start from."""
