"""The local store: items and vectors of a living index in one folder."""
