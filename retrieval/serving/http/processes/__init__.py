"""Several processes that are one server: a supervisor that starts them, and what they are to each other."""
