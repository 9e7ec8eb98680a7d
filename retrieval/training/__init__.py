"""Training: checks before the start, batches and phases, validation, and fitting learners."""
