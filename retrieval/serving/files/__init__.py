"""Safe access to files: locks, reading without following links, strict JSON and CSV."""
