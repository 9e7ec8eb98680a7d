"""Exact metrics of a run, a bundle, or codes with labels, and verification of pairs."""
