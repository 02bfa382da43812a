"""Reading runs and deciding on stops in Python, against a real service."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta

import evalstop
import pytest
from evalstop_client.errors import KeyRefused, NotFound, ServiceAway
from evalstop_client.reading.api import parse_since
from evalstop_client.reading.connection import Connection
from hypothesis import given
from hypothesis import strategies as st

from tests.clients.real_service import FALLING, Project


def test_runs_are_filtered(project: Project) -> None:
    """Name, status, verdict, policy, labels and time narrow the list, newest first."""
    falls = project.report_run("falls", owner="dana", group="sweep", tags=["rl", "b"], labels={"team": "x", "seed": 1})
    with falls, project.report_run("rises", (0.1, 0.2)):
        assert falls.verdict is not None
    api = project.api
    assert [run.name for run in api.runs()] == ["rises", "falls"]
    filters = {"since": "1h", "policy": "paper", "name": "all", "owner": "dana", "group": "sweep"}
    labels: dict[str, str | int | float | bool] = {"seed": 1, "team": "x"}
    (run,) = api.runs(**filters, verdict="stop", status="completed", tags=["b"], labels=labels, mode="enforce")
    assert (run.owner, run.group, run.tags) == ("dana", "sweep", ["rl", "b"])
    row = run.to_row()
    assert (run.name, run.status, run.mode, row["policy"]) == ("falls", "completed", "enforce", "paper@1")
    assert run.best_checkpoint["uri"] == f"file:///{run.best_checkpoint['step']}" == row["best_uri"]
    with pytest.raises(AttributeError, match="'nosuch'"):
        _ = run.nosuch
    assert (run.eval_metric, run.url) == ("eval", f"{project.url}/runs/{run.id}")
    later = datetime.now(UTC) + timedelta(hours=1)
    other_filters = (
        {"verdict": "suspect"},
        {"since": later},
        {"policy": "default"},
        {"labels": {"team": "y"}},
        {"until": "1h"},
    )
    assert [run.name for run in api.runs(tags="rl")] == ["falls"]
    assert [list(api.runs(**other_filter)) for other_filter in other_filters] == [[]] * len(other_filters)
    assert api.run("falls").id == api.run(run.id).id == run.id


def test_pages_are_fetched_as_needed(project: Project) -> None:
    """A list of several pages has each item once, in order."""
    with project.report_run("long", tuple(float(step % 3) for step in range(25))) as run:
        assert run.id is not None
        connection = Connection(project.url, project.key)
        items = connection.pages(f"/runs/{run.id}/observations", {"metric": "eval"}, page=10)
        assert [item["step"] for item in items] == list(range(25))


def test_history_leaves_out_superseded_values(project: Project) -> None:
    """A history has values and standard errors, without values replaced by a resume."""
    with project.report_run("resumed", ()) as run:
        run.log({"eval": 0.5, "loss": 1.0}, step=1, stderr={"eval": 0.125})
        run.log({"eval": float("nan")}, step=2)
        run.resume(step=1)
        run.log({"eval": 0.75}, step=2)
    record = project.api.run("resumed")
    assert [(item.step, item.value, item.stderr) for item in record.history()] == [(1, 0.5, 0.125), (2, 0.75, None)]
    assert [item.value for item in record.history("loss")] == [1.0]


def test_pending_stop_is_vetoed_and_labeled(project: Project) -> None:
    """A pending stop is vetoed with a reason and labeled, and cannot be released afterwards."""
    with project.report_run("falls") as run:
        decision = project.api.run("falls").decision
        assert decision is not None
        assert decision.state == "pending"
        assert decision.veto("curriculum change").state == "vetoed"
        (listed,) = project.api.decisions(state="vetoed")
        assert (listed.id, listed.state_reason, listed.run_name) == (decision.id, "curriculum change", "falls")
        assert project.api.decision(decision.id).label("wrong", "it rose again").outcome["outcome"] == "wrong"
        with pytest.raises(evalstop.ApiError, match="vetoed"):
            decision.release("no")
        stopped = project.api.run("falls").stop("it is over")
        assert stopped.decision is not None
        assert stopped.decision.state in ("pending", "requested")
        assert run.flush()


def test_lists_become_rows_of_data_frames(project: Project) -> None:
    """The rows of a list have a value for each column."""
    with project.report_run("falls"):
        (row,) = project.api.runs().to_rows()
        assert [row[name] for name in ("name", "verdict", "last_step")] == ["falls", "stop", 4]
        assert [item["value"] for item in project.api.run("falls").history().to_rows()] == list(FALLING)
        assert project.api.decisions().to_rows()[0]["run_name"] == "falls"


def test_repr_of_runs_and_lists(project: Project) -> None:
    """A run is one line without its evidence; a list that is not fetched says how to read it."""
    with project.report_run("falls"):
        run = project.api.run("falls")
        assert repr(run) == f"<RunRecord falls: enforce, policy paper@1, verdict stop, decision pending, {run.url}>"
        assert str(run.decision) == "pending"
        assert "to_rows()" in repr(project.api.runs())


def test_errors_have_types(project: Project) -> None:
    """A missing run, a missing scope and an unreachable service raise different ApiErrors."""
    with pytest.raises(NotFound):
        project.api.run("nosuch")
    with pytest.raises(NotFound):
        project.api.decision("0199aa0f-55aa-7c01-b1c2-0f1e2d3c4b5a")
    with pytest.raises(KeyRefused, match="needs read"):
        list(evalstop.Api(project.url, project.create_key("ingest")).runs())
    with pytest.raises(ServiceAway):
        list(evalstop.Api("http://127.0.0.1:1", "esk_x").runs())
    with pytest.raises(evalstop.ConfigurationError, match="key"):
        evalstop.Api(project.url)
    with pytest.raises(evalstop.ConfigurationError, match="url"):
        evalstop.Api(key="esk_x")


def test_since_is_a_time_or_a_period() -> None:
    """Periods from minutes to weeks, ISO times and datetimes are accepted, and nothing else."""
    now = datetime(2026, 3, 1, 12, tzinfo=UTC)
    assert parse_since("90m", now) == now - timedelta(minutes=90)
    assert parse_since("2w", now) == now - timedelta(days=14)
    assert parse_since("2026-02-01", now) == parse_since(datetime(2026, 2, 1), now) == datetime(2026, 2, 1, tzinfo=UTC)  # noqa: DTZ001
    for wrong in ("", "soon", "-3d", "3y", "999999w"):
        with pytest.raises(evalstop.ConfigurationError, match="since"):
            parse_since(wrong, now)


@given(st.text())
def test_any_text_is_a_time_or_an_error(text: str) -> None:
    """Any text is read as a time with a zone, or is a ConfigurationError."""
    with contextlib.suppress(evalstop.ConfigurationError):
        assert parse_since(text, datetime(2026, 3, 1, tzinfo=UTC)).tzinfo is not None


def test_notebooks_show_tables(project: Project) -> None:
    """A list, a run and a decision are tables of HTML, in which names of trainers are escaped and pages are links."""
    with project.report_run("<b>falls</b>"):
        run = project.api.run("<b>falls</b>")
    assert run.decision is not None
    for shown in (project.api.runs(), run, project.api.decisions(), run.decision):
        html = shown._repr_html_()
        assert html.startswith("<table><tr><th>")
        assert "&lt;b&gt;falls&lt;/b&gt;" in html
        assert "<b>" not in html
    assert f'<a href="{run.url}">{run.url}</a>' in run._repr_html_()
    assert project.api.runs(name="none")._repr_html_() == "<table><tr><th>none</th></tr></table>"
