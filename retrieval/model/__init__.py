"""The model and its parts: their contracts, and base classes for new parts."""
