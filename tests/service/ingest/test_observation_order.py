"""The verdict depends on the set of observations, not on how they arrived: properties checked on both databases."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from evalstop_detectors import Score, Scores, choose_best, state_to_json
from evalstop_service.domain.run import BestCheckpoint, RawMaximum
from evalstop_service.ingest import (
    CheckpointSaved,
    Content,
    EvalChanged,
    Message,
    Observations,
    Resumed,
    RunCache,
)
from evalstop_service.store import ingest, observations, run_details, tables
from evalstop_service.store.database import Database
from evalstop_service.store.ingest import StoredMonitorState
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.service.project_fixture import ProjectFixture, insert_observations, set_up_project

pytestmark = pytest.mark.slow

METRICS = ("eval", "proxy", "kl", "loss", "lr")
EVALS = ("eval", "code", "math")
POLICIES = ("paper", "default", "watch-all-roles")
LAST_STEP = 12

HYPOTHESIS_SETTINGS = settings(
    max_examples=min(5, settings().max_examples),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MULTI_RUN_SETTINGS = settings(HYPOTHESIS_SETTINGS, max_examples=HYPOTHESIS_SETTINGS.max_examples // 2)
"""Fewer examples: each has several runs, every one of which is also ingested by itself."""

values = st.one_of(
    st.integers(-3, 3).map(float),
    st.sampled_from([math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324]),
)


@st.composite
def draw_observations(draw: st.DrawFn, first_step: int = 0, evals: int = 1) -> list[PostedObservation]:
    """Draw observations with distinct identities, by ascending step; most steps have one eval, or most of several."""
    metrics = (*METRICS, *EVALS[1:evals])
    cells = st.sets(st.tuples(st.sampled_from(metrics), st.integers(first_step, LAST_STEP)), max_size=12)
    steps = range(first_step, draw(st.integers(first_step, LAST_STEP)))
    identities = draw(cells) | {(metric, step) for step in steps for metric in EVALS[:evals]}
    if evals > 1:
        identities -= draw(cells)
    ordered = sorted(identities, key=lambda item: (item[1], metrics.index(item[0])))
    return [PostedObservation(metric, step, draw(values)) for metric, step in ordered]


@st.composite
def draw_orders(
    draw: st.DrawFn, posted: list[PostedObservation], saved: list[int], changes: list[int]
) -> list[Content]:
    """Shuffle the observations, repeat some, cut them into batches, and mix in checkpoints and eval changes."""
    repeated = draw(st.lists(st.sampled_from(posted), max_size=6)) if posted else []
    shuffled = draw(st.permutations(posted + repeated))
    messages: list[Content] = []
    while shuffled:
        size = draw(st.integers(1, len(shuffled)))
        messages.append(Observations(tuple(shuffled[:size])))
        shuffled = shuffled[size:]
    messages += [CheckpointSaved(step, f"file:///{step}") for step in saved]
    return draw(st.permutations([*messages, *map(build_eval_change, changes)]))


def build_eval_change(step: int) -> EvalChanged:
    return EvalChanged(step, "another grader", None, "key trainer")


@dataclass(frozen=True)
class RunHistory:
    """What happened to a run, in order and as it arrived."""

    policy: str
    direction: str
    first: list[PostedObservation]
    resumed_at: int | None
    second: list[PostedObservation]
    saved: list[int]
    changes: list[int]
    messages: list[Content]
    dropped_before: set[int]
    evals: int = 1


@st.composite
def draw_histories(draw: st.DrawFn, evals: tuple[int, ...] = (1, 2, 3)) -> RunHistory:
    eval_count = draw(st.sampled_from(evals))
    first = draw(draw_observations(evals=eval_count))
    saved = sorted(draw(st.sets(st.integers(0, LAST_STEP), max_size=4)))
    resumed_at = draw(st.none() | st.integers(0, LAST_STEP))
    changes = sorted(draw(st.just(set()) | st.sets(st.integers(0, LAST_STEP), max_size=2)))
    messages = draw(draw_orders(first, saved, changes))
    second: list[PostedObservation] = []
    if resumed_at is not None:
        second = draw(draw_observations(first_step=min(resumed_at + 1, LAST_STEP), evals=eval_count))
        second = [observation for observation in second if observation.step > resumed_at]
        messages = [*messages, Resumed(resumed_at), *draw(draw_orders(second, [], []))]
    dropped_before = draw(st.sets(st.integers(0, max(0, len(messages) - 1)), max_size=3))
    policy, direction = draw(st.sampled_from(POLICIES)), draw(st.sampled_from(["maximize", "minimize"]))
    return RunHistory(
        policy, direction, first, resumed_at, second, saved, changes, messages, dropped_before, eval_count
    )


@pytest.fixture
def project(database_url: str) -> Iterator[ProjectFixture]:
    """A project in a database with asynchronous commits: these properties do not cover power loss."""
    url = sa.make_url(database_url)
    if url.get_backend_name() == "postgresql":
        url = url.update_query_dict({"options": "-csynchronous_commit=off"})
    database = Database(url.render_as_string(hide_password=False))
    project = set_up_project(database)
    yield project
    database.close()


def open_run(project: ProjectFixture, history: RunHistory, sign: float = 1.0) -> Run:
    directions = {1.0: history.direction, -1.0: {"maximize": "minimize", "minimize": "maximize"}[history.direction]}
    roles: dict[str, dict[str, Any]] = {
        name: {"role": name, "direction": directions[sign]} for name in ("eval", "proxy", "kl", "loss")
    }
    roles["kl"]["direction"] = "minimize"
    for weight, name in enumerate(EVALS[1 : history.evals], start=2):
        roles[name] = {"role": "eval", "direction": directions[sign], "weight": weight, "critical": weight == 3}
    return project.open_run(metrics=roles, policy=history.policy, total_steps=LAST_STEP)


def ingest_in_order(project: ProjectFixture, history: RunHistory) -> Run:
    """Ingest the history of the run without any disorder, as the reference."""
    run = open_run(project, history)
    for step in history.saved:
        project.submit(run, CheckpointSaved(step, f"file:///{step}"))
    for step in history.changes:
        project.submit(run, build_eval_change(step))
    if history.first:
        project.post_observations(run, history.first)
    if history.resumed_at is not None:
        project.submit(run, Resumed(history.resumed_at))
        if history.second:
            project.post_observations(run, history.second)
    return project.load_run(run)


def summarize_run(run: Run) -> dict[str, Any]:
    return {
        "eval_changes": [(change.step, change.reason) for change in run.eval_changes],
        "verdict": run.verdict,
        "best_checkpoint": run.best_checkpoint,
        "raw_maximum": run.raw_maximum,
        "last_step": run.last_step,
        "attempt": run.attempt,
    }


@HYPOTHESIS_SETTINGS
@given(history=draw_histories())
def test_rebuilt_state_equals_the_cached_one(project: ProjectFixture, history: RunHistory) -> None:
    """Dropped before every batch, the state is rebuilt to the same receipts, verdicts and events."""
    cached, rebuilt = open_run(project, history), open_run(project, history)
    for message in history.messages:
        project.drop_monitor_state(rebuilt)
        cached_receipt, rebuilt_receipt = project.submit(cached, message), project.submit(rebuilt, message)
        assert summarize_run(cached_receipt.run) == summarize_run(rebuilt_receipt.run)
        assert project.cached_monitor(cached) == project.cached_monitor(rebuilt)
        assert (cached_receipt.decision is None) == (rebuilt_receipt.decision is None)
    changes = [
        {row["sequence"]: (row["attempt"], row["verdict"]) for row in project.load_rows(tables.verdicts, run)}
        for run in (cached, rebuilt)
    ]
    assert changes[0] == changes[1]
    types = [sorted(row["type"] for row in project.load_rows(tables.events, run)) for run in (cached, rebuilt)]
    assert types[0] == types[1]


@HYPOTHESIS_SETTINGS
@given(history=draw_histories(), replicas=st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_order_and_replica_do_not_matter(project: ProjectFixture, history: RunHistory, replicas: list[int]) -> None:
    """Shuffled, repeated, batched, spread over processes with caches of their own and with stored states dropped, a run
    ends as it would in order in one process."""
    run = open_run(project, history)
    processes = [replace(project, cache=RunCache()) for _ in range(3)]
    for index, (message, replica) in enumerate(zip(history.messages, itertools.cycle(replicas), strict=False)):
        if index in history.dropped_before:
            processes[replica].drop_monitor_state(run)
        processes[replica].submit(run, message)
    assert summarize_run(project.load_run(run)) == summarize_run(ingest_in_order(project, history))


@MULTI_RUN_SETTINGS
@given(histories=st.lists(draw_histories(), min_size=2, max_size=3), random_source=st.randoms(use_true_random=False))
def test_one_commit_can_hold_many_runs(
    project: ProjectFixture, histories: list[RunHistory], random_source: random.Random
) -> None:
    """Messages of several runs, interleaved and cut into commits of several processes, give the runs that each would be
    alone, whether a process has a run cached, outdated or not at all, or restores it."""
    runs = [open_run(project, history) for history in histories]
    processes = [replace(project, cache=RunCache()) for _ in range(2)]
    queues = [
        [Message(project.id, run.id, message) for message in history.messages]
        for run, history in zip(runs, histories, strict=True)
    ]
    messages = []
    while any(queues):
        messages.append(random_source.choice([queue for queue in queues if queue]).pop(0))
    while messages:
        size = random_source.randint(1, len(messages))
        batch, messages = messages[:size], messages[size:]
        process = random_source.choice([*processes, replace(project, cache=RunCache())])
        assert not any(isinstance(answer, Exception) for answer in process.submit_all(batch))
        if random_source.random() < 0.3:
            save_monitor_states(process, {message.run_id for message in batch})
    for run, history in zip(runs, histories, strict=True):
        assert summarize_run(project.load_run(run)) == summarize_run(ingest_in_order(project, history))


def save_monitor_states(process: ProjectFixture, run_ids: Iterable[UUID]) -> None:
    """Save the monitor states of these runs as the process has them cached."""
    with process.database.transaction() as tx:
        for run_id in run_ids:
            state = process.cache.find_state(run_id)
            assert state is not None
            stored = StoredMonitorState(state.run.version, state_to_json(state.policy, state.monitor).decode())
            ingest.save_state(tx, run_id, stored)


@HYPOTHESIS_SETTINGS
@given(
    cells=st.dictionaries(
        st.tuples(st.integers(0, 2), st.sampled_from(METRICS), st.integers(0, LAST_STEP)), values, max_size=60
    ),
    superseded=st.integers(0, LAST_STEP),
    wanted=st.dictionaries(st.tuples(st.integers(0, 2), st.sampled_from(METRICS)), st.integers(0, LAST_STEP + 1)),
    limit=st.integers(1, LAST_STEP),
)
def test_series_read_together_equal_single_reads(
    project: ProjectFixture,
    cells: dict[tuple[int, str, int], float],
    superseded: int,
    wanted: dict[tuple[int, str], int],
    limit: int,
) -> None:
    """Series read together equal those read one by one; a run with a series that is too long is skipped."""
    runs = [project.open_run() for _ in range(3)]
    with project.database.transaction() as tx:
        insert_observations(
            tx, [(runs[run].id, PostedObservation(name, step, value)) for (run, name, step), value in cells.items()]
        )
        observations.supersede(tx, runs[0].id, superseded, 2)
    with project.database.reading() as tx:
        requested = {(runs[index].id, metric): step for (index, metric), step in wanted.items()}
        together = observations.load_together(tx, requested, limit)
        single_reads = {key: observations.load_series(tx, key[0], [key[1]], step) for key, step in requested.items()}
    assert together.keys() == {run_id for run_id, _ in requested}
    for run_id, loaded in together.items():
        each = [single for key, single in single_reads.items() if key[0] == run_id]
        if loaded is None:
            assert max(map(len, each)) > limit
        else:
            assert max(map(len, each)) <= limit
            assert repr(loaded) == repr([observation for single in each for observation in single])


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)  # the direction is never read by a query
@HYPOTHESIS_SETTINGS
@given(history=draw_histories(evals=(1,)))
def test_minimized_metric_mirrors_the_maximized_one(project: ProjectFixture, history: RunHistory) -> None:
    """A minimized metric is judged like its negative when maximized; scores are reported as measured."""
    run, mirror = open_run(project, history), open_run(project, history, sign=-1.0)
    for message in history.messages:
        project.submit(run, message)
        project.submit(mirror, negate_values(message))
    maximized, minimized = project.load_run(run), project.load_run(mirror)
    assert maximized.verdict == minimized.verdict
    for pointer, reflected in (
        (maximized.best_checkpoint, minimized.best_checkpoint),
        (maximized.raw_maximum, minimized.raw_maximum),
    ):
        assert (pointer is None) == (reflected is None)
        assert pointer is None or reflected is None or negate_score(pointer) == reflected


def negate_score(pointer: BestCheckpoint | RawMaximum) -> BestCheckpoint | RawMaximum:
    if isinstance(pointer, RawMaximum):
        return structs.replace(pointer, score=-pointer.score)
    smoothed = None if pointer.smoothed is None else -pointer.smoothed
    return structs.replace(pointer, score=-pointer.score, smoothed=smoothed)


def negate_values(message: Content) -> Content:
    if not isinstance(message, Observations):
        return message
    return Observations(
        tuple(p if p.metric in ("kl", "lr") else PostedObservation(p.metric, p.step, -p.value) for p in message.points)
    )


@HYPOTHESIS_SETTINGS
@given(history=draw_histories(evals=(1,)))
def test_results_equal_a_simple_reference(project: ProjectFixture, history: RunHistory) -> None:
    """Stop, best checkpoint and raw maximum equal a simple computation over the observations that count."""
    run = ingest_in_order(project, history)
    resumed_at = math.inf if history.resumed_at is None else history.resumed_at
    sign = 1.0 if history.direction == "maximize" else -1.0
    counted = [observation for observation in history.first if observation.step <= resumed_at] + history.second
    scores = [(p.step, sign * p.value) for p in counted if p.metric == "eval" and math.isfinite(p.value)]
    changes = [step for step in history.changes if step <= resumed_at] + [
        history.resumed_at + 1 for step in history.changes[-1:] if history.resumed_at is not None and step > resumed_at
    ]
    scores_by_version = [
        [item for item in scores if sum(step <= item[0] for step in changes) == version]
        for version in range(len(changes) + 1)
    ]
    newest: list[tuple[int, float]] = next(filter(None, reversed(scores_by_version)), [])
    with project.database.reading() as tx:
        saved = {item.step for item in run_details.list_checkpoints(tx, run.id)}
    assert saved == {step for step in history.saved if step <= resumed_at}
    raw = max(newest, key=lambda item: (item[1], -item[0]), default=None)
    choices = [
        choose_best(
            Scores()
            .add_scores(Score(*item) for item in sorted(version_scores))
            .add_checkpoints(dict.fromkeys(saved, ""))
        )
        for version_scores in reversed(scores_by_version)
    ]
    chosen = next(filter(None, choices), None)
    best = chosen and (chosen.step, chosen.score)
    assert read_step_and_score(run.raw_maximum) == (raw and (raw[0], sign * raw[1]))
    assert read_step_and_score(run.best_checkpoint) == (best and (best[0], sign * best[1]))
    if history.policy == "paper":
        stop = next(
            (
                stop
                for version_scores in scores_by_version
                if (stop := find_first_stop(version_scores, k=3)) is not None
            ),
            None,
        )
        assert (run.verdict.stops) == (stop is not None)
        assert stop is None or run.verdict.step == stop


def read_step_and_score(pointer: BestCheckpoint | RawMaximum | None) -> tuple[int, float] | None:
    return (pointer.step, pointer.score) if pointer else None


def find_first_stop(scores: list[tuple[int, float]], k: int) -> int | None:
    for end in range(k, len(scores)):
        window = [value for _, value in scores[end - k : end + 1]]
        if all(later < earlier for earlier, later in itertools.pairwise(window)):
            return scores[end][0]
    return None
