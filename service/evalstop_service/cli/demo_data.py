"""Fills a project with example runs as if it had been in use for two months.

The runs are in a file of this package: drawn ones of the lab and recorded ones. They go through the same
functions as real runs, with a simulated clock, so that decisions, hold-outs, outcomes and cases arise as usual. A small
script plays people and receivers; one seed determines its random choices.

    opened ──> posted, a few evals at a time ──> finished ──> judged, sometimes
                     └── decided ──> vetoed, or confirmed
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from importlib import resources
from itertools import count
from typing import Any

from evalstop_service.cli.entry import OK, Add, Subcommands, tell
from evalstop_service.clock import utc_now
from evalstop_service.decisions import commands, deadlines, stale_runs, veto_windows
from evalstop_service.domain.decision_commands import Vetoed
from evalstop_service.domain.decision_events import Reported
from evalstop_service.domain.decision_lifecycle import SERVICE, DecisionState, Mode
from evalstop_service.domain.run import MetricFields
from evalstop_service.domain.statuses import DecisionOutcome
from evalstop_service.errors import Conflict
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
from evalstop_service.projects import api_keys, project_settings
from evalstop_service.projects.project_settings import NewProject, ProjectChange
from evalstop_service.settings import Settings
from evalstop_service.store import decisions, hand_overs, projects, run_lists, runs, schema
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database
from evalstop_service.store.decisions import Decision
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.projects import Project
from evalstop_service.store.runs import Run

FILE = "example_runs.json.gz"
SEED, DAYS = 6, 60
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
    veto_window_seconds=900.0,
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


@dataclass
class Story:
    """The course of a run of the file, `example`; it posts `evals` evals at this pace, and ends if these are all."""

    name: str
    example: dict[str, Any]
    begins_at: datetime
    pace: timedelta
    evals: int
    run: Run | None = None
    is_over: bool = False

    def at(self, index: int) -> datetime:
        """When the eval with this index is posted."""
        return self.begins_at + (index + 1) * self.pace

    def list_observations(self, index: int) -> Iterator[PostedObservation]:
        """The observations at one step."""
        example, stderr = self.example, self.example["stderr"]
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
        name = f"{chance.choice(KINDS)}-{example['family'].replace('_', '-')}"
        stories.append(Story(name, example, ended_at - (evals + 1) * pace, pace, evals))
    stories.sort(key=lambda story: story.begins_at)
    for number, story in enumerate(stories):
        story.name = f"{story.name}-{number:03d}"
    return stories


@dataclass
class Script:
    """Scheduled events in order of time, and the state so far."""

    database: Database
    project: Project
    now: datetime
    chance: random.Random
    waiting: list[tuple[datetime, int, Callable[[datetime], object]]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.at = self.now
        self.committer = Committer(self.database, RunCache(), lambda: self.at, ServiceMetrics())

    def schedule(self, at: datetime, do: Callable[[datetime], object]) -> None:
        """Schedule a call, unless its time is in the future."""
        if at <= self.now:
            heapq.heappush(self.waiting, (at, next(self.numbers), do))

    def play(self) -> None:
        """Run all scheduled calls in order."""
        while self.waiting:
            self.at, _, do = heapq.heappop(self.waiting)
            with suppress(Conflict):  # an action came too late: the run has ended meanwhile
                do(self.at)

    def begin(self, story: Story) -> None:
        """Schedule the opening, the posts and the end of a run."""
        self.schedule(story.begins_at, partial(self._open_run, story))
        for first in range(0, story.evals, EVALS_A_POST):
            evals = range(first, min(first + EVALS_A_POST, story.evals))
            self.schedule(story.at(evals[-1]), partial(self._post_evals, story, evals))
        if story.evals == len(story.example["steps"]):
            self.schedule(story.at(story.evals), partial(self._end_run, story))

    def tick(self, at: datetime) -> None:
        """Run the worker's periodic jobs."""
        while veto_windows.request_stops(self.database, at, lambda _: at):
            pass
        deadlines.process_overdue(self.database, at)
        while stale_runs.check_due_runs(self.database, at):
            pass

    def _open_run(self, story: Story, at: datetime) -> None:
        policy, mode = self.chance.choice(TERMS)
        request = open_run.OpenRequest(
            story.name,
            METRICS,
            labels={"job_kind": story.name.split("-")[0], "gpus": self.chance.choice(GPUS)},
            policy=policy,
            mode=Mode(mode),
            total_steps=story.example["steps"][-1],
        )
        story.run, _ = open_run.open_run(self.database, self.project.id, request, at)

    def _post_evals(self, story: Story, evals: range, at: datetime) -> None:
        run = story.run
        if run is None or story.is_over:
            return
        last = story.example["steps"][evals[-1]]
        saved = CheckpointSaved(last, f"s3://checkpoints/{story.name}/step-{last:06d}")
        points = tuple(point for index in evals for point in story.list_observations(index))
        contents: tuple[Content, ...] = (saved, Observations(points))
        for content in contents:
            receipt = self.committer.submit_and_wait(Message(self.project.id, run.id, content))
        if receipt.decision is not None and receipt.decision.created_at == at:
            self._schedule_reactions(story, receipt.decision)

    def _schedule_reactions(self, story: Story, decision: Decision) -> None:
        """Schedule the reactions of people and receivers to a decision."""
        number = self.chance.random()
        if decision.state is not DecisionState.PENDING or number > 0.95:  # no receiver hears of these
            return
        if number < 0.06:
            at = decision.created_at + timedelta(minutes=5)
            command = Vetoed(at, self.chance.choice(PEOPLE), "a known dip: the curriculum changed")
            apply = partial(commands.apply_command, self.database, self.project.id, decision.id, command)
            self.schedule(at, lambda _: apply())
        else:
            gone_at = decision.due_at + timedelta(seconds=self.chance.uniform(20, 600))
            self.schedule(gone_at, partial(self._confirm_stop, story, decision))

    def _confirm_stop(self, story: Story, decision: Decision, at: datetime) -> None:
        # Its veto window ended between two ticks of the worker.
        veto_windows.request_stops(self.database, at, lambda _: at)
        with self.database.transaction() as tx:
            run = runs.load_run(tx, self.project.id, decision.run_id)
            hand_overs.try_hand_over(tx, run, decision, RECEIVER, at)
        report = Reported(at, DecisionState.CONFIRMED, RECEIVER, "the job is gone", {"job": str(4000 + decision.step)})
        commands.record_report(self.database, self.project.id, decision.id, report)
        self._end(story, at)

    def _end_run(self, story: Story, at: datetime) -> None:
        if story.run is not None and not story.is_over:
            status = "failed" if self.chance.random() < 0.05 else "completed"
            commands.finish_run(self.database, self.project.id, story.run.id, status, at)
            self._end(story, at)

    def _end(self, story: Story, at: datetime) -> None:
        """End a story; later a person may judge it."""
        assert story.run is not None
        story.is_over = True
        with self.database.reading() as tx:
            decision = decisions.find_decision_of_attempt(tx, story.run.id, 1)
        if self.chance.random() < (0.15 if decision is None else 0.8):
            later = at + timedelta(hours=self.chance.uniform(1, 40))
            self.schedule(later, partial(self._label_outcome, story, decision))

    def _label_outcome(self, story: Story, decision: Decision | None, at: datetime) -> None:
        """A person labels the outcome; `unknown` where the example does not say."""
        assert story.run is not None
        peak, turned = story.example["peak_step"], story.example["turned"]
        outcome, turn_step = DecisionOutcome.UNKNOWN, None
        if turned is False:
            outcome = DecisionOutcome.RIGHT if decision is None else DecisionOutcome.WRONG
        elif turned and peak is not None:
            is_right = decision is not None and decision.step >= peak
            outcome, turn_step = DecisionOutcome.RIGHT if is_right else DecisionOutcome.WRONG, peak
        label = commands.Label(outcome, turn_step, "read some answers", self.chance.choice(PEOPLE), at)
        commands.label_run(self.database, self.project.id, story.run.id, label)


def fill(database: Database, name: str, now: datetime, most: int | None = None) -> int:
    """Fill the project of this name up to now, creating it if needed; returns how many runs were added.

    `most`: how many examples, at least those still running; None: all. Adds nothing to a project that has runs:
    examples are not mixed with others, and an interrupted filling cannot be continued.
    """
    chance, begins_at = random.Random(SEED), now - timedelta(days=DAYS)
    with database.reading() as tx:
        project = projects.find_project_by_name(tx, name)
        if project is not None and run_lists.list_runs(tx, project.id, limit=1):
            return 0
    if project is None:
        project = project_settings.create_project(database, NewProject(name=name), SERVICE, begins_at)
    with database.transaction() as tx:
        project = project_settings.apply_change(tx, Author(project.id, SERVICE, begins_at), SETTINGS)
    script, stories = Script(database, project, now, chance), choose_stories(chance, now, most)
    for story in stories:
        script.begin(story)
    for number in range(1, int((now - begins_at) / TICK) + 1):
        script.schedule(begins_at + number * TICK, script.tick)
    with running_in_thread(script.committer):
        script.play()
    with database.transaction() as tx:
        enough_is_measured = ProjectChange(held_out_share=0.02)
        project_settings.apply_change(tx, Author(project.id, SERVICE, now), enough_is_measured)
    return len(stories)
