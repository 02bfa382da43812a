"""The paths of vetoes, pauses and receivers' reports: no flood of other requests may block them."""

from __future__ import annotations

import re

SIGN_IN = "/login"

_VETOES = re.compile(r"/api/v1/(decisions/[^/]+/veto|project/pause)|/decisions/[^/]+/veto|/settings/pause|/login")

_DECIDES = re.compile(
    r"/api/v1/(decisions/[^/]+/(veto|undo|release|report)|project/(pause|resume)|runs/[^/]+/stop)"
    r"|/decisions/[^/]+/(veto|undo|release)|/settings/(pause|resume)|/runs/[^/]+/stop"
    r"|/api/v1/pull/endpoints/[^/]+/(claim|settle)"
)


def is_decision_path(path: str) -> bool:
    """Whether this is a path of decisions or of receivers' reports."""
    return _DECIDES.fullmatch(path) is not None


def is_veto_path(path: str) -> bool:
    """Whether this is a path of vetoes or pauses, or of the sign-in that they require."""
    return _VETOES.fullmatch(path) is not None
