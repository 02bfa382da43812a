"""Benchmarks: contenders are measured in turns in one run, and compared by ratios."""
