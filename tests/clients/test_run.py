"""A run, as a trainer uses it, against the fake service over real HTTP."""

from __future__ import annotations

import logging
import os
import pickle
import sys
import tempfile
import threading
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evalstop_client import ConfigurationError, Limits, Run
from evalstop_client.settings import choose_spool_folder

from tests.clients.fake_service import KEY, Answer, FakeServer, FakeService
from tests.clients.programs import wait_until
from tests.clients.runs import METRICS, answer_on_path, list_messages, list_posts, open_run

pytestmark = pytest.mark.usefixtures("ended_runs")


def test_calls_arrive_in_order(server: FakeServer, service: FakeService) -> None:
    """Opening, observations, checkpoints, resume and finish arrive in the order of the calls."""
    options = {"policy": "paper", "mode": "shadow", "total_steps": 100}
    with open_run(server, metrics=METRICS, labels={"team": "x"}, **options) as run:
        run.log({"score": 0.5, "kl": np.float32(0.25)}, step=1, stderr={"score": 0.125})
        run.checkpoint(Path("/ckpt/1"), step=1)
        run.log({"score": float("nan")}, step=2)
        run.resume(step=1)
        run.log({"score": 0.75}, step=2)
    posts = list_posts(service)
    assert [kind for kind, _ in posts] == [
        "runs", "observations", "observations", "checkpoints", "observations", "resume", "observations", "finish"
    ]  # fmt: skip
    fields = {"name": "a run", "metrics": METRICS, "labels": {"team": "x"}, **options}
    assert {name: value for name, value in posts[0][1].items() if name not in ("job", "opening", "key_hash")} == fields
    assert posts[1][1].items() >= {"metric": "score", "step": 1, "value": 0.5, "stderr": 0.125}.items()
    assert posts[4][1]["value"] == "NaN"
    assert service.find_run("a run").checkpoints == {1: "/ckpt/1"}
    assert service.find_run("a run").status == "completed"


def test_settings_are_read_from_the_environment(
    server: FakeServer, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """URL, key, name and labels are read from the environment; arguments win."""
    monkeypatch.setenv("EVALSTOP_URL", server.url + "/")
    monkeypatch.setenv("EVALSTOP_KEY", KEY + "\n")
    monkeypatch.setenv("EVALSTOP_RUN_NAME", "from outside")
    monkeypatch.setenv("EVALSTOP_LABELS", "receiver=abc, seed=1")
    with Run(labels={"seed": "2"}) as run:
        assert run.name == "from outside"
    labels = service.find_run("from outside").opening["labels"]
    assert labels.pop("process_id").startswith(f"{os.getpid()}:"), "a part of its job that can be ended alone"
    assert labels == {"receiver": "abc", "seed": "2"}


def test_odd_descriptions_do_not_keep_a_run_from_being_watched(server: FakeServer, service: FakeService) -> None:
    """Numbers become text as in labels, one text is one tag, and a length that stands for no end is left out."""
    odd: dict[str, Any] = {"owner": 7, "group": 3, "tags": "sweep", "total_steps": sys.maxsize}
    with open_run(server, **odd):
        pass
    opening = service.find_run("a run").opening
    assert (opening["owner"], opening["group"], opening["tags"]) == ("7", "3", ["sweep"])
    assert "total_steps" not in opening


def test_run_without_a_url_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Without a URL, as on a laptop, a run accepts every call, reports nothing, and says so once."""
    with Run("offline", metrics=METRICS) as run:
        for step in range(100):
            run.log({"score": 1.0}, step=step)
        assert not run.should_stop
        assert run.verdict is None
        assert run.flush()
        assert repr(run) == "<Run offline: not reported>"
    assert list_messages(caplog) == ["evalstop: no url is set (EVALSTOP_URL): the run is not reported"]


def test_user_without_a_home_spools_in_the_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user that no file names has no home: its run is opened all the same."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    folder = choose_spool_folder(None, {}, None, "a run")
    assert folder.parent == Path(tempfile.gettempdir()) / f"evalstop-spool-{2**31 - 7}"


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": "localhost:8787"},
        {"url": "ftp://x"},
        {"url": "http://"},
        {"url": "http://[::1"},
        {"url": "http://x:99999"},
        {"key": "esk_ two"},
        {"key": "esk_é"},
        {"metrics": {"score": {"signal": "score"}}},
        {"metrics": {"score": {"role": "eval", "direction": "up"}}},
        {"metrics": {"a": "eval"}},
        {"mode": "loud"},
        {"total_steps": 0},
        {"total_steps": "many"},
        {"name": ""},
        {"resume": "never"},
    ],
)
def test_invalid_settings_are_errors(wrong: dict[str, Any]) -> None:
    """A setting that can never work is a ConfigurationError that names it."""
    with pytest.raises(ConfigurationError) as raised:
        Run(**{"url": "http://127.0.0.1:1", "name": "a run", **wrong})
    assert next(iter(wrong)) in str(raised.value)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_should_stop_is_in_the_answer_to_a_post(server: FakeServer, service: FakeService) -> None:
    """The answer to observations sets should_stop and the verdict."""
    service.stop_at_step = 2
    with open_run(server, limits=Limits(poll_seconds=60)) as run:
        run.log({"score": 1.0}, step=1)
        assert run.flush()
        assert not run.should_stop
        run.log({"score": 1.0}, step=2)
        wait_until(lambda: run.should_stop)
        assert run.verdict is not None
        assert (run.verdict.verdict, run.verdict.reason, run.verdict.step) == ("stop", "the fake says so", 2)
        assert run.id == service.find_run("a run").id


def test_guessed_role_is_logged_once(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """A metric whose guessed role has to be confirmed is named in one warning."""
    service.guessed = ["eval_foo"]
    with caplog.at_level(logging.WARNING, "evalstop_client"), open_run(server) as run:
        for step in (1, 2):
            run.log({"eval_foo": 1.0}, step=step)
            assert run.flush()
    assert ["eval_foo guessed: confirm" in line for line in caplog.messages].count(True) == 1


def test_idle_run_gets_the_stop_by_heartbeat(server: FakeServer, service: FakeService) -> None:
    """Between evals a run posts heartbeats, and their answers set should_stop; its page stays known."""
    with open_run(server) as run:
        run.log({"score": 1.0}, step=5)
        assert run.flush()
        service.stop_at_step = 5
        wait_until(lambda: run.should_stop)
        wait_until(lambda: service.heartbeats > 3)
        assert run.url == f"{server.url}/runs/{run.id}"
    assert service.requests.count(("POST", f"/api/v1/runs/{run.id}/heartbeat")) == service.heartbeats


def test_exception_marks_the_run_failed(server: FakeServer, service: FakeService) -> None:
    """An exception in the block marks the run failed, and is raised."""
    with pytest.raises(ZeroDivisionError), open_run(server):
        raise ZeroDivisionError
    assert service.find_run("a run").status == "failed"


def test_exit_with_0_marks_the_run_completed(server: FakeServer, service: FakeService) -> None:
    """sys.exit(0) in the block is not a failure."""
    with pytest.raises(SystemExit), open_run(server):
        raise SystemExit(0)
    assert service.find_run("a run").status == "completed"


def test_calls_after_finish_are_dropped(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """After finish() nothing more is sent; what is dropped is counted and logged once."""
    with open_run(server) as run:
        run.finish("failed")
        run.finish()
        run.log({"score": 1.0, "kl": 1.0}, step=1)
        run.checkpoint("file:///a", step=1)
        run.resume(step=1)
    assert [kind for kind, _ in list_posts(service)] == ["runs", "finish"]
    assert run.dropped == 4
    assert len(list_messages(caplog)) == 1


def test_invalid_arguments_are_dropped_and_logged_once(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """No call raises: invalid values are dropped, counted, and logged once for each kind."""
    invalid: Any = object()
    with open_run(server) as run:
        for _ in range(3):
            run.log({"score": "high", "kl": 1.0, "": 2.0}, step=1)
            run.log({"score": 1.0}, step=-1)
            run.log(invalid, step=1)
            run.checkpoint("", step=1)
            run.checkpoint(invalid, step=2)
            run.resume(step=invalid)
    assert run.dropped == 3 * 7
    assert len(list_messages(caplog)) == len({"metric", "value", "step", "values", "checkpoint", "resume"})
    assert [body["metric"] for kind, body in list_posts(service) if kind == "observations"] == ["kl"] * 3


def test_many_observations_are_sent_in_few_requests(server: FakeServer, service: FakeService) -> None:
    """What is logged during a request is sent with the next one, in order."""
    with open_run(server) as run:
        for step in range(5_000):
            run.log({"score": float(step)}, step=step)
        run.log({f"layer {number}": 1.0 for number in range(2_500)}, step=5_000)
    assert [body["step"] for kind, body in list_posts(service) if kind == "observations"][:5_000] == list(range(5_000))
    assert len(service.find_run("a run").observations) == 7_500
    assert len(service.requests) < 500
    assert all(len(body.get("observations", [])) <= 2_500 for _, body in service.posts)


def test_two_processes_may_report_to_one_run(server: FakeServer, service: FakeService) -> None:
    """Two Run objects of one name and job share the run, and have their own spools."""
    with open_run(server) as first, open_run(server) as second:
        first.log({"score": 1.0}, step=1)
        second.log({"kl": 1.0}, step=1)
        assert first.flush()
        assert second.flush()
        assert len(service.find_run("a run").observations) == 2


def test_log_is_thread_safe(server: FakeServer, service: FakeService) -> None:
    """What eight threads log at once all arrives."""
    with open_run(server) as run:

        def log_hundred(metric: str) -> None:
            for step in range(100):
                run.log({metric: 1.0}, step=step)

        threads = [threading.Thread(target=log_hundred, args=(f"m{number}",)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(service.find_run("a run").observations) == 800


def test_key_is_not_in_log_or_spool(server: FakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The key is neither logged nor written to disk."""
    caplog.set_level(logging.DEBUG)
    with open_run(server, key="esk_sentinel", limits=Limits(flush_seconds=1)) as run:
        run.log({"score": 1.0}, step=1)
        assert "sentinel" not in repr(run._settings)
    assert "sentinel" not in caplog.text
    assert not any("sentinel" in path.read_text() for path in (tmp_path / "spool").rglob("*.*") if path.is_file())


def test_eval_change_is_posted_in_order(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """eval_changed() is posted between the observations around it; without a reason it is dropped."""
    metrics = {"score": {"role": "eval", "version": "gsm8k-v1"}}
    with open_run(server, metrics=metrics) as run:
        run.log({"score": 0.5}, step=1)
        run.eval_changed(step=2, why="a stricter grader", version="gsm8k-v2")
        run.eval_changed(step=2, why="")
        run.log({"score": 0.4}, step=2)
    posts = [(kind, body) for kind, body in list_posts(service) if kind not in ("runs", "finish")]
    assert [kind for kind, _ in posts] == ["observations", "eval-changes", "observations"]
    assert posts[1][1] == {"step": 2, "reason": "a stricter grader", "version": "gsm8k-v2"}
    assert any("must be a non-negative integer, and why '' a text" in line for line in caplog.messages)


def test_alert_is_posted_with_an_id(server: FakeServer, service: FakeService) -> None:
    """alert() is posted with an id of its own, as one line; what is not a text is dropped."""
    with open_run(server, metrics=METRICS) as run:
        run.alert("the grader\nis slow", "9 s an answer")
        run.alert("")
        run.alert(3)  # type: ignore[arg-type]
    (body,) = [body for kind, body in list_posts(service) if kind == "alerts"]
    assert (body["title"], body["text"]) == ("the grader is slow", "9 s an answer")
    assert uuid.UUID(body["id"])
    assert run.dropped == 2


def test_second_start_opens_a_new_run(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """Opening a name whose run has ended opens another run, and a warning says its name and how to resume."""
    with open_run(server) as first:
        first.log({"score": 1.0}, step=1)
    with open_run(server) as second:
        assert second.flush()
        second.log({"score": 2.0}, step=1)
        assert (first.name, second.name) == ("a run", "a run-2")
    assert list(service.find_run("a run").observations.values()) == [1.0]
    assert list(service.find_run("a run-2").observations.values()) == [2.0]
    (message,) = list_messages(caplog)
    assert all(part in message for part in ("this run is called 'a run-2'", 'resume="allow"'))


@pytest.mark.parametrize("resume", ["allow", "must"])
def test_resume_option_continues_an_ended_run(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture, resume: str
) -> None:
    """With `resume` the ended run continues, and later observations form a new attempt."""
    with open_run(server) as first:
        first.log({"score": 1.0}, step=1)
    with open_run(server, resume=resume) as second:
        second.resume(step=0)
        second.log({"score": 2.0}, step=1)
    assert second.id == first.id
    assert service.find_run("a run").observations == {(1, "score", 1): 1.0, (2, "score", 1): 2.0}
    assert list_messages(caplog) == []


def test_reporting_to_an_ended_run_is_logged_as_an_error(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """A run that another process has finished logs one error with the next answer."""
    with open_run(server) as first, open_run(server) as second:
        first.log({"score": 1.0}, step=1)
        assert first.flush()
        assert second.flush()
        second.finish()
        for step in (2, 3):
            first.log({"score": 1.0}, step=step)
            assert first.flush()
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "'a run' has ended (completed)" in errors[0]


def test_earlier_runs_spool_does_not_stop_the_next_run(server: FakeServer, service: FakeService) -> None:
    """Spooled data of an earlier run is sent to that run, whose stop is not taken over."""
    service.scripted_answers = [answer_on_path("/observations", Answer(503, {}))] * 1000
    first = open_run(server, limits=Limits(flush_seconds=0.2))
    first.log({"score": 1.0}, step=7)
    first._close_run()
    stopped = service.find_run("a run")
    assert stopped.observations == {}
    stopped.status, service.stop_at_step = "stopped", 7

    def refuse_others(path: str, body: dict[str, Any]) -> Answer | None:
        return Answer(503, {}) if path.endswith("/runs") and body != stopped.opening else None

    service.scripted_answers = [refuse_others] * 1000
    with open_run(server, limits=Limits(flush_seconds=0.2, poll_seconds=0.05)) as second:
        wait_until(lambda: len(stopped.observations) == 1)
        wait_until(lambda: len(service.scripted_answers) < 1000)
        assert (second.should_stop, second.id) == (False, None)
        service.scripted_answers = []
        second.flush(60)
        assert (second.should_stop, second.name) == (False, "a run-2")


@pytest.mark.parametrize(("job", "order"), [("2", ["new", "new", "old", "old"]), ("1", ["old", "old", "new", "new"])])
def test_new_run_does_not_wait_for_what_an_earlier_run_left(
    server: FakeServer, service: FakeService, monkeypatch: pytest.MonkeyPatch, job: str, order: list[str]
) -> None:
    """What a run of another job left is sent last, after that run was opened; of the same job, it is sent first."""
    limits = Limits(flush_seconds=0.2, batch_observations=2)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    service.scripted_answers = [answer_on_path("", Answer(503, {}))] * 1000
    first = open_run(server, limits=limits)
    for step in range(4):
        first.log({"old": 1.0}, step=step)
    first._close_run()
    monkeypatch.setenv("SLURM_JOB_ID", job)
    second = open_run(server, limits=limits)
    for step in range(4):
        second.log({"new": 1.0}, step=step)
    second.flush()
    service.scripted_answers = []
    assert second.flush(30)
    assert second.name == ("a run" if job == "1" else "a run-2")
    posted = [body["observations"] for path, body in service.posts if path.endswith("/observations")]
    assert [points[0]["metric"] for points in posted] == order
    second.finish()
