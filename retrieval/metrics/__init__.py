"""Metrics of rankings: Recall@k, MAP@R, nDCG and others, and how a name becomes one."""
