"""Compare recipes fairly: the same budget, tuning, seeds and statistical tests."""
