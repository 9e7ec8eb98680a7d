"""The HTTP server of one or more indexes."""
