"""The lab of EvalStop: replay, backtest, calibration, simulator, benchmarks, and an example trainer for RLHF."""
