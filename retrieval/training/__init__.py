"""A look ahead, phases and their batches, validation, and the driver of learners."""
