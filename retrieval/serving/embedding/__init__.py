"""Embed sources into a folder of Parquet files."""
