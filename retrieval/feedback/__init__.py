"""Feedback on searches: its record, and the interleaving of two rankings."""
