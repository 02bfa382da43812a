"""Logged runs through a policy, as the service would have judged them: `evalstop-lab replay`."""

from evalstop_lab.replay.judged import Judged, judge
from evalstop_lab.replay.policy_file import load_policy, policy_from_file
from evalstop_lab.replay.runs import Roles, Run, Runs
from evalstop_lab.replay.sources import read

__all__ = ["Judged", "Roles", "Run", "Runs", "judge", "load_policy", "policy_from_file", "read"]
