"""Fills a project with example runs as if it had been in use for two months.

The runs are in a file of this package that `evalstop_lab.worlds.example_runs` writes. They go through the same
functions as real runs, with a simulated clock, so that decisions, hold-outs, outcomes and cases arise as usual. A small
script plays people and receivers; one seed determines its random choices.

    opened ──> posted, a few evals at a time ──> finished ──> judged, sometimes
                     └── decided ──> vetoed, or acknowledged ──> confirmed ──> judged, often

The policy `three-declines` must earn its rollout stage: the service proposes canary, an admin confirms, and the policy
is demoted when its stops turn out to be wrong.
"""

from __future__ import annotations

import argparse
import heapq
import logging
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from itertools import count
from uuid import UUID

from evalstop_detectors.wording import format_percent

from evalstop_service import configuration
from evalstop_service.cli.command import OK, Add, Subcommands, tell
from evalstop_service.cli.demo_runs import (
    DAYS,
    EVALS_A_POST,
    FIRST,
    TRIED,
    Story,
    choose_stories,
    patient_policy,
    tried_policy,
)
from evalstop_service.clock import utc_now
from evalstop_service.decisions import commands, deadlines, second_person, stale_runs, veto_windows
from evalstop_service.domain.decision_lifecycle import SERVICE, DecisionState, Mode, Reported, Vetoed
from evalstop_service.domain.run import MetricFields
from evalstop_service.domain.statuses import DecisionOutcome, Stage
from evalstop_service.errors import Conflict
from evalstop_service.evaluation import rollout_stage
from evalstop_service.ingest import (
    CheckpointSaved,
    Committer,
    Content,
    Message,
    Observations,
    RunCache,
    open_run,
    running_in_thread,
)
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.projects import api_keys, policies, project_settings
from evalstop_service.projects.project_settings import NewProject, ProjectChange
from evalstop_service.settings import Settings
from evalstop_service.store import audit, decisions, hand_overs, projects, proposals, run_lists, runs, schema
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database
from evalstop_service.store.decisions import Decision
from evalstop_service.store.projects import Project

GRACE_SECONDS = 900.0
SEED = 6
TICK = timedelta(hours=6)
"""How often the worker's periodic jobs run."""

FILLED = "project.examples_added"
"""The audit log entry that marks the project as completely filled."""

METRICS: dict[str, MetricFields] = {
    "reward/gold": {"role": "eval", "direction": "maximize"},
    "reward/proxy": {"role": "proxy", "direction": "maximize"},
    "policy/kl": {"role": "kl", "direction": "minimize"},
}

SETTINGS = ProjectChange(
    default_mode=Mode.ENFORCE,
    max_mode=Mode.ENFORCE,
    veto_window_seconds=GRACE_SECONDS,
    held_out_share=0.3,
    price_per_gpu_hour=2.5,
    stale_seconds=4 * 3600.0,
)

PEOPLE, RECEIVER = ("dana", "kim", "lee"), "evalstop-receiver slurm"

TRIED_TERMS = {"required_precision": 0.6, "canary_share": 0.2}
"""Terms of the policy on trial: the precision it must show, and the share of its stops carried out in canary."""

Tell = Callable[[int, int], None]
"""Reports progress: how much is done, of how much."""


def add_to(commands: Subcommands, add: Add) -> None:
    """Add `demo-data`."""
    filling = add(commands, "demo-data", demo_data)
    filling.add_argument(
        "--project",
        default=api_keys.FIRST_PROJECT,
        metavar="NAME",
        help="a project without runs, or a new one (default: %(default)s)",
    )
    filling.add_argument(
        "--runs", type=int, metavar="N", help="number of example runs, at least 13 (default: all, some 300)"
    )


def demo_data(settings: Settings, options: argparse.Namespace) -> int:
    """Fill a project with some 300 example runs from two months, to explore the dashboard."""
    logging.getLogger("evalstop_service").setLevel(logging.ERROR)  # the demo would log two months of events
    database = configuration.create_database(settings.model_copy(update={"sqlite_synchronous": "NORMAL"}))
    schema.upgrade_schema(database)
    show_progress = None if options.json or not sys.stderr.isatty() else _bar
    filled = fill(database, options.project, utc_now(), show_progress or (lambda _done, _of: None), options.runs)
    database.close()
    if show_progress is not None:
        print(file=sys.stderr)
    text = "is already filled" if filled is None else f"has {filled} example runs; `evalstop up` shows them"
    tell(options, {"project": options.project, "runs": filled or 0}, f"the project {options.project} {text}")
    return OK


def _bar(done: int, of: int) -> None:
    share = done / of if of else 1.0
    print(f"\r[{'#' * int(40 * share):40}] {format_percent(share):>5}", end="", file=sys.stderr, flush=True)


@dataclass
class Script:
    """Scheduled events in order of time, and the state so far."""

    database: Database
    project: Project
    now: datetime
    chance: random.Random
    committer: Committer = field(init=False)
    at: datetime = field(init=False)
    waiting: list[tuple[datetime, int, Callable[[datetime], None]]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.at = self.now
        self.committer = Committer(self.database, RunCache(), lambda: self.at, ServiceMetrics())

    def schedule(self, at: datetime, do: Callable[[datetime], None]) -> None:
        """Schedule a call, unless its time is in the future."""
        if at <= self.now:
            heapq.heappush(self.waiting, (at, next(self.numbers), do))

    def play(self, tell: Tell) -> None:
        """Run all scheduled calls in order."""
        start = None
        while self.waiting:
            at, _, do = heapq.heappop(self.waiting)
            start = start or at
            with suppress(Conflict):  # an action came too late: the run has ended meanwhile
                self.at = at
                do(at)
            tell(int((at - start) / timedelta(minutes=1)), int((self.now - start) / timedelta(minutes=1)))

    def begin(self, story: Story) -> None:
        """Schedule the opening, the posts and the end of a run."""
        self.schedule(story.begins_at, partial(self._open_run, story))
        length = len(story.example.steps)
        for first in range(0, length if story.silent_after is None else story.silent_after, EVALS_A_POST):
            evals = range(first, min(first + EVALS_A_POST, length))
            self.schedule(story.at(evals[-1]), partial(self._post_evals, story, evals))
        if story.silent_after is None:
            self.schedule(story.at(length), partial(self._end_run, story))

    def tick(self, at: datetime) -> None:
        """Run the worker's periodic jobs."""
        while veto_windows.request_stops(self.database, at, lambda _: at):
            pass
        deadlines.process_overdue(self.database, at)
        while stale_runs.check_due_runs(self.database, at):
            pass
        rollout_stage.review_rollout_stage(self.database, self.project.id, TRIED, at)
        with self.database.reading() as tx:
            proposed = proposals.list_open(tx, self.project.id, at, [TRIED])
        for proposal in proposed:
            if proposal.argument == Stage.CANARY:  # `enforce` is left unconfirmed
                self.schedule(at + TICK / 2, partial(self._confirm_proposal, proposal.id))

    def try_policy(self, at: datetime) -> None:
        """Add a policy and start it in shadow, to earn its rollout stage."""
        author = Author(self.project.id, PEOPLE[0], at)
        with self.database.transaction() as tx:
            version = policies.create_policy(tx, author, tried_policy()).version
            rollout_stage.set_rollout_stage(tx, self.project.id, TRIED, version, **TRIED_TERMS, now=at)
            author.record(tx, "rollout_stage.set", f"policy {TRIED}", TRIED_TERMS)

    def _confirm_proposal(self, proposal_id: UUID, at: datetime) -> None:
        author = Author(self.project.id, PEOPLE[0], at)
        second_person.confirm_proposal(self.database, author, proposal_id, "its recorded stops were right")

    def _open_run(self, story: Story, at: datetime) -> None:
        terms = open_run.OpenRequest(
            story.name,
            METRICS,
            labels=story.labels,
            policy=story.policy,
            mode=Mode(story.mode),
            total_steps=story.example.steps[-1],
        )
        story.run, _ = open_run.open_run(self.database, self.project.id, terms, at)

    def _post_evals(self, story: Story, evals: range, at: datetime) -> None:
        run, example = story.run, story.example
        if run is None or story.over:
            return
        points = tuple(point for index in evals for point in example.list_observations(index))
        contents: list[Content] = [Observations(points)]
        if story.saves:
            last = example.steps[evals[-1]]
            contents.insert(0, CheckpointSaved(last, f"s3://checkpoints/{story.name}/step-{last:06d}"))
        for content in contents:
            receipt = self.committer.submit_and_wait(Message(self.project.id, run.id, content))
            if receipt.decision is not None and not story.decided:
                story.decided = True
                self._schedule_reactions(story, receipt.decision)

    def _schedule_reactions(self, story: Story, decision: Decision) -> None:
        """Schedule the reactions of people and receivers to a decision."""
        if decision.state != DecisionState.PENDING:
            return
        number = self.chance.random()
        if number < 0.06:
            why = self.chance.choice(("a known dip: the curriculum changed", "the run is needed for a comparison"))
            at = decision.created_at + timedelta(minutes=self.chance.uniform(2, 12))
            self.schedule(at, partial(self._veto_decision, decision, why))
        elif number < 0.95:  # no receiver hears of the others
            acknowledged_at = decision.due_at + timedelta(seconds=self.chance.uniform(2, 30))
            gone_at = acknowledged_at + timedelta(seconds=self.chance.uniform(20, 600))
            acknowledged = (DecisionState.ACKNOWLEDGED, "the job is being ended")
            self.schedule(acknowledged_at, partial(self._report_state, decision, *acknowledged))
            end = (DecisionState.CONFIRMED, "the job is gone")
            if number > 0.92:
                end = (DecisionState.FAILED, "scancel was refused")
            self.schedule(gone_at, partial(self._report_gone, story, decision, end))

    def _veto_decision(self, decision: Decision, why: str, at: datetime) -> None:
        command = Vetoed(at, self.chance.choice(PEOPLE), why)
        commands.apply_command(self.database, self.project.id, decision.id, command)

    def _report_state(self, decision: Decision, state: DecisionState, reason: str, at: datetime) -> None:
        # Its veto window ended between two ticks of the worker.
        veto_windows.request_stops(self.database, at, lambda _: at)
        with self.database.transaction() as tx:
            run = runs.load_run(tx, self.project.id, decision.run_id)
            hand_overs.try_hand_over(tx, run, decision, RECEIVER, at)
        report = Reported(at, state, RECEIVER, reason, {"job": str(4000 + decision.step)})
        commands.record_report(self.database, self.project.id, decision.id, report)

    def _report_gone(self, story: Story, decision: Decision, end: tuple[DecisionState, str], at: datetime) -> None:
        self._report_state(decision, *end, at)
        if end[0] is DecisionState.CONFIRMED:
            story.over = True
            if self.chance.random() < 0.7:
                later = at + timedelta(hours=self.chance.uniform(1, 40))
                self.schedule(later, partial(self._label_outcome, story, decision))

    def _end_run(self, story: Story, at: datetime) -> None:
        if story.run is None or story.over:
            return
        status = "failed" if self.chance.random() < 0.05 else "completed"
        commands.finish_run(self.database, self.project.id, story.run.id, status, at)
        decision = self._find_decision(story)
        if self.chance.random() < (0.15 if decision is None else 0.9):
            later = at + timedelta(hours=self.chance.uniform(1, 40))
            self.schedule(later, partial(self._label_outcome, story, decision))

    def _find_decision(self, story: Story) -> Decision | None:
        assert story.run is not None
        with self.database.reading() as tx:
            return decisions.find_decision_of_attempt(tx, story.run.id, 1)

    def _label_outcome(self, story: Story, decision: Decision | None, at: datetime) -> None:
        """A person labels the outcome; sometimes the label is `unknown`."""
        assert story.run is not None
        peak, turned = story.example.peak_step, story.example.turned
        outcome_label: tuple[str, int | None, str] = ("unknown", None, "the samples look alike to me")
        if turned is False:
            outcome_label = (
                ("right", None, "it went on getting better") if decision is None else ("wrong", None, "it was a dip")
            )
        elif turned is True and peak is not None and self.chance.random() < 0.95:
            right = decision is not None and decision.step >= peak
            outcome_label = ("right", peak, "the answers got worse") if right else ("wrong", peak, "look at gold")
        outcome, turn_step, note = outcome_label
        label = commands.Label(DecisionOutcome(outcome), turn_step, note, self.chance.choice(PEOPLE), at)
        commands.label_run(self.database, self.project.id, story.run.id, label)


def fill(
    database: Database, name: str, now: datetime, tell: Tell = lambda _done, _of: None, most: int | None = None
) -> int | None:
    """Fill the project of this name up to now, creating it if needed; returns how many runs were added.

    `most`: how many examples, at least those still running; None: all. Returns None, and changes nothing, if the
    project is already filled. Raises Conflict if the project has other runs, or if filling it was interrupted: that can
    be neither continued nor undone.
    """
    chance = random.Random(SEED)
    begins_at = now - timedelta(days=DAYS)
    with database.reading() as tx:
        project = projects.find_project_by_name(tx, name)
        if project is not None and audit.list_entries(tx, project.id, action=FILLED, limit=1):
            return None
        if project is not None and runs.find_run_by_name(tx, project.id, FIRST) is not None:
            raise Conflict(
                f"filling the project {name!r} was interrupted, or is in progress; fill another with `--project NAME`, "
                "or remove an embedded database that holds nothing else (its folder, .evalstop) and start again"
            )
        if project is not None and run_lists.list_runs(tx, project.id, limit=1):
            raise Conflict(f"the project {name!r} already has runs; name another project, or a new one")
    if project is None:
        project = project_settings.create_project(database, NewProject(name=name), SERVICE, begins_at)
    with database.transaction() as tx:
        project = project_settings.apply_change(tx, Author(project.id, SERVICE, begins_at), SETTINGS)
    script = Script(database, project, now, chance)
    for days, k in ((0, 5), (30, 7)):
        script.schedule(begins_at + timedelta(days=days), partial(_add_patient, database, project.id, k))
    script.schedule(begins_at, script.try_policy)
    script.schedule(now - timedelta(hours=1), partial(_hold_out_few, database, project.id))  # enough is measured
    stories = choose_stories(chance, now, most)
    for story in stories:
        script.begin(story)
    for number in range(1, int((now - begins_at) / TICK)):
        script.schedule(begins_at + number * TICK, script.tick)
    script.schedule(now, script.tick)
    with running_in_thread(script.committer):
        script.play(tell)
    with database.transaction() as tx:
        audit.record_action(tx, project.id, SERVICE, FILLED, f"project {name}", {"runs": len(stories)}, now)
    return len(stories)


def _hold_out_few(database: Database, project_id: UUID, at: datetime) -> None:
    with database.transaction() as tx:
        project_settings.apply_change(tx, Author(project_id, PEOPLE[0], at), ProjectChange(held_out_share=0.02))


def _add_patient(database: Database, project_id: UUID, k: int, at: datetime) -> None:
    with database.transaction() as tx:
        policies.create_policy(tx, Author(project_id, PEOPLE[0], at), patient_policy(k))
