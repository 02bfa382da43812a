"""Policies weigh the evidence of their detectors and reach a verdict with a reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from evalstop_detectors.detectors.detector import Detector, EvalRequests, Evidence, Thresholds
from evalstop_detectors.observation import MetricRole, Observation
from evalstop_detectors.policy.catalog import Action, Call, Finding, Ground, GuardKind, Verdict
from evalstop_detectors.policy.opening import NO_EVALS, Opening
from evalstop_detectors.wording import format_count

LEVELLED_OFF_AT = 0.97
"""The covered share of its range from which a run has levelled off. On calibration seeds, of 0.83 to 0.99 the value
that saves the most evals for each gain lost."""


class Member(Struct, frozen=True, dict=True):
    """A detector, its thresholds in this policy, and the weight of its call.

    `id`: the member's name in the policy; None: the detector's name.
    """

    detector: Detector[Any]
    thresholds: Thresholds
    weight: float = 1.0
    id: str | None = None

    @property
    def sees_eval(self) -> bool:
        return MetricRole.EVAL in self.detector.roles

    @cached_property
    def roles(self) -> tuple[MetricRole, ...]:
        """The roles that its detector sees, in alphabetical order."""
        return tuple(sorted(self.detector.roles))

    @cached_property
    def levels(self) -> tuple[float | None, float | None]:
        """The evidence from which it suspects, and from which it calls for a stop."""
        return self.thresholds.suspect_at, self.thresholds.stop_at


Called = Sequence[tuple[Member, Evidence]]

_Shown = Mapping[MetricRole, tuple[tuple[int, Callable[[Any, Observation], tuple[Any, Evidence]]], ...]]


class _Calls(NamedTuple):
    """The members that call for a stop on each ground, and those that suspect or stop the run; with their evidence."""

    turned: list[tuple[Member, Evidence]]
    levelled: list[tuple[Member, Evidence]]
    alarmed: list[tuple[Member, Evidence]]


class Policy(Struct, frozen=True, dict=True):
    """A named composition of detectors.

    The policy stops when the weights of the members that call for a stop reach `at_least`, and suspects when those of
    the members that call for a suspicion or a stop reach `suspect_at_least`.
    `gate`: ids of members without whose call there is no stop, whatever the weights.
    `eval_required`: members that never see the eval role may raise a suspicion, but not stop a run by themselves.
    `min_evals`: no stop before this many finite evals; `warmup_steps`: none before this step.
    `stop_on`: the grounds on which it stops. By default, that a run has levelled off is only evidence. Members report
    it when the outlook of their evidence reaches `levelled_off_at`; all other conditions apply to each ground alike.
    `action`: what a stop verdict asks for. With a policy that parks it stands until the policy no longer suspects the
    run, and may then be reached again; with any other it is final. `stops_despite`: guards that do not put its stops on
    hold; they change no verdict. `evaluate_now`: when to ask for paired evaluations of runs that can answer; see
    `with_evaluator`. `guessed`: roles whose metric is only a guess. A call that rests on one may raise a suspicion, but
    not stop the run. Not part of the stored policy: see `with_guessed`. `critical`: evals that must not fall for good,
    whatever the watched score does; see `with_critical`. `observers`: members that see the run and are measured, but
    have no say: no verdict depends on them.

    A detector that never sees the eval score may only raise a suspicion:

    >>> from evalstop_detectors import Kind
    >>> from evalstop_detectors.detectors.k_decline import KDecline
    >>> eval_member = Member(KDecline(k=3), Thresholds(suspect_at=2.0, stop_at=3.0))
    >>> proxy_member = Member(KDecline(k=3, role=MetricRole.PROXY), Thresholds(suspect_at=2.0, stop_at=3.0))
    >>> policy = Policy("either", (eval_member, proxy_member))
    >>> quiet, loud = Evidence(Kind.COUNT, 0.0), Evidence(Kind.COUNT, 3.0, turn_step=7, note="3 declines")
    >>> [str(policy.judge(evidence, step=10, evals=10).verdict) for evidence in ([loud, quiet], [quiet, loud])]
    ['stop', 'suspect']
    """

    name: str
    members: tuple[Member, ...]
    at_least: float = 1.0
    eval_required: bool = True
    min_evals: int = 0
    warmup_steps: int = 0
    description: str = ""
    suspect_at_least: float = 1.0
    gate: tuple[str, ...] = ()
    stops_despite: tuple[GuardKind, ...] = ()
    stop_on: tuple[Ground, ...] = (Ground.TURNED,)
    levelled_off_at: float = LEVELLED_OFF_AT
    evaluate_now: EvalRequests | None = None
    guessed: frozenset[MetricRole] = frozenset()
    critical: tuple[str, ...] = ()
    action: Action = Action.STOP
    observers: tuple[Member, ...] = ()

    def with_evaluator(self, eval_share: float | None) -> Policy:
        """The policy for a run whose checkpoints are evaluated on request; itself if it asks for nothing.

        `eval_share`: the share of the run's time that one eval takes; 0 if unknown, None: there is no evaluator. It is
        rounded up to a power of two, so that few policies differ.
        """
        if eval_share is None or self.evaluate_now is None:
            return self
        share = min(2.0 ** math.ceil(math.log2(eval_share)), 1.0) if eval_share > 1e-6 else 0.0
        if share not in self._variants:
            asking = replace(self.evaluate_now, eval_share=share)
            members = tuple(replace(m, detector=m.detector.with_requests(asking)) for m in self.members)
            self._variants[share] = self if members == self.members else replace(self, members=members)
        return self._variants[share]

    @cached_property
    def asking(self) -> tuple[int, ...]:
        """The members that ask for paired evaluations, by index; none unless enabled by `with_evaluator`."""
        return tuple(
            index for index, member in enumerate(self.members) if getattr(member.detector, "requests", None) is not None
        )

    def with_guessed(self, guessed: Iterable[MetricRole]) -> Policy:
        """The policy for a run whose metrics of these roles are guesses; itself if nothing changes.

        >>> from evalstop_detectors import POLICIES, Kind
        >>> alarm = [Evidence(Kind.COUNT, 3.0, note="3 declines")]
        >>> POLICIES["paper"].with_guessed([MetricRole.EVAL]).judge(alarm, step=10, evals=10).reason
        'k_decline: 3 declines; no stop: the eval, or its direction, is guessed; confirm it to let it stop'
        """
        roles = frozenset(guessed)
        if roles == self.guessed:
            return self
        if roles not in self._variants:
            self._variants[roles] = replace(self, guessed=roles)
        return self._variants[roles]

    @cached_property
    def _variants(self) -> dict[float | frozenset[MetricRole], Policy]:
        """By share of an eval, or by guesses; shared by all such runs, so that what is derived from them is too."""
        return {}

    def with_critical(self, names: Sequence[str]) -> Policy:
        """The policy for a run with these critical evals: each must not turn, like the watched score. Itself if there
        are none, or if it does not stop runs that turn."""
        critical = tuple(names) if Ground.TURNED in self.stop_on else ()
        return self if critical == self.critical else replace(self, critical=critical)

    @cached_property
    def unguarded(self) -> Policy:
        """The policy that judges the watched score."""
        return replace(self, critical=())

    @cached_property
    def guarding(self) -> Policy:
        """The policy that judges a critical eval."""
        return replace(self, critical=(), stop_on=(Ground.TURNED,), observers=())

    @cached_property
    def unobserved(self) -> Policy:
        """The policy without its observers: the same verdicts at a lower cost."""
        return replace(self, observers=()) if self.observers else self

    @cached_property
    def deciding_roles(self) -> frozenset[MetricRole]:
        """The roles that any member with a say watches, and the eval score, whose values the policy itself counts."""
        return frozenset({MetricRole.EVAL}).union(*(member.detector.roles for member in self.members))

    @cached_property
    def roles(self) -> frozenset[MetricRole]:
        """The roles that are watched: `deciding_roles`, those that only observers see, and the learning rate."""
        return self.deciding_roles.union({MetricRole.LEARNING_RATE}, *(item.detector.roles for item in self.observers))

    @cached_property
    def shows_rates(self) -> bool:
        """Whether a detector sees the learning rate, which otherwise only tells when the warm-up is over."""
        return any(MetricRole.LEARNING_RATE in member.detector.roles for member in (*self.members, *self.observers))

    @cached_property
    def stopping_roles(self) -> frozenset[MetricRole]:
        """The roles of the members that can call for a stop, and the eval score if it is required."""
        levels = Ground.LEVELLED_OFF in self.stop_on
        members = [m for name, m in zip(self.ids, self.members, strict=True) if m.weight or name in self.gate]
        calling = (m for m in members if m.thresholds.stop_at is not None or (levels and m.detector.has_outlook))
        required = (MetricRole.EVAL,) if self.eval_required else ()
        return frozenset(required).union(*(m.detector.roles for m in calling))

    @cached_property
    def shown(self) -> _Shown:
        """For each of `roles` the members that see it: index, and the detector's `step`."""
        return self._list_shown(self.members)

    @cached_property
    def shown_to_observers(self) -> _Shown:
        """The same of observers."""
        return self._list_shown(self.observers)

    def _list_shown(self, members: Sequence[Member]) -> _Shown:
        return {
            role: tuple((index, member.detector.step) for index, member in enumerate(members) if role in member.roles)
            for role in self.roles
        }

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """The name of each member: its id, or its detector's name, numbered from the second of that name on."""
        return member_ids([(member.id, member.detector.name) for member in self.members])

    @cached_property
    def panel(self) -> dict[str, Member]:
        """All members by name, those with a say first: their names do not depend on observers."""
        named = [(name, name) for name in self.ids] + [(item.id, item.detector.name) for item in self.observers]
        return dict(zip(member_ids(named), (*self.members, *self.observers), strict=True))

    @cached_property
    def stop_levels(self) -> tuple[float | None, ...]:
        """The evidence from which each member of `panel` calls for a stop; None: never."""
        return tuple(member.thresholds.stop_at for member in self.panel.values())

    @cached_property
    def alarm_levels(self) -> tuple[tuple[float, float], ...]:
        """For each member the values from which its evidence, and its outlook, can call for anything."""
        return tuple(
            (min(stop, math.inf if member.thresholds.suspect_at is None else member.thresholds.suspect_at), outlook)
            for member, (stop, outlook) in zip(self.members, self.stopping_levels, strict=True)
        )

    @cached_property
    def stopping_levels(self) -> tuple[tuple[float, float], ...]:
        """For each member the values from which its evidence, and its outlook, can call for a stop."""
        outlook = self.levelled_off_at if Ground.LEVELLED_OFF in self.stop_on else math.inf
        levels = (member.thresholds.stop_at for member in self.members)
        return tuple((math.inf if level is None else level, outlook) for level in levels)

    @cached_property
    def suspects_on_any_alarm(self) -> bool:
        """Whether the alarm of a single member, whichever it is, makes the run at least suspect."""
        return Ground.LEVELLED_OFF not in self.stop_on and all(
            member.weight and member.weight >= self.suspect_at_least for member in self.members
        )

    def alarms(self, member: int, evidence: Evidence | None) -> bool:
        """Whether the evidence of a member, by its index, can call for anything; if none does, the verdict is
        `continue`."""
        if evidence is None:
            return False
        level, outlook_level = self.alarm_levels[member]
        return evidence.value >= level or (evidence.outlook is not None and evidence.outlook.reaches(outlook_level))

    def keeps(self, verdict: Verdict) -> bool:
        """Whether the verdict is final."""
        return verdict.stops and self.action is Action.STOP

    def judge(self, evidence: Sequence[Evidence | None], step: int, evals: int, opening: Opening = NO_EVALS) -> Verdict:
        """The verdict for one evidence per member (None: that member has seen nothing), after `evals` finite evals.
        While the `opening` lasts it holds the first of them.

        1. Find the members that call for a stop, on each ground, and those that are alarmed.
        2. Stop on the first ground on which enough of them call for it and nothing holds the stop back.
        3. Suspect if a stop was held back, or if enough members are alarmed.
        """
        findings = self._list_findings(evidence)
        calls = self._find_calls(evidence)
        enough, held_back, alarmed, suspected = False, None, calls.alarmed, Ground.TURNED
        for ground, stopping in ((Ground.TURNED, calls.turned), (Ground.LEVELLED_OFF, calls.levelled)):
            if not stopping or ground not in self.stop_on:
                continue
            is_enough = _reaches(stopping, self.at_least)
            objection = self._held_back(is_enough, stopping, evidence, step, evals)
            if objection is None and not self._suffices_at_first(stopping):
                objection = opening.explain_wait()
            if objection is None and self.guessed:
                objection = self._doubt(stopping)
            if objection is None:
                return Verdict(Call.STOP, step, _turn(stopping), _describe_alarms(stopping, ground), findings, ground)
            held_back = held_back or objection
            if is_enough and not alarmed:
                alarmed, suspected = calls.levelled, ground
            enough = enough or is_enough
        if enough or (alarmed and _reaches(alarmed, self.suspect_at_least)):
            reason = _describe_alarms(alarmed, suspected) + (f"; no stop: {held_back}" if held_back else "")
            return Verdict(Call.SUSPECT, step, _turn(alarmed), reason, findings)
        return Verdict(Call.CONTINUE, step, None, self._quiet(alarmed), findings)

    def _list_findings(self, evidence: Sequence[Evidence | None]) -> tuple[Finding, ...]:
        """The evidence of each member that has any, then its outlooks."""
        seen = [(member, item) for member, item in zip(self.members, evidence, strict=True) if item is not None]
        levelled_off_at = self.levelled_off_at if Ground.LEVELLED_OFF in self.stop_on else None
        findings = [Finding(m.detector.name, m.roles, e.kind, e.value, *m.levels, e.turn_step, e.note) for m, e in seen]
        outlooks = [
            Finding(Ground.LEVELLED_OFF, m.roles, o.kind, o.value, None, levelled_off_at, o.turn_step, o.note)
            for m, e in seen
            if (o := e.outlook) is not None
        ]
        return (*findings, *outlooks)

    def _find_calls(self, evidence: Sequence[Evidence | None]) -> _Calls:
        calls = _Calls([], [], [])
        for member, item in zip(self.members, evidence, strict=True):
            if item is None or not member.weight:
                continue
            suspect_at, stop_at = member.levels
            if item.reaches(stop_at):
                calls.turned.append((member, item))
            if item.reaches(stop_at) or item.reaches(suspect_at):
                calls.alarmed.append((member, item))
            if item.outlook is not None and item.outlook.reaches(self.levelled_off_at):
                calls.levelled.append((member, item.outlook))
        return calls

    def _quiet(self, alarmed: Called) -> str:
        if alarmed:
            weight = _weight(alarmed)
            return f"the detectors that are alarmed weigh {weight:g} of the {self.suspect_at_least:g} needed to suspect"
        return "no detector calls for a stop"

    def _held_back(
        self, enough: bool, stopping: Called, evidence: Sequence[Evidence | None], step: int, evals: int
    ) -> str | None:
        if not enough:
            return f"the detectors that call for one weigh {_weight(stopping):g} of the {self.at_least:g} needed"
        if self.eval_required and not any(member.sees_eval for member, _ in stopping):
            return "there is no evidence from the eval score"
        if closed := self._closed(evidence):
            return f"{closed} must also call for one, but does not"
        if evals < self.min_evals:
            return f"the run has {format_count(evals, 'eval')} of the {self.min_evals} needed"
        if step < self.warmup_steps:
            return f"the warm-up lasts until step {self.warmup_steps}"
        return None

    def _suffices_at_first(self, stopping: Called) -> bool:
        firm = [(member, item) for member, item in stopping if member.detector.judges_first_evals]
        return bool(firm) and _reaches(firm, self.at_least)

    def _doubt(self, stopping: Called) -> str | None:
        """Why members that call for a stop are denied it: too few do so without a guessed role."""
        firm = [(member, item) for member, item in stopping if not self.guessed.intersection(member.roles)]
        enough = bool(firm) and _reaches(firm, self.at_least)
        sees_eval = not self.eval_required or any(member.sees_eval for member, _ in firm)
        gate = [member for name, member in zip(self.ids, self.members, strict=True) if name in self.gate]
        if enough and sees_eval and not any(self.guessed.intersection(member.roles) for member in gate):
            return None
        called = {role for member, _ in stopping for role in member.roles} | {r for m in gate for r in m.roles}
        names = " and the ".join(sorted(self.guessed & called))
        return f"the {names}, or its direction, is guessed; confirm it to let it stop"

    def _closed(self, evidence: Sequence[Evidence | None]) -> str | None:
        """The first member of the gate that does not call for a stop."""
        if not self.gate:
            return None
        for name, member, item in zip(self.ids, self.members, evidence, strict=True):
            if name in self.gate and (item is None or not item.reaches(member.thresholds.stop_at)):
                return name
        return None


def member_ids(members: Sequence[tuple[str | None, str]]) -> tuple[str, ...]:
    """The id of each member, given its own (if it has one) and its detector's name; its own ids stay unchanged."""
    used_ids = {own_id for own_id, _ in members if own_id is not None}
    ids = []
    for own_id, detector in members:
        name, number = own_id or detector, 1
        while own_id is None and name in used_ids:
            number += 1
            name = f"{detector}-{number}"
        used_ids.add(name)
        ids.append(name)
    return tuple(ids)


def _weight(called: Called) -> float:
    return math.fsum(member.weight for member, _ in called)


def _reaches(called: Called, needed: float) -> bool:
    # Weights such as 0.7 and 0.1 add up to slightly less than 0.8.
    return _weight(called) >= needed * (1 - 1e-9)


def _turn(alarmed: Called) -> int | None:
    return min((e.turn_step for _, e in alarmed if e.turn_step is not None), default=None)


def _describe_alarms(alarmed: Called, ground: Ground = Ground.TURNED) -> str:
    notes = "; ".join(f"{member.detector.name}: {evidence.note}" for member, evidence in alarmed)
    return f"levelled off: {notes}" if ground is Ground.LEVELLED_OFF else notes
