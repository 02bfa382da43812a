"""Counts of cases become figures, on both databases, and each figure leads to the cases behind it."""

from __future__ import annotations

from datetime import timedelta

import pytest
from evalstop_service.evaluation import figures
from evalstop_service.store import case_counts, cases, policies, projects
from evalstop_service.store.case_counts import CaseFilter, Grouping, Key
from evalstop_service.store.database import Database

from tests.service.case_rows import insert_cases
from tests.service.project_fixture import ALL_ROLES_POLICY, NOW, ProjectFixture, set_up_project

LATER = NOW + timedelta(days=40)


@pytest.fixture
def told(project: ProjectFixture) -> ProjectFixture:
    """A project with cases of two policies, two kinds of jobs and two months."""
    database = project.database
    first, second = project.open_run(policy="paper"), project.open_run(policy="watch-all-roles")
    with database.transaction() as tx:
        policies.add_policy(
            tx, projects.get_project(tx, project.id), "watch-all-roles", ALL_ROLES_POLICY | {"at_least": 2}, NOW
        )
    third = project.open_run(policy="watch-all-roles")
    insert_cases(database, first, 8, delay_steps=10, gpu_hours=4.0, gpu_hours_saved=2.0)
    insert_cases(database, first, 2, outcome="wrong", run_outcome="healthy", gpu_hours=4.0, gpu_hours_lost=3.0)
    insert_cases(database, first, 1, outcome="unknown", run_outcome="undecided")
    insert_cases(database, first, 30, treatment=None, run_outcome="healthy")
    insert_cases(database, first, 5, treatment=None, outcome="wrong")
    insert_cases(database, second, 3, LATER, job_kind="rlhf", detectors=["cusum", "floor"], delay_steps=50)
    insert_cases(
        database, second, 4, LATER, job_kind="rlhf", observed_probability=0.1, outcome="wrong", gpu_hours_lost=1.0
    )
    insert_cases(database, second, 9, LATER, treatment="stopped", observed_probability=0.1, gpu_hours_saved=7.0)
    insert_cases(
        database, second, 1, LATER, treatment="stopped", outcome="wrong", gpu_hours_lost=5.0, gpu_hours_saved=7.0
    )
    insert_cases(database, second, 2, LATER, treatment="prevented", outcome="wrong")
    insert_cases(database, second, 1, LATER, treatment="stopped", outcome="unknown", gpu_hours_saved=4.0)
    insert_cases(database, third, 1, LATER)
    return project


def measure(project: ProjectFixture, *by: Grouping, **wanted: object) -> dict[Key, figures.GroupFigures]:
    with project.database.reading() as tx:
        found = figures.load_figures(tx, project.id, CaseFilter(**wanted), by)  # type: ignore[arg-type]
    return {one.key: one for one in found}


def test_figures_of_a_policy(told: ProjectFixture) -> None:
    """What was observed is counted, what was never flagged beside it, and what was carried out is not mixed in."""
    found = measure(told, "policy")
    assert list(found) == [("paper", 1), ("watch-all-roles", 1), ("watch-all-roles", 2)]
    paper, watchful, newest = found.values()
    assert paper.precision.value == pytest.approx(0.8)
    assert (paper.precision.decided, paper.precision.undecided) == (10, 1)
    assert paper.recall is not None
    assert paper.recall.value == pytest.approx(8 / 13)
    assert paper.false_stops is not None
    assert paper.false_stops.value == pytest.approx(2 / 32)
    assert paper.delays == figures.Delays(8, 10, 10, 10)
    assert (paper.hours.would_have_saved, paper.hours.would_have_lost, paper.hours.without_gpus) == (16, 6, 1)
    assert paper.hours.lost == 0  # nothing was carried out
    assert watchful.precision.value == pytest.approx(3 / (3 + 40))
    assert watchful.hours.lost == pytest.approx(4 * 0.9 / 0.1)
    assert (watchful.hours.saved, watchful.hours.saved_if_right, watchful.hours.lost_as_reported) == (63, 4, 5)
    assert (paper.hours.since, watchful.hours.since) == (NOW, LATER)
    assert watchful.counts["stopped"] == {"right": 9, "wrong": 1, "unknown": 1}
    assert newest.precision.decided == 1


BY: list[tuple[Grouping, ...]] = [
    (),
    ("policy",),
    ("detector",),
    ("job_kind",),
    ("day",),
    ("policy", "week"),
    ("month",),
]


@pytest.mark.parametrize("by", BY)
def test_each_count_leads_to_its_cases(told: ProjectFixture, by: tuple[Grouping, ...]) -> None:
    """The cases that are listed for a cell of a group are as many as it counts."""
    for one in measure(told, *by).values():
        own = figures.select_group(CaseFilter(), by, one.key)
        for row in figures.ROWS:
            for outcome in figures.OUTCOMES:
                with told.database.reading() as tx:
                    listed = case_counts.list_cases(tx, told.id, figures.select_cell(own, row, outcome), limit=100)
                assert len(listed) == one.counts[row][outcome]


def test_groups(told: ProjectFixture) -> None:
    """A case counts for each detector that called for its stop, and for the month in which it ended."""
    by_detector = measure(told, "detector")
    assert {key: one.precision.decided for key, one in by_detector.items()} == {
        ("cusum",): 3,
        ("floor",): 3,
        ("k_decline",): 15,
    }
    assert by_detector["cusum",].recall is None
    assert list(measure(told, "month")) == [("2026-01-01",), ("2026-02-01",)]
    assert list(measure(told, "week")) == [("2025-12-29",), ("2026-02-09",)]
    assert list(measure(told, "job_kind")) == [("rlhf",), (None,)]


def test_filters(told: ProjectFixture) -> None:
    """Figures and lists are of what was asked for alone."""
    assert measure(told, policy="watch-all-roles", version=1)[()].precision.decided == 7
    assert measure(told, detector="floor")[()].precision.decided == 3
    assert measure(told, since=LATER, job_kind="rlhf")[()].precision.decided == 7
    assert measure(told, until=NOW)[()].precision.value is None


def test_pages_of_cases(told: ProjectFixture) -> None:
    """Read page by page the list holds each case once, those that ended last first."""
    found, before = [], None
    with told.database.reading() as tx:
        while page := case_counts.list_cases(tx, told.id, CaseFilter(), before=before, limit=7):
            found += page
            before = page[-1].ended_at, page[-1].run_id, page[-1].attempt
    assert len({(one.run_id, one.attempt) for one in found}) == len(found) == 67
    assert found == sorted(found, key=lambda one: one.ended_at, reverse=True)


def test_nothing_of_another_project(told: ProjectFixture, database: Database) -> None:
    """Cases of one project are counted in no other."""
    assert measure(set_up_project(database))[()].precision.value is None


def test_counted_once_for_all_groups(told: ProjectFixture) -> None:
    """What is counted by the detectors that called together gives the same figures as each grouping counted by itself,
    and a case of two detectors counts once for its policy."""
    with told.database.reading() as tx:
        flagged = case_counts.count_flagged(tx, told.id, CaseFilter(), ("policy", "called"))
        late = case_counts.count_delays(tx, told.id, CaseFilter(), ("policy", "called"))
        passed = case_counts.count_unflagged(tx, told.id, CaseFilter(), ("policy",))
    counts = [*flagged, *passed]

    def policy(key: Key) -> list[Key]:
        return [key[:2]]

    def detectors(key: Key) -> list[Key]:
        return [(name,) for name in key[2]]

    by_policy = figures.compute_figures(figures.regroup(counts, policy), figures.regroup(late, policy))
    assert by_policy == list(measure(told, "policy").values())
    of_flagged = figures.regroup(flagged, detectors), figures.regroup(late, detectors)
    assert figures.compute_figures(*of_flagged, whole=False) == list(measure(told, "detector").values())
    assert figures.compute_total(counts, late) == measure(told)[()]


def test_the_revision_of_cases(told: ProjectFixture) -> None:
    """It is another once a case is made anew, though all the same was found, and stays while nothing happens."""

    def revision() -> str:
        with told.database.reading() as tx:
            return case_counts.read_revision(tx, told.id)

    before = revision()
    assert revision() == before
    with told.database.transaction() as tx:
        oldest = min(case_counts.list_cases(tx, told.id, CaseFilter(), limit=100), key=lambda one: one.attempt)
        known = cases.find_case(tx, oldest.run_id, oldest.attempt)
        assert known is not None
        cases.save_case(tx, known)
    assert revision() != before
