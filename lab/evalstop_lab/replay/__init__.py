"""`evalstop-lab replay`: replays logged runs through a policy, as the service would have judged them."""

from evalstop_lab.replay.judged import Judged, judge_runs
from evalstop_lab.replay.policy_file import load_policy, policy_from_file
from evalstop_lab.replay.runs import Roles, Run, Runs, Troubles
from evalstop_lab.replay.sources import Asked, read

__all__ = [
    "Asked",
    "Judged",
    "Roles",
    "Run",
    "Runs",
    "Troubles",
    "judge_runs",
    "load_policy",
    "policy_from_file",
    "read",
]
