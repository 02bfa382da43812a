"""The verdict depends on the set of observations, not on how they arrived: laws, tried on both databases."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from evalstop_detectors import Score, state_to_json
from evalstop_service.ingest import (
    CHOOSER,
    CheckpointSaved,
    Content,
    EvalChanged,
    Message,
    Observations,
    Resumed,
    RunCache,
)
from evalstop_service.rules.run_results import BestCheckpoint, RawMaximum
from evalstop_service.store import checkpoints, monitor_states, observations, tables
from evalstop_service.store.database import Database
from evalstop_service.store.monitor_states import StoredMonitorState
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.service.project_fixture import NOW, ProjectFixture, insert_observations, set_up_project

METRICS = ("eval", "proxy", "kl", "loss", "lr")
EVALS = ("eval", "code", "math")
POLICIES = ("paper", "default", "watch-all-roles")
LAST_STEP = 12

LAWS = settings(
    max_examples=min(12, settings().max_examples),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
TOGETHER = settings(LAWS, max_examples=LAWS.max_examples // 2)
"""Each example has several runs, every one of which is told again by itself."""

values = st.one_of(
    st.integers(-3, 3).map(float),
    st.sampled_from([math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324]),
)


@st.composite
def measured(draw: st.DrawFn, first_step: int = 0, evals: int = 1) -> list[PostedObservation]:
    """Observations with distinct identities, by ascending step; most steps have an eval, or most of several."""
    metrics = (*METRICS, *EVALS[1:evals])
    cells = st.sets(st.tuples(st.sampled_from(metrics), st.integers(first_step, LAST_STEP)), max_size=12)
    steps = range(first_step, draw(st.integers(first_step, LAST_STEP)))
    identities = draw(cells) | {(metric, step) for step in steps for metric in EVALS[:evals]}
    if evals > 1:
        identities -= draw(cells)
    ordered = sorted(identities, key=lambda item: (item[1], metrics.index(item[0])))
    return [PostedObservation(metric, step, draw(values)) for metric, step in ordered]


@st.composite
def scattered(draw: st.DrawFn, points: list[PostedObservation], saved: list[int], changes: list[int]) -> list[Content]:
    """The points in any order, some of them more than once, cut into batches, with checkpoints and changes of the
    eval's measurement in between."""
    again = draw(st.lists(st.sampled_from(points), max_size=6)) if points else []
    mixed = draw(st.permutations(points + again))
    news: list[Content] = []
    while mixed:
        size = draw(st.integers(1, len(mixed)))
        news.append(Observations(tuple(mixed[:size])))
        mixed = mixed[size:]
    news += [CheckpointSaved(step, f"file:///{step}") for step in saved]
    return draw(st.permutations([*news, *map(eval_changed, changes)]))


def eval_changed(step: int) -> EvalChanged:
    return EvalChanged(step, "another grader", None, "key trainer")


@dataclass(frozen=True)
class Story:
    """What happened to a run, as it was and as it may have arrived."""

    policy: str
    direction: str
    first: list[PostedObservation]
    resumed_at: int | None
    second: list[PostedObservation]
    saved: list[int]
    changes: list[int]
    arrived: list[Content]
    forgetting: set[int]
    evals: int = 1


@st.composite
def stories(draw: st.DrawFn, evals: tuple[int, ...] = (1, 2, 3)) -> Story:
    several = draw(st.sampled_from(evals))
    first = draw(measured(evals=several))
    saved = sorted(draw(st.sets(st.integers(0, LAST_STEP), max_size=4)))
    resumed_at = draw(st.none() | st.integers(0, LAST_STEP))
    changes = sorted(draw(st.just(set()) | st.sets(st.integers(0, LAST_STEP), max_size=2)))
    arrived = draw(scattered(first, saved, changes))
    second: list[PostedObservation] = []
    if resumed_at is not None:
        second = draw(measured(first_step=min(resumed_at + 1, LAST_STEP), evals=several))
        second = [point for point in second if point.step > resumed_at]
        arrived = [*arrived, Resumed(resumed_at), *draw(scattered(second, [], []))]
    forgetting = draw(st.sets(st.integers(0, max(0, len(arrived) - 1)), max_size=3))
    policy, direction = draw(st.sampled_from(POLICIES)), draw(st.sampled_from(["maximize", "minimize"]))
    return Story(policy, direction, first, resumed_at, second, saved, changes, arrived, forgetting, several)


@pytest.fixture
def project(database_url: str) -> Iterator[ProjectFixture]:
    """A project in a database that does not wait for the disk: these laws say nothing of a loss of power."""
    url = sa.make_url(database_url)
    if url.get_backend_name() == "postgresql":
        url = url.update_query_dict({"options": "-csynchronous_commit=off"})
    database = Database(url.render_as_string(hide_password=False), synchronous="NORMAL")
    project = set_up_project(database)
    yield project
    database.close()


def open_run(project: ProjectFixture, story: Story, sign: float = 1.0) -> Run:
    directions = {1.0: story.direction, -1.0: {"maximize": "minimize", "minimize": "maximize"}[story.direction]}
    roles: dict[str, dict[str, Any]] = {
        name: {"role": name, "direction": directions[sign]} for name in ("eval", "proxy", "kl", "loss")
    }
    roles["kl"]["direction"] = "minimize"
    for weight, name in enumerate(EVALS[1 : story.evals], start=2):
        roles[name] = {"role": "eval", "direction": directions[sign], "weight": weight, "critical": weight == 3}
    return project.open_run(metrics=roles, policy=story.policy, total_steps=LAST_STEP)


def in_order(project: ProjectFixture, story: Story) -> Run:
    """The run as it would have been told without any accident."""
    run = open_run(project, story)
    for step in story.saved:
        project.submit(run, CheckpointSaved(step, f"file:///{step}"))
    for step in story.changes:
        project.submit(run, eval_changed(step))
    if story.first:
        project.post_observations(run, story.first)
    if story.resumed_at is not None:
        project.submit(run, Resumed(story.resumed_at))
        if story.second:
            project.post_observations(run, story.second)
    return project.load_run(run)


def stands(run: Run) -> dict[str, Any]:
    return {
        "eval_changes": [(change.step, change.reason) for change in run.eval_changes],
        "verdict": run.verdict,
        "best_checkpoint": run.best_checkpoint,
        "raw_maximum": run.raw_maximum,
        "last_step": run.last_step,
        "attempt": run.attempt,
    }


@LAWS
@given(story=stories())
def test_arrival_changes_nothing(project: ProjectFixture, story: Story) -> None:
    """Shuffled, repeated, cut into batches, with the cached state thrown away: a run stands where it would in order."""
    run = open_run(project, story)
    for index, news in enumerate(story.arrived):
        if index in story.forgetting:
            project.drop_monitor_state(run)
        project.submit(run, news)
    assert stands(project.load_run(run)) == stands(in_order(project, story))


@LAWS
@given(story=stories())
def test_forgetting_changes_nothing(project: ProjectFixture, story: Story) -> None:
    """Thrown away before every batch, the cached state is rebuilt to the same answers, verdicts and events."""
    kept, forgotten = open_run(project, story), open_run(project, story)
    for news in story.arrived:
        project.drop_monitor_state(forgotten)
        one, other = project.submit(kept, news), project.submit(forgotten, news)
        assert stands(one.run) == stands(other.run)
        assert project.cached_monitor(kept) == project.cached_monitor(forgotten)
        assert (one.decision is None) == (other.decision is None)
    changes = [
        sorted(
            ((row["sequence"], row["attempt"], row["verdict"]) for row in project.load_rows(tables.verdicts, run)),
            key=itemgetter(0),
        )
        for run in (kept, forgotten)
    ]
    assert changes[0] == changes[1]
    types = [sorted(row["type"] for row in project.load_rows(tables.events, run)) for run in (kept, forgotten)]
    assert types[0] == types[1]


@LAWS
@given(story=stories(), replicas=st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_any_replica_takes_any_news(project: ProjectFixture, story: Story, replicas: list[int]) -> None:
    """Sprayed over processes that each remember the run as they saw it last, it stands where it would in one."""
    run = open_run(project, story)
    processes = [replace(project, cache=RunCache()) for _ in range(3)]
    for news, replica in zip(story.arrived, itertools.cycle(replicas), strict=False):
        processes[replica].submit(run, news)
    assert stands(project.load_run(run)) == stands(in_order(project, story))


@TOGETHER
@given(stories=st.lists(stories(), min_size=2, max_size=3), chance=st.randoms(use_true_random=False))
def test_one_commit_for_many_runs(project: ProjectFixture, stories: list[Story], chance: random.Random) -> None:
    """Taken in together, in any interleaving and any cut into commits, runs stand where each would alone."""
    runs = [open_run(project, story) for story in stories]
    left = [
        [Message(project.id, run.id, news) for news in story.arrived] for run, story in zip(runs, stories, strict=True)
    ]
    arrivals = []
    while any(left):
        arrivals.append(chance.choice([queue for queue in left if queue]).pop(0))
    while arrivals:
        size = chance.randint(1, len(arrivals))
        assert not any(isinstance(answer, Exception) for answer in project.submit_all(arrivals[:size]))
        arrivals = arrivals[size:]
    for run, story in zip(runs, stories, strict=True):
        assert stands(project.load_run(run)) == stands(in_order(project, story))


@TOGETHER
@given(stories=st.lists(stories(), min_size=2, max_size=3), chance=st.randoms(use_true_random=False))
def test_many_runs_are_brought_back_together(
    project: ProjectFixture, stories: list[Story], chance: random.Random
) -> None:
    """Runs that a process knows, knew, has a kept state of or never saw are brought back in one commit to what each
    would be alone."""
    runs = [open_run(project, story) for story in stories]
    processes = [replace(project, cache=RunCache()) for _ in range(2)]
    for round_ in range(max(len(story.arrived) for story in stories)):
        process = chance.choice([*processes, replace(project, cache=RunCache())])
        some = [
            Message(project.id, run.id, story.arrived[round_])
            for run, story in zip(runs, stories, strict=True)
            if round_ < len(story.arrived)
        ]
        assert not any(isinstance(answer, Exception) for answer in process.submit_all(some))
        if chance.random() < 0.3:
            keep(process, [arrival.run_id for arrival in some])
    for run, story in zip(runs, stories, strict=True):
        assert stands(project.load_run(run)) == stands(in_order(project, story))


def keep(process: ProjectFixture, run_ids: list[UUID]) -> None:
    """Have the monitors of these runs stored as this process knows them."""
    with process.database.transaction() as tx:
        for run_id in run_ids:
            state = process.cache.find_state(run_id)
            assert state is not None
            stored = StoredMonitorState(state.run.version, state_to_json(state.policy, state.monitor).decode())
            monitor_states.save_state(tx, run_id, stored, NOW)


@LAWS
@given(
    cells=st.dictionaries(
        st.tuples(st.integers(0, 2), st.sampled_from(METRICS), st.integers(0, LAST_STEP)), values, max_size=60
    ),
    superseded=st.integers(0, LAST_STEP),
    wanted=st.dictionaries(st.tuples(st.integers(0, 2), st.sampled_from(METRICS)), st.integers(0, LAST_STEP + 1)),
    most=st.integers(1, LAST_STEP),
)
def test_series_are_read_together_as_one_by_one(
    project: ProjectFixture,
    cells: dict[tuple[int, str, int], float],
    superseded: int,
    wanted: dict[tuple[int, str], int],
    most: int,
) -> None:
    """Of each series from its step on the same points come, or nothing of a run where one is too long."""
    opened = [project.open_run() for _ in range(3)]
    with project.database.transaction() as tx:
        rows = [(opened[at].id, PostedObservation(metric, step, value)) for (at, metric, step), value in cells.items()]
        insert_observations(tx, rows)
        observations.supersede_observations(tx, opened[0].id, superseded, 2)
        tx.execute(tables.runs.update().values(last_step=LAST_STEP))
    with project.database.reading() as tx:
        asked = {(opened[at].id, metric): step for (at, metric), step in wanted.items()}
        run_ids = [run.id for run in opened]
        last_steps, together = observations.load_last_steps_and_series(tx, run_ids, asked, most)
        assert last_steps == observations.load_last_steps(tx, run_ids)
        alone = {key: observations.load_observations_after(tx, key[0], [key[1]], step) for key, step in asked.items()}
    assert together.keys() == {run_id for run_id, _ in asked}
    for run_id, points in together.items():
        each = [some for key, some in alone.items() if key[0] == run_id]
        if points is None:
            assert max(map(len, each)) > most
        else:
            assert max(map(len, each)) <= most
            assert repr(points) == repr([point for some in each for point in some])


@LAWS
@given(story=stories(evals=(1,)))
def test_mirrors(project: ProjectFixture, story: Story) -> None:
    """A minimized metric is judged as its negative is when maximized; the scores are told as they were measured."""
    run, mirror = open_run(project, story), open_run(project, story, sign=-1.0)
    for news in story.arrived:
        project.submit(run, news)
        project.submit(mirror, mirrored(news))
    one, other = project.load_run(run), project.load_run(mirror)
    assert one.verdict == other.verdict
    for pointer, reflected in (
        (one.best_checkpoint, other.best_checkpoint),
        (one.raw_maximum, other.raw_maximum),
    ):
        assert (pointer is None) == (reflected is None)
        assert pointer is None or reflected is None or mirrored_scores(pointer) == reflected


def mirrored_scores(pointer: BestCheckpoint | RawMaximum) -> BestCheckpoint | RawMaximum:
    if isinstance(pointer, RawMaximum):
        return structs.replace(pointer, score=-pointer.score)
    smoothed = None if pointer.smoothed is None else -pointer.smoothed
    return structs.replace(pointer, score=-pointer.score, smoothed=smoothed)


def mirrored(news: Content) -> Content:
    if not isinstance(news, Observations):
        return news
    return Observations(
        tuple(p if p.metric == "kl" else PostedObservation(p.metric, p.step, -p.value) for p in news.points)
    )


@LAWS
@given(story=stories(evals=(1,)))
def test_agrees_with_the_obvious(project: ProjectFixture, story: Story) -> None:
    """Stop, best checkpoint and raw maximum are what a few plain lines make of all points that still count and were
    measured in one way."""
    run = in_order(project, story)
    cut = math.inf if story.resumed_at is None else story.resumed_at
    sign = 1.0 if story.direction == "maximize" else -1.0
    counted = [point for point in story.first if point.step <= cut] + story.second
    gold = [(p.step, sign * p.value) for p in counted if p.metric == "eval" and math.isfinite(p.value)]
    changes = [step for step in story.changes if step <= cut] + [
        story.resumed_at + 1 for step in story.changes[-1:] if story.resumed_at is not None and step > cut
    ]
    measured_alike = [
        [item for item in gold if sum(step <= item[0] for step in changes) == version]
        for version in range(len(changes) + 1)
    ]
    newest: list[tuple[int, float]] = next(filter(None, reversed(measured_alike)), [])
    with project.database.reading() as tx:
        saved = {item.step for item in checkpoints.list_checkpoints(tx, run.id)}
    assert saved == {step for step in story.saved if step <= cut}
    raw = max(newest, key=lambda item: (item[1], -item[0]), default=None)
    choices = [CHOOSER.choose([Score(*item) for item in sorted(alike)], saved) for alike in reversed(measured_alike)]
    chosen = next(filter(None, choices), None)
    best = chosen and (chosen.step, chosen.score)
    assert pointed(run.raw_maximum) == (raw and (raw[0], sign * raw[1]))
    assert pointed(run.best_checkpoint) == (best and (best[0], sign * best[1]))
    if story.policy == "paper":
        stop = next((stop for alike in measured_alike if (stop := first_stop(alike, k=3)) is not None), None)
        assert (run.verdict.stops) == (stop is not None)
        assert stop is None or run.verdict.step == stop


def pointed(pointer: BestCheckpoint | RawMaximum | None) -> tuple[int, float] | None:
    return (pointer.step, pointer.score) if pointer else None


def first_stop(gold: list[tuple[int, float]], k: int) -> int | None:
    for end in range(k, len(gold)):
        window = [value for _, value in gold[end - k : end + 1]]
        if all(later < earlier for earlier, later in itertools.pairwise(window)):
            return gold[end][0]
    return None
