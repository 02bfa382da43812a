"""The paths by which people stay in charge, and receivers report: no flood of other requests may close them."""

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
    """Whether people stay in charge, or receivers report, by this path."""
    return _DECIDES.fullmatch(path) is not None


def is_veto_path(path: str) -> bool:
    """Whether a veto or a pause may come by this path, or the sign-in that it needs."""
    return _VETOES.fullmatch(path) is not None
