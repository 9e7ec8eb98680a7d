"""Files that stay whole: one writer at a time, written whole or not at all, read as they were at
one moment.
"""
