"""Training: the run folder, the trainer and its steps, checkpoints, and the driver of learners."""
