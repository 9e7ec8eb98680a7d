"""Clients of the server, as `retrieval.client`."""
