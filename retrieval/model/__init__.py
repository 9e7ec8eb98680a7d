"""A model and its parts: the contract of each, and base classes for new ones."""
