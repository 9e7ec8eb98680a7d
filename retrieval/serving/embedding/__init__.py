"""Embed what sources name into a folder of Parquet files: on this machine's cores, or on a Ray
cluster.
"""
