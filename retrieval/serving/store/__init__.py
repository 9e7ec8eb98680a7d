"""The local store of an index, and the exact search that it shares with evaluation."""
