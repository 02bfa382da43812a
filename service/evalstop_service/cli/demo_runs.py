"""The example runs of `evalstop demo-data`, from a file of this package, and the course of each.

The policy `three-declines` is on trial: in the first month it watches runs that it judges well, then runs whose eval
dips and recovers. The runs were selected for this; the outcomes are computed by the service.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib import resources

from evalstop_detectors import MetricRole, Observation, Policy, advance, policy_from_document, start

from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run

DAYS = 60
RUNNING = 10  # this many of the last runs have not ended
EVALS_A_POST = 3

FILE = "example_runs.json.gz"
FIRST = "example-000"

KINDS = ("rlhf", "rlhf", "grpo", "dpo")
GPUS = ("8", "8", "16", "32", "64", None)
POLICIES_OF_RUNS = (
    *(("default", "enforce"),) * 3 + (("default", "shadow"),) * 6,
    *(("patient", "enforce"), ("early", "shadow")),
)

TRIED = "three-declines"
"""The policy that must earn its rollout stage: the project's own, so that the shipped ones stop as their pages say."""

GOOD_DAYS, BAD_DAYS = (0.0, 30.0), (33.0, 50.0)
"""When the policy on trial watches runs that it judges well, and when others, in days from the start."""

EVALS_TO_JUDGE = 8
"""Fewest evals after a stop in the runs of the policy on trial: they show whether the stop was right."""


@dataclass(frozen=True)
class Example:
    """A run of the file; `turned`: None if unknown."""

    family: str
    seed: int
    turned: bool | None
    peak_step: int | None
    steps: list[int]
    gold: list[float | None]
    stderr: list[float | None] | None
    proxy: list[float | None]
    kl: list[float | None]

    def list_observations(self, index: int) -> Iterator[PostedObservation]:
        """The observations at one step."""
        stderr = self.stderr[index] if self.stderr else None
        for metric, value, error in (
            ("reward/gold", self.gold[index], stderr),
            ("reward/proxy", self.proxy[index], None),
            ("policy/kl", self.kl[index], None),
        ):
            if value is not None:
                yield PostedObservation(metric, self.steps[index], value, error)

    def stops_at(self, policy: Policy) -> int | None:
        """The index of the step at which a policy stops the run; None: it never does."""
        evals_seen = [
            Observation(MetricRole.EVAL, step, value, self.stderr[index] if self.stderr else None)
            for index, (step, value) in enumerate(zip(self.steps, self.gold, strict=True))
            if value is not None
        ]
        _, changes = advance(policy, start(policy), evals_seen)
        step = next((verdict.step for verdict in changes if verdict.stops), None)
        return self.steps.index(step) if step is not None else None


@dataclass
class Story:
    """The course of a run. `silent_after`: it posts this many evals and then nothing more."""

    name: str
    example: Example
    policy: str
    mode: str
    labels: dict[str, str]
    begins_at: datetime
    pace: timedelta
    saves: bool = True
    silent_after: int | None = None
    run: Run | None = None
    decided: bool = False
    over: bool = False

    def at(self, index: int) -> datetime:
        """When the eval with this index is posted."""
        return self.begins_at + (index + 1) * self.pace


def choose_stories(chance: random.Random, now: datetime, most: int | None) -> list[Story]:
    """All runs by start: most have ended, the last few are running."""
    examples = _load_examples()
    chance.shuffle(examples)
    examples = examples[: max(most, RUNNING)] if most is not None else examples
    stories = []
    ended = examples[:-RUNNING]
    tried = _choose_tried(ended)
    for index, example in enumerate(ended):
        pace = timedelta(minutes=chance.uniform(8, 45))
        length = (len(example.steps) + 1) * pace
        earliest, latest = (timedelta(days=days - DAYS) for days in tried.get(index, (0.0, DAYS)))
        begins_at = now + earliest + chance.random() * (latest - earliest - length - timedelta(hours=2))
        stories.append(_create_story(chance, example, begins_at, pace))
        if index in tried:
            stories[-1].policy, stories[-1].mode = TRIED, "enforce"
    for number, example in enumerate(examples[-RUNNING:]):
        pace = timedelta(minutes=chance.uniform(10, 20))
        done = chance.uniform(0.3, 0.9) * len(example.steps)
        stories.append(_create_story(chance, example, now - done * pace, pace))
        if number < 2:  # one has been silent for six hours, the other for ten days
            silence = (timedelta(hours=6), timedelta(days=10))[number]
            stories[-1].silent_after = 3 * EVALS_A_POST
            stories[-1].begins_at = now - silence - 3 * EVALS_A_POST * pace
    turning = [example for example in examples if example.turned and example.stops_at(patient_policy(7)) is not None]
    for number, example in enumerate(turning[:3]):  # one waits in its veto window, one is on hold
        stops_at = example.stops_at(patient_policy(7))
        assert stops_at is not None
        last = stops_at + EVALS_A_POST - 1 - stops_at % EVALS_A_POST
        pace = timedelta(minutes=12)
        story = _create_story(chance, example, now - (last + 1) * pace - timedelta(minutes=2 + number), pace)
        story.policy, story.mode, story.saves = "patient", "enforce", number > 0
        stories.append(story)
    stories.sort(key=lambda story: story.begins_at)
    for number, story in enumerate(stories):
        story.name = f"example-{number:03d}" if number == 0 else f"{story.name}-{number:03d}"
    return stories


def _choose_tried(examples: list[Example]) -> dict[int, tuple[float, float]]:
    """The runs of the policy on trial, by index, and the days between which they run."""
    policy = tried_policy()
    right, silent, wrong = [], [], []
    for index, example in enumerate(examples):
        stop = example.stops_at(policy)
        if stop is None and example.turned is False:
            silent.append(index)
        elif stop is not None and stop < len(example.steps) - EVALS_TO_JUDGE:
            if example.turned is False:
                wrong.append(index)
            elif example.peak_step is not None and example.steps[stop] >= example.peak_step:
                right.append(index)
    good = right[: len(examples) // 8] + silent[: len(examples) // 30]
    return dict.fromkeys(good, GOOD_DAYS) | dict.fromkeys(wrong[: len(examples) // 9], BAD_DAYS)


def tried_policy() -> Policy:
    """The policy on trial: the rule of `paper`."""
    return policy_from_document(
        {
            "name": TRIED,
            "description": "Stop after 3 consecutive declines, with or without a checkpoint.",
            "members": [{"detector": "k_decline", "params": {"k": 3}}],
            "stops_despite": ["no_checkpoint"],
        }
    )


def patient_policy(k: int) -> Policy:
    """A custom policy, which stops after `k` evals below the best."""
    return policy_from_document(
        {
            "name": "patient",
            "description": f"Stop after {k} evals below the best.",
            "members": [{"detector": "k_below_best", "params": {"k": k}}],
        }
    )


def _create_story(chance: random.Random, example: Example, begins_at: datetime, pace: timedelta) -> Story:
    policy, mode = chance.choice(POLICIES_OF_RUNS)
    gpus, kind = chance.choice(GPUS), chance.choice(KINDS)
    labels = {"job_kind": kind} | ({"gpus": gpus} if gpus else {})
    return Story(f"{kind}-{example.family.replace('_', '-')}", example, policy, mode, labels, begins_at, pace)


def _load_examples() -> list[Example]:
    packed = resources.files("evalstop_service").joinpath(FILE).read_bytes()
    return [Example(**run) for run in json.loads(gzip.decompress(packed))["runs"]]
