"""Embed sources into a folder of Parquet files; join a Ray cluster."""
