"""The policies that come with EvalStop."""

from __future__ import annotations

from evalstop_detectors.codec import policy_from_document
from evalstop_detectors.policy import Policy

PAPER = policy_from_document(
    {
        "name": "paper",
        "description": "EvalStop as published (arXiv 2606.04145): stop after 3 consecutive eval declines.",
        "members": [{"detector": "k_decline", "params": {"k": 3}}],
    }
)

LEVEL = policy_from_document(
    {
        "name": "level",
        "description": "Stop after 5 consecutive evals below the best; values that are not finite are suspect. With no"
        " tolerance, as here, it stops every noisy plateau: copy it and set `tolerance` to a few times the noise of"
        " your evals.",
        "members": [
            {"detector": "k_below_best", "params": {"k": 5}},
            {"detector": "non_finite", "params": {"signal": "eval"}},
            {"detector": "non_finite", "params": {"signal": "proxy"}},
            {"detector": "non_finite", "params": {"signal": "kl"}},
            {"detector": "non_finite", "params": {"signal": "loss"}},
        ],
    }
)

POLICIES: dict[str, Policy] = {policy.name: policy for policy in (PAPER, LEVEL)}
