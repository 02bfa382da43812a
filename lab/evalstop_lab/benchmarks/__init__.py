"""Benchmarks: contenders side by side in one run, in turns, and what they did in ratios."""
