"""Embed sources into a folder of Parquet files, on this machine or on a Ray cluster."""
