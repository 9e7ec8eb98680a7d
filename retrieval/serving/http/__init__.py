"""The server: an index behind HTTP."""
