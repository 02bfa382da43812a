"""`evalstop-lab replay`: replays logged runs through a policy, as the service would have judged them."""

from evalstop_lab.replay.judged import judge_runs
from evalstop_lab.replay.policy_file import load_policy, policy_from_file
from evalstop_lab.replay.runs import ReadErrors, Roles, Run, Runs
from evalstop_lab.replay.sources import RequestedRoles, read_runs

__all__ = [
    "ReadErrors",
    "RequestedRoles",
    "Roles",
    "Run",
    "Runs",
    "judge_runs",
    "load_policy",
    "policy_from_file",
    "read_runs",
]
