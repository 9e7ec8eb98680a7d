"""Plugins: the hooks, finding and loading plugins, and building the parts that recipes name."""
