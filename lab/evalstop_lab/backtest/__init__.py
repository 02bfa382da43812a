"""Backtests of policies on your own past runs: `evalstop-lab backtest`."""
