"""Benchmarks: contenders are measured in turns in one run, and compared by ratios."""

import importlib.util

if importlib.util.find_spec("psutil") is None:
    raise SystemExit("The benchmarks need more libraries: pip install 'evalstop-lab[benchmarks]'.")
