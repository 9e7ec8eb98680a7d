"""Serve an index over HTTP: JSON, and a page to search with an image."""
