"""Living pages for a newcomer: a project is filled with example runs as if two months had gone by.

The runs are packed beside this module, drawn and recorded by the lab (`evalstop-lab example-runs`). They are told to
the service by the functions that everybody uses, with a clock of their own, so that decisions, chance, outcomes and
cases come about as they always do. People and receivers are played by a small script; all of its chance is in one seed.

    opened ──> posted, a few evals at a time ──> finished ──> judged, sometimes
                     └── decided ──> vetoed, or acknowledged ──> confirmed ──> judged, often

The policy `paper` has to earn its rollout stage: the service proposes canary, an admin promotes it, and it is demoted
when its stops turn out to be wrong.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from itertools import count
from uuid import UUID

from evalstop_service.cli.demo_runs import DAYS, EVALS_A_POST, FIRST, TRIED, Story, choose_stories, patient_policy
from evalstop_service.decisions import commands, deadlines, second_person, stale_runs
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
from evalstop_service.projects import policies, project_settings
from evalstop_service.projects.project_settings import NewProject, ProjectChange
from evalstop_service.rules.decision_lifecycle import SERVICE, DecisionState, Mode, Reported, Vetoed
from evalstop_service.rules.role_recognition import MetricFields
from evalstop_service.rules.statuses import DecisionOutcome, Stage
from evalstop_service.store import audit, decisions, projects, proposals, run_lists, runs
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database
from evalstop_service.store.decisions import Decision
from evalstop_service.store.projects import Project

GRACE_SECONDS = 900.0
SEED = 6
TICK = timedelta(hours=6)
"""How often the chores of a worker are done."""

FILLED = "project.filled"
"""The entry of the audit log that says that no example run is missing."""

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
"""Of the policy that is tried: what it has to show, and the share of its stops that are carried out in canary."""

Tell = Callable[[int, int], None]
"""Is told how much is done, of how much."""


@dataclass
class Script:
    """What happens when, in the order of time, and what has happened so far."""

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
        """Have something happen, unless its time has not come yet."""
        if at <= self.now:
            heapq.heappush(self.waiting, (at, next(self.numbers), do))

    def play(self, tell: Tell) -> None:
        """Have everything happen that is due by now."""
        begun = None
        while self.waiting:
            at, _, do = heapq.heappop(self.waiting)
            begun = begun or at
            with suppress(Conflict):  # somebody comes too late: the run has ended meanwhile
                self.at = at
                do(at)
            tell(int((at - begun) / timedelta(minutes=1)), int((self.now - begun) / timedelta(minutes=1)))

    def begin(self, story: Story) -> None:
        """Have a run be opened, posted to and finished."""
        self.schedule(story.begins_at, partial(self._open, story))
        length = len(story.example.steps)
        for first in range(0, length if story.silent_after is None else story.silent_after, EVALS_A_POST):
            some = range(first, min(first + EVALS_A_POST, length))
            self.schedule(story.at(some[-1]), partial(self._post, story, some))
        if story.silent_after is None:
            self.schedule(story.at(length), partial(self._finish, story))

    def tick(self, at: datetime) -> None:
        """Do what a worker does now and then."""
        with self.database.transaction() as tx:
            decisions.request_due_decisions(tx, at)
        deadlines.process_overdue(self.database, at)
        while stale_runs.check_due_runs(self.database, at):
            pass
        rollout_stage.review_rollout_stage(self.database, self.project.id, TRIED, at)
        with self.database.reading() as tx:
            proposed = proposals.list_open(tx, self.project.id, at)
        for proposal in proposed:
            if proposal.argument == Stage.CANARY:  # with all of its stops nobody wants to trust it yet
                self.schedule(at + TICK / 2, partial(self._promote, proposal.id))

    def try_policy(self, at: datetime) -> None:
        """Have a policy earn its rollout stage from shadow on."""
        author = Author(self.project.id, PEOPLE[0], at)
        with self.database.transaction() as tx:
            version = policies.find_version(tx, self.project.id, TRIED)
            assert version is not None, "it is shipped"
            rollout_stage.set_rollout_stage(tx, self.project.id, TRIED, version.version, **TRIED_TERMS, now=at)
            author.record(tx, "rollout_stage.set", f"policy {TRIED}", TRIED_TERMS)

    def _promote(self, proposal_id: UUID, at: datetime) -> None:
        author = Author(self.project.id, PEOPLE[0], at)
        second_person.confirm_proposal(self.database, author, proposal_id, "its recorded stops were right")

    def _open(self, story: Story, at: datetime) -> None:
        terms = open_run.OpenRequest(
            story.name,
            METRICS,
            labels=story.labels,
            policy=story.policy,
            mode=Mode(story.mode),
            total_steps=story.example.steps[-1],
        )
        story.run, _ = open_run.open_run(self.database, self.project.id, terms, at)

    def _post(self, story: Story, some: range, at: datetime) -> None:
        run, example = story.run, story.example
        if run is None or story.over:
            return
        contents: list[Content] = [
            Observations(tuple(point for index in some for point in example.list_observations(index)))
        ]
        if story.saves:
            last = example.steps[some[-1]]
            contents.insert(0, CheckpointSaved(last, f"s3://checkpoints/{story.name}/step-{last:06d}"))
        for content in contents:
            receipt = self.committer.submit_and_wait(Message(self.project.id, run.id, content))
            if receipt.decision is not None and not story.decided:
                story.decided = True
                self._react(story, receipt.decision)

    def _react(self, story: Story, decision: Decision) -> None:
        """What people and receivers make of a decision."""
        if decision.state != DecisionState.PENDING:
            return
        number = self.chance.random()
        if number < 0.06:
            why = self.chance.choice(("a known dip: the curriculum changed", "the run is needed for a comparison"))
            at = decision.created_at + timedelta(minutes=self.chance.uniform(2, 12))
            self.schedule(at, partial(self._veto, decision, why))
        elif number < 0.95:  # of the others no receiver ever hears
            found_at = decision.due_at + timedelta(seconds=self.chance.uniform(2, 30))
            gone_at = found_at + timedelta(seconds=self.chance.uniform(20, 600))
            found = (DecisionState.ACKNOWLEDGED, "the job is being ended")
            self.schedule(found_at, partial(self._report, decision, *found))
            end = (DecisionState.CONFIRMED, "the job is gone")
            if number > 0.92:
                end = (DecisionState.FAILED, "scancel was refused")
            self.schedule(gone_at, partial(self._gone, story, decision, end))

    def _veto(self, decision: Decision, why: str, at: datetime) -> None:
        command = Vetoed(at, self.chance.choice(PEOPLE), why)
        commands.apply_command(self.database, self.project.id, decision.id, command)

    def _report(self, decision: Decision, state: DecisionState, reason: str, at: datetime) -> None:
        report = Reported(at, state, RECEIVER, reason, {"job": str(4000 + decision.step)})
        commands.record_report(self.database, self.project.id, decision.id, report)

    def _gone(self, story: Story, decision: Decision, end: tuple[DecisionState, str], at: datetime) -> None:
        self._report(decision, *end, at)
        if end[0] is DecisionState.CONFIRMED:
            story.over = True
            if self.chance.random() < 0.7:
                later = at + timedelta(hours=self.chance.uniform(1, 40))
                self.schedule(later, partial(self._judge, story, decision))

    def _finish(self, story: Story, at: datetime) -> None:
        if story.run is None or story.over:
            return
        status = "failed" if self.chance.random() < 0.05 else "completed"
        commands.finish_run(self.database, self.project.id, story.run.id, status, at)
        if self.chance.random() < 0.15:
            later = at + timedelta(hours=self.chance.uniform(1, 40))
            self.schedule(later, partial(self._judge, story, self._decision(story)))

    def _decision(self, story: Story) -> Decision | None:
        assert story.run is not None
        with self.database.reading() as tx:
            return decisions.find_decision_of_attempt(tx, story.run.id, 1)

    def _judge(self, story: Story, decision: Decision | None, at: datetime) -> None:
        """A person who looked into it says what is true, now and then that nobody can tell."""
        assert story.run is not None
        peak, turned = story.example.peak_step, story.example.turned
        word: tuple[str, int | None, str] = ("unknown", None, "the samples look alike to me")
        if turned is False:
            word = ("right", None, "it went on getting better") if decision is None else ("wrong", None, "it was a dip")
        elif turned is True and peak is not None and self.chance.random() < 0.95:
            right = decision is not None and decision.step >= peak
            word = ("right", peak, "the answers got worse") if right else ("wrong", peak, "look at gold")
        outcome, turn_step, note = word
        label = commands.Label(DecisionOutcome(outcome), turn_step, note, self.chance.choice(PEOPLE), at)
        commands.label_run(self.database, self.project.id, story.run.id, label)


def fill(
    database: Database, name: str, now: datetime, tell: Tell = lambda _done, _of: None, most: int | None = None
) -> int | None:
    """Fill the project of this name, which is made if there is none, up to now; how many runs that made.

    `most`: of the examples so many, at least those that are under way; None: all. Gives None when it is filled already,
    and changes nothing then. Raises Conflict if the project has runs of its own, or was being filled and that broke
    off: what was played by then can neither be gone on with nor be taken back.
    """
    chance = random.Random(SEED)
    begins_at = now - timedelta(days=DAYS)
    with database.reading() as tx:
        project = projects.find_project_by_name(tx, name)
        if project is not None and audit.list_entries(tx, project.id, action=FILLED, limit=1):
            return None
        if project is not None and runs.find_run_by_name(tx, project.id, FIRST) is not None:
            raise Conflict(
                f"filling the project {name!r} broke off half-way, or is going on; fill another by `--project NAME`, "
                "or remove an embedded database that holds nothing else (its folder, .evalstop) and begin anew"
            )
        if project is not None and run_lists.list_runs(tx, project.id, limit=1):
            raise Conflict(f"the project {name!r} has runs of its own; give the name of another, or of a new one")
    if project is None:
        project = project_settings.create_project(database, NewProject(name=name), SERVICE, begins_at)
    project = project_settings.change_project_settings(database, Author(project.id, SERVICE, begins_at), SETTINGS)
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
    author = Author(project_id, PEOPLE[0], at)
    project_settings.change_project_settings(database, author, ProjectChange(held_out_share=0.02))


def _add_patient(database: Database, project_id: UUID, k: int, at: datetime) -> None:
    policies.add_policy(database, Author(project_id, PEOPLE[0], at), patient_policy(k))
