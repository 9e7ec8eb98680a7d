"""HTML report of runs: metrics, hits and mistakes, and thresholds."""
