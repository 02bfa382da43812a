"""Policies held against one's own past runs: `evalstop-lab backtest`, and thresholds found on them."""
