"""An example to watch: RLHF in the manner of Gao et al. (arXiv 2210.10760), small enough for one core and a minute.

A fixed gold reward labels comparisons, a proxy of less capacity is fitted to them, a policy is trained against the
proxy, and gold is measured on the way. No curve is drawn from a formula.
"""

from evalstop_lab.rlhf.presets import PRESETS, hastened
from evalstop_lab.rlhf.trainer import Config, Eval, Trainer

__all__ = ["PRESETS", "Config", "Eval", "Trainer", "hastened"]
