"""Runs one of the benchmarks of vetoes: `cycles` (the default) or `floods`, with its own options."""

from __future__ import annotations

import sys
from importlib import import_module

if __name__ == "__main__":
    name, *arguments = sys.argv[1:] or ["cycles"]
    if name not in ("cycles", "floods"):
        sys.exit(f"{name}: choose cycles or floods")
    sys.exit(import_module(f"evalstop_lab.benchmarks.veto.{name}").main(arguments))
