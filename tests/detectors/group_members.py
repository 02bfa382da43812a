"""Members of a group for the tests of its rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evalstop_detectors import GroupMember, GroupRule, Score, Scores, judge_group
from hypothesis import strategies as st

EVERY = 10
"""Steps between two evals of the generated members."""

LEVELS = st.integers(-8, 8).map(float)


def build(
    name: str,
    values: Sequence[float],
    stderr: float | None = 0.0,
    saved: Sequence[int] | None = None,
    since: int = 0,
    **fields: Any,
) -> GroupMember:
    """A member with an eval every 10 steps after the start of its lineage, and a checkpoint at each of these steps
    unless `saved` says otherwise."""
    steps = [since + EVERY * (index + 1) for index in range(len(values))]
    scores = Scores().add_scores(Score(step, value, stderr) for step, value in zip(steps, values, strict=True))
    addresses = {step: f"s3://{name}/{step}" for step in (steps if saved is None else saved)}
    return GroupMember(name, scores.add_checkpoints(addresses), since, **fields)


def build_all(curves: Mapping[str, Sequence[float]], stderr: float | None = 0.0) -> list[GroupMember]:
    return [build(name, values, stderr) for name, values in curves.items()]


def list_called(rule: GroupRule, members: Sequence[GroupMember], seed: int = 0) -> list[str]:
    return [call.member for call in judge_group(rule, members, seed)]
