"""The one function that service, replay and simulator share: observations in, a new state and a verdict out.

How a run is split into batches makes no difference. Changed evidence is always a new object; detectors return the same
object while their evidence is unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from evalstop_detectors.detectors.detector import Evidence
from evalstop_detectors.errors import OutOfOrder
from evalstop_detectors.observation import RANK, MetricRole, Observation
from evalstop_detectors.policy.catalog import Call, Verdict
from evalstop_detectors.policy.policy import Policy
from evalstop_detectors.policy.state import MonitorState, start


def step(policy: Policy, state: MonitorState, observation: Observation) -> tuple[MonitorState, Verdict]:
    """Add one observation; raises OutOfOrder if it is late.

    A role outside `policy.roles` changes nothing, not even the step of the verdict.
    """
    state, _ = advance(policy, state, (observation,))
    return state, state.verdict


def advance(
    policy: Policy, state: MonitorState, observations: Iterable[Observation]
) -> tuple[MonitorState, list[Verdict]]:
    """Add observations in order; raises OutOfOrder if one is late.

    Returns the verdicts at which the call (`continue`, `suspect`, `stop`) changed, and last the state's verdict. Those
    in between differ from their neighbors only in evidence and step.

    The published rule on a run that falls from step 2 on:

    >>> from evalstop_detectors import POLICIES
    >>> policy = POLICIES["paper"]
    >>> evals = [Observation(MetricRole.EVAL, step, value) for step, value in enumerate([0.1, 0.4, 0.7, 0.6, 0.5, 0.4])]
    >>> state, verdicts = advance(policy, start(policy), evals)
    >>> [(str(verdict.verdict), verdict.step, verdict.turn_step) for verdict in verdicts]
    [('suspect', 4, 2), ('stop', 5, 2)]
    >>> state.verdict.reason
    'k_decline: 3 consecutive declines of eval, k = 3'
    """
    judging = (_GuardedJudging if policy.critical else _Judging)(policy, state)
    for item in observations:
        if item.role in policy.roles:
            judging.add(item)
    state = judging.finish()
    verdicts = judging.changed
    return state, verdicts if verdicts and verdicts[-1] is state.verdict else [*verdicts, state.verdict]


class _Judging:
    """A run while observations are added to it: the fields of its state, and the verdicts at which the call changed.

    Nearly all verdicts say `continue`. They are only judged at the end, because nobody sees those in between.
    """

    def __init__(self, policy: Policy, state: MonitorState) -> None:
        self.policy, self.before = policy, state
        self.states, self.evidence, self.calls = list(state.states), list(state.evidence), state.calls
        self.last, self.evals, self.opening = state.last, state.evals, state.opening
        self.verdict, self.suspect_step, self.eval_version = state.verdict, state.suspect_step, state.eval_version
        self.changed: list[Verdict] = []
        self.at: int | None = None  # the step of the last observation that could change the verdict
        self.postponed_at: int | None = None  # the step at which a verdict that continues is to be judged

    def add(self, item: Observation) -> None:
        """Add one observation of a role that the policy watches."""
        policy, role, at = self.policy, item.role, item.step
        order = at, RANK[role]
        if self.last is not None and order <= self.last:
            raise OutOfOrder(
                f"{role} at step {at} belongs before an observation that the monitor has already seen; replay the run"
                " in step order"
            )
        restarts = item.eval_version != self.eval_version
        if restarts:
            self._restart(item.eval_version)
        # While nothing calls for a stop, and the evidence stays, the number of evals changes no verdict.
        may_settle = self.verdict.verdict is not Call.CONTINUE and (
            self.evals < max(policy.min_evals, 1) or bool(self.opening.scores)
        )
        # Until the first eval of a version: an observation that only observers see may have begun it.
        lacks_evidence = not self.evals and self.eval_version > 0
        is_eval = role is MetricRole.EVAL and item.finite
        if is_eval:
            self.opening = self.opening.add_eval(self.evals, item.value)
            self.evals += 1
        elif role is MetricRole.LEARNING_RATE:
            opening = self.opening.add_rate(item.value)
            if opening is self.opening and not restarts and not policy.shows_rates:
                return  # `last` stays too: the evals before it are not late
            self.opening = opening
        self.last = order
        is_stale, is_alarmed = self._show(item)
        if role not in policy.deciding_roles:
            return
        self.at = at
        is_stale = is_stale or may_settle or lacks_evidence or self.verdict.step is None
        if is_stale and not policy.keeps(self.verdict):
            if is_alarmed or self.verdict.verdict is not Call.CONTINUE:
                self._judge(at)
            else:
                self.postponed_at = at

    def _show(self, item: Observation) -> tuple[bool, bool]:
        """Show an observation to the detectors of its role. Whether the evidence of a deciding member changed, and
        whether it calls for anything then."""
        policy, states, evidence, deciding = self.policy, self.states, self.evidence, len(self.policy.members)
        is_stale = is_alarmed = False
        for index, detector_step in policy.shown[item.role]:
            if (before := states[index]) is None:
                continue
            try:
                states[index], latest = detector_step(before, item)
            except Exception as error:
                if index < deciding:
                    raise
                note = f"failed, and sees nothing more: {error!r:.200}"
                kind = policy.observers[index - deciding].detector.kind
                states[index], latest = None, Evidence(kind, 0.0, None, note)
            if latest is evidence[index]:
                continue
            evidence[index] = latest
            level = policy.stop_levels[index]
            if level is not None and latest.value >= level and self.calls[index] is None:
                self.calls = (*self.calls[:index], item.step, *self.calls[index + 1 :])
            if index < deciding:
                is_stale, is_alarmed = True, is_alarmed or latest.value >= policy.members[index].alarm_level
        return is_stale, is_alarmed

    def _restart(self, eval_version: int) -> None:
        """Begin anew at a change of the eval's measurement. The verdict is unchanged, and so is observers' evidence."""
        if self.postponed_at is not None:
            self._judge(self.postponed_at)
        members = (*self.policy.members, *self.policy.observers)
        for index, member in enumerate(members):
            if member.sees_eval and self.states[index] is not None:
                self.states[index] = member.detector.start_anew(self.states[index])
                if index < len(self.policy.members):
                    self.evidence[index] = None
        self.evals, self.eval_version, self.opening = 0, eval_version, replace(self.opening, scores=())

    def _judge(self, at: int) -> None:
        evidence = self.evidence[: len(self.policy.members)]
        self.postponed_at = None
        self._take_verdict(self.policy.judge(evidence, at, self.evals, self.opening), at)

    def _take_verdict(self, judged: Verdict, at: int) -> None:
        """Take a new judgment: a stop stays as it was reached until the run may continue."""
        before = self.verdict
        self.verdict = before if before.stops and judged.verdict is not Call.CONTINUE else judged
        if self.verdict.verdict is not before.verdict:
            self.changed.append(self.verdict)
            if self.suspect_step is None:
                self.suspect_step = at

    def _finish_verdict(self) -> Verdict:
        """The verdict at the latest step that could change it."""
        if self.postponed_at is not None:
            self._judge(self.postponed_at)
        return self.verdict if self.at is None else _move_to(self.verdict, self.at)

    def finish(self) -> MonitorState:
        """The state after all of them."""
        return MonitorState(
            tuple(self.states),
            tuple(self.evidence),
            self.calls,
            self.last,
            self.evals,
            self._finish_verdict(),
            self.suspect_step,
            self.eval_version,
            (),
            self.opening,
        )


class _GuardedJudging(_Judging):
    """The same for a run with critical evals: each has its own monitor.

    An eval is shown only to its monitor, everything else to all. The first monitor that calls for a stop determines the
    verdict; otherwise it is that of the watched score, unless that is `continue` and another suspects.
    """

    def add(self, item: Observation) -> None:
        policy = self.policy
        is_shared = item.role is not MetricRole.EVAL
        guarded = tuple(
            step(policy.guarding if index else policy.unguarded, one, item)[0]
            if is_shared or item.critical == index
            else one
            for index, one in enumerate(self.before.guarded)
        )
        self.before = replace(self.before, guarded=guarded)
        self.at, self.last = item.step, item.order if self.last is None else max(self.last, item.order)
        if not policy.keeps(self.verdict):
            calling = [index for index, one in enumerate(guarded) if one.verdict.verdict is Call.STOP]
            calling += [index for index, one in enumerate(guarded) if one.verdict.verdict is Call.SUSPECT]
            named = _name_critical(policy, guarded, calling[0] if calling else 0)
            self._take_verdict(_move_to(named, item.step), item.step)

    def finish(self) -> MonitorState:
        first, guarded = self.before.guarded[0], self.before.guarded
        verdict = self._finish_verdict()
        return replace(first, last=self.last, verdict=verdict, suspect_step=self.suspect_step, guarded=guarded)


def _move_to(verdict: Verdict, at: int) -> Verdict:
    """The verdict at a later step; a stop stays as it was reached."""
    if verdict.step == at or verdict.stops:
        return verdict
    return Verdict(verdict.verdict, at, verdict.turn_step, verdict.reason, verdict.evidence, verdict.critical)


def _name_critical(policy: Policy, guarded: Sequence[MonitorState], index: int) -> Verdict:
    verdict = guarded[index].verdict
    if index == 0:
        return verdict
    name = policy.critical[index - 1]
    return replace(verdict, critical=name, reason=f"critical eval {name}: {verdict.reason}")


def replay(policy: Policy, observations: Iterable[Observation]) -> MonitorState:
    """The state after a whole run, in any order; each (role, step) may occur once."""
    state, _ = advance(policy, start(policy), sorted(observations, key=lambda item: item.order))
    return state
