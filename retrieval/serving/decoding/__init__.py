"""Decoding for strangers: processes with a deadline and a memory limit, replaced when they break one."""
