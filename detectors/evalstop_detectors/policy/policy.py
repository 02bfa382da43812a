"""Policies weigh the evidence of their detectors and reach a verdict with a reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from evalstop_detectors.detectors.detector import Detector, EvalRequests, Evidence, Thresholds
from evalstop_detectors.observation import MetricRole, Observation
from evalstop_detectors.policy.catalog import OUTLOOK, Action, Call, Finding, GuardKind, Verdict
from evalstop_detectors.policy.opening import NO_EVALS, Opening
from evalstop_detectors.wording import format_count


class Member(Struct, frozen=True, dict=True):
    """A detector and its thresholds in this policy. `id`: the member's name in it; None: the detector's name."""

    detector: Detector[Any]
    thresholds: Thresholds
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

    @cached_property
    def alarm_level(self) -> float:
        """The evidence from which it calls for suspicion or a stop."""
        return min((level for level in self.levels if level is not None), default=math.inf)


Called = Sequence[tuple[Member, Evidence]]

_Shown = Mapping[MetricRole, tuple[tuple[int, Callable[[Any, Observation], tuple[Any, Evidence]]], ...]]


class Policy(Struct, frozen=True, dict=True):
    """A named composition of detectors.

    The policy stops when `at_least` so many members call for a stop, and suspects when any calls for either.
    `eval_required`: members that never see the eval role may raise a suspicion, but not stop a run by themselves.
    `min_evals`: no stop before this many finite evals.
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
    at_least: int = 1
    eval_required: bool = True
    min_evals: int = 0
    description: str = ""
    stops_despite: tuple[GuardKind, ...] = ()
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
        are none."""
        critical = tuple(names)
        return self if critical == self.critical else replace(self, critical=critical)

    @cached_property
    def unguarded(self) -> Policy:
        """The policy that judges the watched score."""
        return replace(self, critical=())

    @cached_property
    def guarding(self) -> Policy:
        """The policy that judges a critical eval."""
        return replace(self, critical=(), observers=())

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
        calling = (member for member in self.members if member.thresholds.stop_at is not None)
        required = (MetricRole.EVAL,) if self.eval_required else ()
        return frozenset(required).union(*(m.detector.roles for m in calling))

    @cached_property
    def shown(self) -> _Shown:
        """For each of `roles` the members of `panel` that see it: index, and the detector's `step`."""
        # Observers come first: `focus` estimates the noise before it adds an eval, which saves sorting it anew.
        numbered, deciding = list(enumerate(self.panel.values())), len(self.members)
        members = numbered[deciding:] + numbered[:deciding]
        return {
            role: tuple((index, member.detector.step) for index, member in members if role in member.roles)
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

    def keeps(self, verdict: Verdict) -> bool:
        """Whether the verdict is final."""
        return verdict.stops and self.action is Action.STOP

    def judge(self, evidence: Sequence[Evidence | None], step: int, evals: int, opening: Opening = NO_EVALS) -> Verdict:
        """The verdict for one evidence per member (None: that member has seen nothing), after `evals` finite evals.
        While the `opening` lasts it holds the first of them.

        1. Find the members that call for suspicion at least, and those of them that call for a stop.
        2. Stop if enough call for it and nothing holds the stop back.
        3. Suspect if a stop was held back, or if any member is alarmed.
        """
        seen = [(member, item) for member, item in zip(self.members, evidence, strict=True) if item is not None]
        alarmed = [(member, item) for member, item in seen if item.value >= member.alarm_level]
        findings = _list_findings(seen)
        if not alarmed:
            return Verdict(Call.CONTINUE, step, None, "no detector calls for a stop", findings)
        stopping = [(member, item) for member, item in alarmed if item.reaches(member.thresholds.stop_at)]
        objection = self._find_objection(stopping, evals, opening) if stopping else ""
        if objection is None:
            return Verdict(Call.STOP, step, _turn(stopping), _describe_alarms(stopping), findings)
        reason = _describe_alarms(alarmed) + (f"; no stop: {objection}" if objection else "")
        return Verdict(Call.SUSPECT, step, _turn(alarmed), reason, findings)

    def _find_objection(self, stopping: Called, evals: int, opening: Opening) -> str | None:
        """Why the run is not stopped although these members call for it; None: it is."""
        if len(stopping) < self.at_least:
            return f"{len(stopping)} of the {self.at_least} detectors needed call for one"
        if self.eval_required and not any(member.sees_eval for member, _ in stopping):
            return "there is no evidence from the eval score"
        if evals < self.min_evals:
            return f"the run has {format_count(evals, 'eval')} of the {self.min_evals} needed"
        firm = [member for member, _ in stopping if member.detector.judges_first_evals]
        if len(firm) < self.at_least and (wait := opening.explain_wait()):
            return wait
        return self._explain_guessed_roles(stopping) if self.guessed else None

    def _explain_guessed_roles(self, stopping: Called) -> str | None:
        """Why members that call for a stop are denied it: too few do so without a guessed role."""
        firm = [member for member, _ in stopping if not self.guessed.intersection(member.roles)]
        if len(firm) >= self.at_least and (not self.eval_required or any(member.sees_eval for member in firm)):
            return None
        called = {role for member, _ in stopping for role in member.roles}
        names = " and the ".join(sorted(self.guessed & called))
        return f"the {names}, or its direction, is guessed; confirm it to let it stop"


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


def _list_findings(seen: Called) -> tuple[Finding, ...]:
    """The evidence of these members, then its outlooks."""
    findings = [Finding(m.detector.name, m.roles, e.kind, e.value, *m.levels, e.turn_step, e.note) for m, e in seen]
    outlooks = [
        Finding(OUTLOOK, m.roles, o.kind, o.value, None, None, o.turn_step, o.note)
        for m, e in seen
        if (o := e.outlook) is not None
    ]
    return (*findings, *outlooks)


def _turn(alarmed: Called) -> int | None:
    return min((e.turn_step for _, e in alarmed if e.turn_step is not None), default=None)


def _describe_alarms(alarmed: Called) -> str:
    return "; ".join(f"{member.detector.name}: {evidence.note}" for member, evidence in alarmed)
