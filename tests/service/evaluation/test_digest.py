"""The weekly digest: what it counts, and that it is sent once a week to those who subscribe to it by name."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from evalstop_service.domain.decision_commands import Vetoed
from evalstop_service.evaluation import digest, figures
from evalstop_service.store import audit, tables
from evalstop_service.store.cases import CaseFilter
from evalstop_service.store.database import Database

from tests.service.case_rows import insert_cases
from tests.service.project_fixture import ProjectFixture, set_up_project

MONDAY = datetime(2026, 1, 5, 7, tzinfo=UTC)


@pytest.fixture
def project(database: Database) -> ProjectFixture:
    return set_up_project(database, veto_window_seconds=900.0)


def subscribe(project: ProjectFixture, *event_types: str) -> None:
    project.add_endpoint(event_types)


def send(project: ProjectFixture, at: datetime) -> bool:
    return digest.send_digest(project.database, project.id, at)


def test_digest_is_sent_once_a_week_on_monday(project: ProjectFixture) -> None:
    """Not before Monday at seven, once by any number of processes, and again a week later."""
    run = project.open_run()
    subscribe(project, "project.digest")
    assert not send(project, MONDAY - timedelta(seconds=1)), "the endpoint is younger than the last Monday"
    assert send(project, MONDAY + timedelta(seconds=1))
    assert not send(project, MONDAY + timedelta(days=6))
    with project.database.transaction() as tx:
        tx.execute(tables.deliveries.delete())
        tx.execute(tables.events.delete())
    assert not send(project, MONDAY + timedelta(days=6)), "retention may have removed the events of the run"
    assert send(project, MONDAY + timedelta(days=7))
    sent = project.load_events(run, "project.digest")
    ends = [json.loads(event["body"])["data"]["digest"]["until"] for event in sent]
    assert ends == ["2026-01-12T07:00:00Z"]
    assert len(project.load_rows(tables.deliveries, run)) == 1


def test_digest_needs_an_endpoint_that_names_it(project: ProjectFixture) -> None:
    """It is off unless an endpoint asks for it by name: `*` does not."""
    project.open_run()
    subscribe(project, "*")
    assert not send(project, MONDAY)


def test_digest_has_the_figures_of_the_pages(project: ProjectFixture) -> None:
    """Its stops and GPU-hours are those of the precision page for the week, and it counts vetoes of the week."""
    run, decision = project.open_declining_run("falls", mode="enforce")
    project.apply_command(decision, Vetoed(project.now, "dana", "a new curriculum"))
    stopped = {"treatment": "stopped", "observed_probability": None, "gpus": 8.0, "gpu_hours": 90.0}
    in_week, before = MONDAY - timedelta(days=1), MONDAY - timedelta(days=9)
    insert_cases(project.database, run, 3, in_week, **stopped, gpu_hours_saved=10.0)
    insert_cases(project.database, run, 1, in_week, **stopped, outcome="wrong", gpu_hours_lost=7.0)
    insert_cases(project.database, run, 2, in_week, **stopped, outcome="unknown", gpu_hours_saved=5.0)
    insert_cases(project.database, run, 4, in_week, gpus=8.0, gpu_hours=90.0, gpu_hours_saved=2.0)
    insert_cases(project.database, run, 5, before, **stopped, gpu_hours_saved=10.0)
    since = MONDAY - digest.WEEK
    with project.database.reading() as tx:
        shown = digest.load_digest(tx, project.id, since, MONDAY)
        (total,) = figures.load_figures(tx, project.id, CaseFilter(since=since, until=MONDAY))
    assert (shown.stops, shown.right, shown.wrong, shown.recorded_only) == (6, 3, 1, 4)
    assert (shown.vetoes, shown.to_label) == (1, 2)
    assert (shown.gpu_hours_saved, shown.gpu_hours_would_have_saved) == (30.0, 8.0)
    assert (shown.gpu_hours_saved, shown.gpu_hours_lost) == (total.hours.saved, total.hours.lost)


def test_job_sends_the_digests_that_are_wanted(project: ProjectFixture) -> None:
    """A worker's job looks at every project, and the audit log says what was sent."""
    other = set_up_project(project.database)
    runs = [project.open_run(), other.open_run()]
    subscribe(project, "project.digest")
    job = digest.create_job(project.database, lambda: MONDAY + timedelta(hours=1))
    for _ in range(2):
        job.do(lambda _seconds: False)
    assert [len(project.load_events(run, "project.digest")) for run in runs] == [1, 0]
    with project.database.reading() as tx:
        (entry,) = audit.list_entries(tx, project.id, action="digest")
    assert entry.details == {"until": "2026-01-05T07:00:00Z"}
