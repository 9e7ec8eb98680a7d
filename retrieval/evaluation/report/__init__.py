"""Runs in one HTML file: metrics, hits and mistakes, and where the threshold lies."""
