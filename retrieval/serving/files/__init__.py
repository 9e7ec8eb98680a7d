"""Files that stay whole: locked, read without links, strict JSON and CSV."""
