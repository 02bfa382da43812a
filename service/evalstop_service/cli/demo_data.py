"""Fills a project with example runs as if it had been in use for two months.

The runs are in a file of this package: drawn ones of the lab and recorded ones. They go through the same functions as
real runs, with a simulated clock, so that decisions, hold-outs, outcomes and cases arise as usual:

    opened ──> posted, a few evals at a time ──> finished, or stopped by a receiver ──> judged by a person, sometimes
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import logging
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib import resources
from typing import Any

from evalstop_service.cli.entry import OK, Add, Subcommands, tell
from evalstop_service.clock import utc_now
from evalstop_service.decisions import commands, deadlines, stale_runs, veto_windows
from evalstop_service.domain.decision_events import Reported
from evalstop_service.domain.decision_lifecycle import SERVICE, DecisionState, Mode
from evalstop_service.domain.run import MetricFields
from evalstop_service.domain.statuses import DecisionOutcome
from evalstop_service.ingest import (
    CheckpointSaved,
    Committer,
    Message,
    Observations,
    RunCache,
    open_run,
    running_in_thread,
)
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.projects import api_keys, project_settings
from evalstop_service.projects.project_settings import NewProject, ProjectChange
from evalstop_service.settings import Settings
from evalstop_service.store import decisions, hand_overs, projects, run_lists, runs, schema
from evalstop_service.store.audit import Author
from evalstop_service.store.cases import Outcome
from evalstop_service.store.database import Database
from evalstop_service.store.decisions import Decision
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.projects import Project
from evalstop_service.store.runs import Run

FILE = "example_runs.json.gz"
SEED, DAYS = 60, 60
RUNNING = 10  # this many of the last runs have not ended
EVALS_A_POST = 3

TICK = timedelta(hours=6)
"""How often the worker's periodic jobs run."""

METRICS: dict[str, MetricFields] = {
    "reward/gold": {"role": "eval", "direction": "maximize"},
    "reward/proxy": {"role": "proxy", "direction": "maximize"},
    "policy/kl": {"role": "kl", "direction": "minimize"},
}

SETTINGS = ProjectChange(
    default_mode=Mode.ENFORCE,
    max_mode=Mode.ENFORCE,
    held_out_share=0.3,
    stale_seconds=4 * 3600.0,
)

KINDS, GPUS = ("rlhf", "rlhf", "grpo", "dpo"), ("8", "8", "16", "32", "64")
TERMS = (*(("default", "enforce"),) * 3, *(("default", "shadow"),) * 6, ("paper", "enforce"), ("early", "shadow"))
PEOPLE, RECEIVER = ("dana", "kim", "lee"), "evalstop-receiver slurm"


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
        "--runs", type=int, metavar="N", help="number of example runs, at least 11 (default: all, some 300)"
    )


def demo_data(settings: Settings, options: argparse.Namespace) -> int:
    """Fill a project with some 300 example runs from two months, to explore the dashboard."""
    logging.getLogger("evalstop_service").setLevel(logging.ERROR)  # the demo would log two months of events
    database = settings.create_database()
    schema.upgrade_schema(database)
    filled = fill(database, options.project, utc_now(), options.runs)
    database.close()
    nothing = "already has runs, and gets no examples; name another one with `--project`"
    text = f"has {filled} example runs; `evalstop up` shows them" if filled else nothing
    tell(options, {"project": options.project, "runs": filled}, f"the project {options.project} {text}")
    return OK


@dataclass(frozen=True)
class Story:
    """The course of a run of the file, `example`; it posts `evals` evals at this pace, and ends if these are all."""

    request: open_run.OpenRequest
    example: dict[str, Any]
    begins_at: datetime
    pace: timedelta
    evals: int

    def at(self, index: int) -> datetime:
        """When the eval with this index is posted."""
        return self.begins_at + (index + 1) * self.pace

    def list_observations(self, evals: range) -> Iterator[PostedObservation]:
        """The observations at the steps of these evals."""
        example, stderr = self.example, self.example["stderr"]
        for index in evals:
            for metric, series in zip(METRICS, ("gold", "proxy", "kl"), strict=True):
                if (value := example[series][index]) is not None:
                    error = stderr[index] if stderr and series == "gold" else None
                    yield PostedObservation(metric, example["steps"][index], value, error)


def choose_stories(chance: random.Random, now: datetime, most: int | None) -> list[Story]:
    """All runs by start: most have ended, the last few are running, and one of them has been silent for hours, one for
    days."""
    packed = resources.files("evalstop_service").joinpath(FILE).read_bytes()
    examples = json.loads(gzip.decompress(packed))["runs"]
    chance.shuffle(examples)
    examples = examples[: max(most, RUNNING + 1)] if most is not None else examples
    stories = []
    for number, example in enumerate(reversed(examples)):
        evals, pace = len(example["steps"]), timedelta(minutes=chance.uniform(8, 30))
        ended_at = now - timedelta(hours=2) - chance.random() * (timedelta(days=DAYS - 1) - (evals + 1) * pace)
        if number < RUNNING:
            evals = int(chance.uniform(0.3, 0.9) * evals)
            ended_at = now - (timedelta(hours=6), timedelta(days=10), *[timedelta()] * RUNNING)[number]
        (policy, mode), kind = chance.choice(TERMS), chance.choice(KINDS)
        request = open_run.OpenRequest(
            f"{kind}-{example['family'].replace('_', '-')}-{number:03d}",
            METRICS,
            labels={"job_kind": kind, "gpus": chance.choice(GPUS)},
            policy=policy,
            mode=Mode(mode),
            total_steps=example["steps"][-1],
        )
        stories.append(Story(request, example, ended_at - (evals + 1) * pace, pace, evals))
    return sorted(stories, key=lambda story: story.begins_at)


class Player:
    """Plays runs, receivers, people and the worker, each as a generator that yields when it acts next."""

    def __init__(self, database: Database, project: Project, begins_at: datetime) -> None:
        self.database, self.project = database, project
        self.at = begins_at
        self.committer = Committer(database, RunCache(), lambda: self.at, ServiceMetrics())

    def play(self, courses: Iterable[Iterator[datetime]], until: datetime) -> None:
        """Play all of them in order of time."""
        waiting = [(next(course), number, course) for number, course in enumerate(courses)]
        heapq.heapify(waiting)
        while waiting and waiting[0][0] <= until:
            self.at, number, course = heapq.heappop(waiting)
            if (due := next(course, None)) is not None:
                heapq.heappush(waiting, (due, number, course))

    def play_worker(self) -> Iterator[datetime]:
        """Run the periodic jobs."""
        while True:
            yield self.at + TICK
            self.request_stops()
            deadlines.process_overdue(self.database, self.at)
            while stale_runs.check_due_runs(self.database, self.at):
                pass

    def request_stops(self) -> None:
        """Request the stops whose veto windows have ended."""
        while veto_windows.request_stops(self.database, self.at, lambda _: self.at):
            pass

    def play_run(self, story: Story) -> Iterator[datetime]:
        """Open a run and post to it until it ends or a receiver has stopped it; later a person may judge it."""
        yield story.begins_at
        run, _ = open_run.open_run(self.database, self.project.id, story.request, self.at)
        ends_at, gone_at, decision = story.at(story.evals), None, None
        for first in range(0, story.evals, EVALS_A_POST):
            evals = range(first, min(first + EVALS_A_POST, story.evals))
            if gone_at is not None and gone_at <= story.at(evals[-1]):
                break
            yield story.at(evals[-1])
            decision = self.post_evals(story, run, evals)
            is_pending = decision is not None and decision.state is DecisionState.PENDING
            if decision is not None and is_pending and gone_at is None:
                gone_at = decision.due_at + timedelta(minutes=2)
        if decision is not None and gone_at is not None and gone_at < ends_at:
            yield gone_at
            self.confirm_stop(run, decision)
        elif story.evals < len(story.example["steps"]):
            return  # it is still running
        else:
            yield ends_at
            commands.finish_run(self.database, self.project.id, run.id, "completed", self.at)
        with self.database.reading() as tx:
            decision = decisions.find_decision_of_attempt(tx, run.id, 1)
        chance = random.Random(story.request.name)  # the same at each filling, whatever was held out before
        if chance.random() < (0.15 if decision is None else 0.8):
            yield self.at + timedelta(hours=chance.uniform(1, 40))
            self.label_outcome(story, run, decision, chance.choice(PEOPLE))

    def post_evals(self, story: Story, run: Run, evals: range) -> Decision | None:
        """Post some evals, and the checkpoint of the last one; returns the decision on the run."""
        last = story.example["steps"][evals[-1]]
        saved = CheckpointSaved(last, f"s3://checkpoints/{story.request.name}/step-{last:06d}")
        self.committer.submit_and_wait(Message(self.project.id, run.id, saved))
        posted = Observations(tuple(story.list_observations(evals)))
        return self.committer.submit_and_wait(Message(self.project.id, run.id, posted)).decision

    def confirm_stop(self, run: Run, decision: Decision) -> None:
        """Take the stop over as a receiver does, whose job is gone at once."""
        self.request_stops()  # its veto window ended between two ticks of the worker
        with self.database.transaction() as tx:
            run = runs.load_run(tx, self.project.id, run.id)
            hand_overs.try_hand_over(tx, run, decision, RECEIVER, self.at)
        details = {"job": str(4000 + decision.step)}
        report = Reported(self.at, DecisionState.CONFIRMED, RECEIVER, "the job is gone", details)
        commands.record_report(self.database, self.project.id, decision.id, report)

    def label_outcome(self, story: Story, run: Run, decision: Decision | None, person: str) -> None:
        """A person labels the outcome; `unknown` where the example does not say."""
        peak, turned = story.example["peak_step"], story.example["turned"]
        outcome, turn_step = DecisionOutcome.UNKNOWN, None
        if turned is False:
            outcome = DecisionOutcome.RIGHT if decision is None else DecisionOutcome.WRONG
        elif turned and peak is not None:
            is_right = decision is not None and decision.step >= peak
            outcome, turn_step = DecisionOutcome.RIGHT if is_right else DecisionOutcome.WRONG, peak
        label = Outcome(outcome=outcome, turn_step=turn_step, note="read some answers", actor=person, at=self.at)
        commands.label_run(self.database, self.project.id, run.id, label)


def fill(database: Database, name: str, now: datetime, most: int | None = None) -> int:
    """Fill the project of this name up to now, creating it if needed; returns how many runs were added.

    `most`: how many examples, at least those still running; None: all. Adds nothing to a project that has runs:
    examples are not mixed with others, and an interrupted filling cannot be continued.
    """
    begins_at = now - timedelta(days=DAYS)
    with database.reading() as tx:
        project = projects.find_project_by_name(tx, name)
        if project is not None and run_lists.list_runs(tx, project.id, limit=1):
            return 0
    if project is None:
        project = project_settings.create_project(database, NewProject(name=name), SERVICE, begins_at)
    with database.transaction() as tx:
        project = project_settings.apply_change(tx, Author(project.id, SERVICE, begins_at), SETTINGS)
    player, stories = Player(database, project, begins_at), choose_stories(random.Random(SEED), now, most)
    with running_in_thread(player.committer):
        player.play([player.play_worker(), *map(player.play_run, stories)], now)
    return len(stories)
