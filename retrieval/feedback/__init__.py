"""Feedback on searches: its record, and the interleaving of two rankings."""

UNJUDGED_SECONDS = 86_400.0
"""How long a search without marks is kept, by default."""
JUDGED_SECONDS = 90 * 86_400.0
"""How long a search with marks is kept, and its marks, by default."""
