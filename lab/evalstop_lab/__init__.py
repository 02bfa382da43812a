"""The lab of EvalStop: replay, backtest, calibration, simulator, benchmarks, and an example trainer for RLHF."""

from evalstop_lab.rlhf.presets import PRESETS
from evalstop_lab.rlhf.trainer import Config, Eval, State, Trainer

__all__ = ["PRESETS", "Config", "Eval", "State", "Trainer"]
