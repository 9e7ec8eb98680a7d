"""Plugins: what they may offer, how they are found, read, checked and built."""
