"""Online detectors of the moment when a training run stops getting better: no clock, no randomness, no I/O."""

from evalstop_detectors.checkpoint.choice import (
    Score,
    Scores,
    choose_best,
    find_highest,
    select_version,
)
from evalstop_detectors.combined_eval import CombinedState, EvalValue, combine_values, start_combining
from evalstop_detectors.detectors.detector import Detector, EvalRequest, EvalRequests, Evidence, Kind, Thresholds
from evalstop_detectors.errors import DetectorError, InvalidPolicy, InvalidRule, OutOfOrder, StaleState
from evalstop_detectors.observation import ROLES, MetricRole, Observation
from evalstop_detectors.policy.catalog import (
    DETECTORS,
    NOTHING_SEEN,
    Action,
    Call,
    GuardKind,
    Verdict,
)
from evalstop_detectors.policy.codec import (
    describe_document,
    policy_from_document,
    policy_to_document,
)
from evalstop_detectors.policy.monitor import advance, replay, step
from evalstop_detectors.policy.policy import Member, Policy
from evalstop_detectors.policy.shipped import POLICIES
from evalstop_detectors.policy.state import (
    MonitorState,
    find_request,
    is_late,
    name_calls,
    start,
    state_from_json,
    state_to_json,
)
from evalstop_detectors.roles.meanings import RoleOrigin
from evalstop_detectors.roles.params import derive_total_steps, find_total_steps
from evalstop_detectors.roles.recognition import Role, choose_direction, recognize_roles
from evalstop_detectors.sweep import (
    Exploit,
    GroupCall,
    GroupMember,
    GroupRule,
    Hyperparameter,
    check_rule,
    judge_group,
)

__all__ = [
    "DETECTORS",
    "NOTHING_SEEN",
    "POLICIES",
    "ROLES",
    "Action",
    "Call",
    "CombinedState",
    "Detector",
    "DetectorError",
    "EvalRequest",
    "EvalRequests",
    "EvalValue",
    "Evidence",
    "Exploit",
    "GroupCall",
    "GroupMember",
    "GroupRule",
    "GuardKind",
    "Hyperparameter",
    "InvalidPolicy",
    "InvalidRule",
    "Kind",
    "Member",
    "MetricRole",
    "MonitorState",
    "Observation",
    "OutOfOrder",
    "Policy",
    "Role",
    "RoleOrigin",
    "Score",
    "Scores",
    "StaleState",
    "Thresholds",
    "Verdict",
    "advance",
    "check_rule",
    "choose_best",
    "choose_direction",
    "combine_values",
    "derive_total_steps",
    "describe_document",
    "find_highest",
    "find_request",
    "find_total_steps",
    "is_late",
    "judge_group",
    "name_calls",
    "policy_from_document",
    "policy_to_document",
    "recognize_roles",
    "replay",
    "select_version",
    "start",
    "start_combining",
    "state_from_json",
    "state_to_json",
    "step",
]
