"""Figures computed from counts of cases, the lists of cases behind each, and the weekly digest of them."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from evalstop_service.domain.decision_commands import Vetoed
from evalstop_service.evaluation import digest, figures
from evalstop_service.store import audit, cases, tables
from evalstop_service.store.cases import CaseFilter, Grouping, Key
from evalstop_service.store.database import Database

from tests.fixtures.statements import record_statements
from tests.service.case_rows import insert_cases, judge_call
from tests.service.project_fixture import ALL_ROLES_POLICY, NOW, ProjectFixture, set_up_project

LATER = NOW + timedelta(days=40)


@pytest.fixture
def project_with_cases(project: ProjectFixture) -> ProjectFixture:
    """A project with cases of two policies, two kinds of jobs and two months."""
    database = project.database
    first, second = project.open_run(policy="paper"), project.open_run(policy="watch-all-roles")
    project.add_policy(ALL_ROLES_POLICY | {"at_least": 2})
    third = project.open_run(policy="watch-all-roles")
    decline, others = {"k_decline": judge_call("right", 10, 2.0)}, {"posterior": judge_call("right", 20, 1.0)}
    wrong = {"k_decline": judge_call("wrong")}
    insert_cases(database, first, 8, delay_steps=10, gpu_hours=4.0, gpu_hours_saved=2.0, calls=decline | others)
    healthy: dict[str, Any] = {"outcome": "wrong", "run_outcome": "healthy", "calls": wrong}
    insert_cases(database, first, 2, gpu_hours=4.0, gpu_hours_lost=3.0, **healthy)
    insert_cases(
        database, first, 1, outcome="unknown", run_outcome="undecided", calls={"k_decline": judge_call("unknown")}
    )
    insert_cases(database, first, 30, treatment=None, run_outcome="healthy")
    insert_cases(database, first, 5, treatment=None, outcome="wrong", calls=others)
    insert_cases(database, second, 3, LATER, job_kind="rlhf", delay_steps=50, calls=decline)
    held_out: dict[str, Any] = {"observed_probability": 0.1, "outcome": "wrong", "calls": wrong}
    insert_cases(database, second, 4, LATER, job_kind="rlhf", gpu_hours_lost=1.0, **held_out)
    enforced: dict[str, Any] = {"treatment": "stopped", "observed_probability": 0.1}
    insert_cases(database, second, 9, LATER, gpu_hours_saved=7.0, calls=decline, **enforced)
    insert_cases(database, second, 1, LATER, outcome="wrong", gpu_hours_lost=5.0, gpu_hours_saved=7.0, **enforced)
    insert_cases(database, second, 2, LATER, treatment="prevented", outcome="wrong")
    insert_cases(database, second, 1, LATER, outcome="unknown", gpu_hours_saved=4.0, **enforced)
    insert_cases(database, third, 1, LATER)
    return project


def load_figures(project: ProjectFixture, *by: Grouping, **wanted: object) -> dict[Key, figures.GroupFigures]:
    with project.database.reading() as tx:
        groups = figures.load_figures(tx, project.id, CaseFilter(**wanted), by)  # type: ignore[arg-type]
    return {group.key: group for group in groups}


def test_figures_of_a_policy_exclude_enforced_stops(project_with_cases: ProjectFixture) -> None:
    """Precision, recall and hours come from observed and unflagged cases; enforced stops are counted apart."""
    groups = load_figures(project_with_cases, "policy")
    assert list(groups) == [("paper", 1), ("watch-all-roles", 1), ("watch-all-roles", 2)]
    paper, all_roles, newest = groups.values()
    assert paper.precision.value == pytest.approx(0.8)
    assert (paper.precision.decided, paper.precision.undecided) == (10, 1)
    assert paper.recall.value == pytest.approx(8 / 13)
    assert paper.false_stops.value == pytest.approx(2 / 32)
    assert paper.delays == figures.Delays(8, 10, 10, 10)
    assert (paper.hours.would_have_saved, paper.hours.would_have_lost, paper.hours.without_gpus) == (16, 6, 1)
    assert paper.hours.lost == 0  # nothing was carried out
    assert all_roles.precision.value == pytest.approx(3 / (3 + 40))
    assert all_roles.hours.lost == pytest.approx(4 * 0.9 / 0.1)
    assert (all_roles.hours.saved, all_roles.hours.saved_if_right, all_roles.hours.lost_as_reported) == (63, 4, 5)
    assert (paper.hours.since, all_roles.hours.since) == (NOW, LATER)
    assert all_roles.counts["stopped"] == {"right": 9, "wrong": 1, "unknown": 1}
    assert newest.precision.decided == 1


@pytest.mark.parametrize("by", [(), ("policy",)])
def test_each_count_equals_its_list_of_cases(project_with_cases: ProjectFixture, by: tuple[Grouping, ...]) -> None:
    """The list of cases for a cell of a group has as many entries as the cell counts."""
    for group in load_figures(project_with_cases, *by).values():
        group_filter = figures.select_version(CaseFilter(), group.key)
        for row in figures.ROWS:
            for outcome in figures.OUTCOMES:
                with project_with_cases.database.reading() as tx:
                    listed = cases.list_cases(
                        tx, project_with_cases.id, figures.select_cell(group_filter, row, outcome), limit=100
                    )
                assert len(listed) == group.counts[row][outcome]


def test_detectors_of_a_policy_are_measured_on_the_same_runs(project_with_cases: ProjectFixture) -> None:
    """Each case in which nobody stopped the run counts for each detector, called or silent, with its weight."""
    groups = load_figures(project_with_cases, "policy", "detector")
    decline, posterior = groups["paper", 1, "k_decline"], groups["paper", 1, "posterior"]
    assert (decline.observes, posterior.observes) == (False, True)
    assert decline.counts["observed"] == {"right": 8, "wrong": 2, "unknown": 1}
    assert posterior.counts["observed"] == {"right": 13, "wrong": 0, "unknown": 0}
    assert decline.counts["passed"] == {"right": 30, "wrong": 5, "unknown": 0}
    assert posterior.counts["passed"] == {"right": 32, "wrong": 0, "unknown": 1}
    assert (decline.precision.value, decline.recall.value) == pytest.approx((8 / 10, 8 / 13))
    assert (posterior.precision.value, posterior.recall.value, posterior.false_stops.value) == (1, 1, 0)
    assert posterior.delays == figures.Delays(13, 20, 20, 20)
    assert (decline.hours.would_have_saved, posterior.hours.would_have_saved) == (16, 13)
    enforced = groups["watch-all-roles", 1, "k_decline"]
    assert enforced.precision.value == pytest.approx(3 / (3 + 4 / 0.1))
    assert enforced.counts["stopped"] == {"right": 9, "wrong": 0, "unknown": 0}, "labels, which do not count"
    silent = groups["watch-all-roles", 1, "loss"]
    assert silent.precision.value is None
    assert silent.counts["passed"] == {"right": 0, "wrong": 7, "unknown": 0}


def test_detector_that_decides_is_named_so_where_all_its_cases_were_stopped(project: ProjectFixture) -> None:
    """Stopped cases count for no detector's figures, but their policy says which of its detectors decide."""
    run = project.open_run(policy="paper")
    insert_cases(project.database, run, 2, treatment="stopped", calls={"k_decline": judge_call("right", 10, 2.0)})
    assert [group.observes for group in load_figures(project, "policy", "detector").values()] == [False]


def test_cases_in_which_two_detectors_disagree_are_listed(project_with_cases: ProjectFixture) -> None:
    """One called and the other did not, in runs that nobody stopped."""
    wanted = CaseFilter(policy="paper", detector="k_decline", silent="posterior")
    with project_with_cases.database.reading() as tx:
        listed = cases.list_cases(tx, project_with_cases.id, wanted, limit=100)
    assert sorted(case.run_outcome for case in listed) == ["healthy", "healthy", "undecided"]


def test_cases_are_grouped_by_time(project_with_cases: ProjectFixture) -> None:
    """A case counts for the week in which it ended."""
    assert list(load_figures(project_with_cases, "week")) == [("2025-12-29",), ("2026-02-09",)]
    assert list(load_figures(project_with_cases, "job_kind")) == [("rlhf",), (None,)]
    by_week = load_figures(project_with_cases, "detector", "week")
    assert by_week["k_decline", "2025-12-29"].precision.decided == 10


def test_figures_are_filtered(project_with_cases: ProjectFixture) -> None:
    """Figures count only the cases that match the filter."""
    assert load_figures(project_with_cases, policy="watch-all-roles", version=1)[()].precision.decided == 7
    assert load_figures(project_with_cases, policy="paper", detector="posterior")[()].precision.decided == 13
    assert load_figures(project_with_cases, since=LATER, job_kind="rlhf")[()].precision.decided == 7
    assert load_figures(project_with_cases, until=NOW)[()].precision.value is None


def test_cases_are_listed_by_page(project_with_cases: ProjectFixture) -> None:
    """Over all pages each case comes once, the one that was written last first."""
    listed, before = [], None
    with project_with_cases.database.reading() as tx:
        while page := cases.list_cases(tx, project_with_cases.id, CaseFilter(), before=before, limit=7):
            listed += page
            before = page[-1].revision
    assert len({(case.run_id, case.attempt) for case in listed}) == len(listed) == 67
    assert listed == sorted(listed, key=lambda case: case.revision, reverse=True)


def test_cases_of_other_projects_do_not_count(project_with_cases: ProjectFixture, database: Database) -> None:
    """A project without cases has no precision."""
    assert load_figures(set_up_project(database))[()].precision.value is None


def test_calls_are_counted_in_the_order_of_an_index(postgres_database: Database) -> None:
    """Hundreds of thousands of calls are counted as an index lists them: PostgreSQL need not sort them first."""
    project, database = set_up_project(postgres_database), postgres_database
    with database.transaction() as tx, record_statements(database) as statements:
        cases.count_calls(tx, project.id, CaseFilter(), ["policy", "detector"])
    (counting,) = [statement for statement in statements if "FROM case_calls" in statement]
    with database.transaction() as tx:
        tx.exec_driver_sql("SET LOCAL enable_seqscan TO off; SET LOCAL enable_bitmapscan TO off")
        tx.exec_driver_sql("SET LOCAL enable_hashagg TO off")
        values = {"coalesce_2": 0.0, "project_id_1": project.id}
        plan = "\n".join(tx.exec_driver_sql(f"EXPLAIN {counting}", values).scalars())
    assert "Index Only Scan using ix_case_calls_counted" in plan
    assert "Sort" not in plan


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
