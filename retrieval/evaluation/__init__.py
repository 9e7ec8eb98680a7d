"""Exact metrics of a run, of a bundle, or of codes and labels; verification on pairs."""
