"""The panel of a policy: what its observers have seen of a run, and when each of its members first called for a stop.

No verdict depends on it.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from evalstop_detectors.detectors.detector import Changes, Evidence
from evalstop_detectors.observation import Columns, Observation, to_observations
from evalstop_detectors.policy.policy import Policy

Calls = tuple[int | None, ...]
"""For each member of `Policy.panel` the first step at which its evidence called for a stop."""


class PanelState(Struct, frozen=True):
    """What is kept of a panel beside the members that decide.

    `states` and `evidence` hold one entry for each observer; a state of None: it has failed, and sees nothing more.
    """

    states: tuple[Any, ...]
    evidence: tuple[Evidence | None, ...]
    calls: Calls


def start_panel(policy: Policy) -> PanelState:
    """The state before the first observation."""
    states = tuple(member.detector.start() for member in policy.observers)
    return PanelState(states, (None,) * len(states), (None,) * len(policy.panel))


def restart_observers(policy: Policy, panel: PanelState) -> PanelState:
    """The state at a change of the eval's measurement; calls and the latest evidence stay."""
    states = tuple(
        member.detector.start_anew(state) if member.sees_eval and state is not None else state
        for member, state in zip(policy.observers, panel.states, strict=True)
    )
    return replace(panel, states=states)


def step_observers(policy: Policy, panel: PanelState, observation: Observation) -> PanelState:
    """Add one observation to what observers have seen; one that raises an exception sees nothing more."""
    shown = policy.shown_to_observers[observation.role]
    if not shown:
        return panel
    states, evidence, calls = list(panel.states), list(panel.evidence), panel.calls
    for index, detector_step in shown:
        if (before := states[index]) is None:
            continue
        try:
            states[index], latest = detector_step(before, observation)
        except Exception as error:
            note = f"failed, and sees nothing more: {error!r:.200}"
            states[index], latest = None, Evidence(policy.observers[index].detector.kind, 0.0, None, note)
        if latest is not evidence[index]:
            evidence[index] = latest
            calls = add_calls(policy, calls, len(policy.members) + index, [(observation.order, latest)])
    return PanelState(tuple(states), tuple(evidence), calls)


def fold_observers(policy: Policy, panel: PanelState, columns: Columns) -> PanelState:
    """Like `step_observers`, with many observations; each observer takes its own in at once."""
    states, evidence, calls = list(panel.states), list(panel.evidence), panel.calls
    try:
        for index, member in enumerate(policy.observers):
            watched = {role: columns[role] for role in member.roles if role in columns}
            if not watched or states[index] is None:
                continue
            states[index], changed = member.detector.fold(states[index], evidence[index], watched)
            calls = add_calls(policy, calls, len(policy.members) + index, changed)
            evidence[index] = changed[-1][1] if changed else evidence[index]
    except Exception:  # one at a time shows at which observation: a failure has the same effect however they arrive
        for observation in to_observations(columns):
            panel = step_observers(policy, panel, observation)
        return panel
    return PanelState(tuple(states), tuple(evidence), calls)


def add_calls(policy: Policy, calls: Calls, place: int, changes: Changes) -> Calls:
    """The calls, with that of the member at this place if one of these changes is the first to reach its threshold."""
    level = policy.stop_levels[place]
    if level is None or calls[place] is not None:
        return calls
    step = next((at for (at, _), item in changes if item.reaches(level)), None)
    return calls if step is None else (*calls[:place], step, *calls[place + 1 :])
