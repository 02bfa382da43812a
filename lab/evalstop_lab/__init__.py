"""The proving ground of EvalStop: a real RLHF run that over-optimizes, and the demo."""

from evalstop_lab.rlhf.presets import PRESETS
from evalstop_lab.rlhf.trainer import Config, Eval, State, Trainer

__all__ = ["PRESETS", "Config", "Eval", "State", "Trainer"]
