"""A run, as a trainer uses it, against a fake service over real HTTP."""

from __future__ import annotations

import logging
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evalstop_client import ConfigurationError, Limits, Run

from tests.clients.fake_service import KEY, Answer, FakeServer, FakeService
from tests.clients.programs import wait_until
from tests.clients.runs import METRICS, answer_on_path, list_posts, logged_messages, open_run

pytestmark = pytest.mark.usefixtures("ended_runs")


def test_everything_arrives_in_the_order_in_which_it_was_made(server: FakeServer, service: FakeService) -> None:
    """Opening, observations, checkpoints, resume and finish reach the service as the trainer made them."""
    the_rest = {"policy": "paper", "mode": "shadow", "total_steps": 100}
    with open_run(server, metrics=METRICS, labels={"team": "x"}, **the_rest) as run:
        run.log({"gold": 0.5, "kl": np.float32(0.25)}, step=1, stderr={"gold": 0.125})
        run.checkpoint(Path("/ckpt/1"), step=1)
        run.log({"gold": float("nan")}, step=2)
        run.resume(step=1)
        run.log({"gold": 0.75}, step=2)
    heard = list_posts(service)
    assert [what for what, _ in heard] == [
        "runs", "observations", "observations", "checkpoints", "observations", "resume", "observations", "finish"
    ]  # fmt: skip
    assert run.length_known
    said = {"name": "a run", "metrics": METRICS, "labels": {"team": "x"}, **the_rest}
    assert {name: value for name, value in heard[0][1].items() if name not in ("job", "opening")} == said
    assert heard[1][1].items() >= {"metric": "gold", "step": 1, "value": 0.5, "stderr": 0.125}.items()
    assert heard[4][1]["value"] == "NaN"
    assert service.find_run("a run").checkpoints == {1: "/ckpt/1"}
    assert service.find_run("a run").status == "completed"


def test_settings_come_from_the_environment(
    server: FakeServer, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that names nothing is told url, key, name and labels by whoever started it; arguments win."""
    monkeypatch.setenv("EVALSTOP_URL", server.url + "/")
    monkeypatch.setenv("EVALSTOP_KEY", KEY + "\n")
    monkeypatch.setenv("EVALSTOP_RUN_NAME", "from outside")
    monkeypatch.setenv("EVALSTOP_LABELS", "receiver=abc, seed=1")
    with Run(labels={"seed": "2"}) as run:
        assert run.name == "from outside"
    assert service.find_run("from outside").opening["labels"] == {"receiver": "abc", "seed": "2"}


def test_without_a_url_nothing_happens_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """A trainer on a laptop runs on, with one line in the log."""
    with Run(metrics=METRICS) as run:
        for step in range(100):
            run.log({"gold": 1.0}, step=step)
        assert not run.should_stop
        assert run.verdict is None
        assert run.flush()
    assert len(logged_messages(caplog)) == 1


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
        {"metrics": {"gold": {"signal": "gold"}}},
        {"metrics": {"gold": {"role": "eval", "direction": "up"}}},
        {"metrics": {"a": {"role": "proxy"}, "b": {"role": "proxy"}}},
        {"metrics": {"a": {"role": "eval", "weight": 0}}},
        {"metrics": {"a": {"role": "proxy", "critical": True}}},
        {"metrics": {"a": "eval"}},
        {"metrics": {"": {"role": "eval"}}},
        {"mode": "loud"},
        {"total_steps": 0},
        {"total_steps": "many"},
        {"name": ""},
        {"resume": "never"},
    ],
)
def test_obviously_wrong_settings_are_told_at_once(wrong: dict[str, Any]) -> None:
    """What can never work is said where it was written, before training begins."""
    with pytest.raises(ConfigurationError) as caught:
        Run(**{"url": "http://127.0.0.1:1", "name": "a run", **wrong})
    assert next(iter(wrong)) in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_should_stop_comes_with_the_answer_to_a_post(server: FakeServer, service: FakeService) -> None:
    """A trainer that logs learns of the stop by that, with the verdict's reason."""
    service.stop_at_step = 2
    with open_run(server, limits=Limits(poll_seconds=60)) as run:
        run.log({"gold": 1.0}, step=1)
        assert run.flush()
        assert not run.should_stop
        run.log({"gold": 1.0}, step=2)
        wait_until(lambda: run.should_stop)
        assert run.verdict is not None
        assert (run.verdict.verdict, run.verdict.reason, run.verdict.step) == ("stop", "the fake says so", 2)
        assert run.id == service.find_run("a run").id


def test_a_guessed_role_is_told_to_the_trainer_once(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """A metric that cannot stop the run until somebody confirms it is named in one line of the log."""
    service.guessed = ["eval_foo"]
    with caplog.at_level(logging.WARNING, "evalstop_client"), open_run(server) as run:
        for step in (1, 2):
            run.log({"eval_foo": 1.0}, step=step)
            assert run.flush()
        guessed = run.guessed
        service.guessed = []
        run.log({"eval_foo": 1.0}, step=3)
        assert run.flush()
        assert (guessed, run.guessed) == (("eval_foo",), ())
    assert ["eval_foo guessed: confirm" in line for line in caplog.messages].count(True) == 1


def test_idle_run_learns_of_the_stop_by_heartbeat(server: FakeServer, service: FakeService) -> None:
    """Between two evals a run posts heartbeats, whose answer says whether it should stop."""
    with open_run(server) as run:
        run.log({"gold": 1.0}, step=5)
        assert run.flush()
        service.stop_at_step = 5
        wait_until(lambda: run.should_stop)
        wait_until(lambda: service.heartbeats > 3)
    assert service.requests.count(("POST", f"/api/v1/runs/{run.id}/heartbeat")) == service.heartbeats


def test_exception_marks_the_run_failed_and_passes(server: FakeServer, service: FakeService) -> None:
    """A trainer that raises is reported as failed, and still raises."""
    with pytest.raises(ZeroDivisionError), open_run(server):
        raise ZeroDivisionError
    assert service.find_run("a run").status == "failed"


def test_clean_exit_inside_the_block_is_a_completion(server: FakeServer, service: FakeService) -> None:
    """sys.exit(0) is how many trainers end: that is no failure."""
    with pytest.raises(SystemExit), open_run(server):
        raise SystemExit(0)
    assert service.find_run("a run").status == "completed"


def test_finish_is_said_once_and_later_calls_are_dropped(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """After finish() nothing more is sent; it is counted, and said once."""
    with open_run(server) as run:
        run.finish("failed")
        run.finish()
        run.log({"gold": 1.0, "kl": 1.0}, step=1)
        run.checkpoint("file:///a", step=1)
        run.resume(step=1)
    assert [what for what, _ in list_posts(service)] == ["runs", "finish"]
    assert run.dropped == 4
    assert len(logged_messages(caplog)) == 1


def test_bad_arguments_are_dropped_counted_and_said_once_a_kind(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """No call raises, whatever it is given; what was good in it is sent."""
    rubbish: Any = object()
    with open_run(server) as run:
        for _ in range(3):
            run.log({"gold": "high", "kl": 1.0, "": 2.0}, step=1)
            run.log({"gold": 1.0}, step=-1)
            run.log(rubbish, step=1)
            run.checkpoint("", step=1)
            run.checkpoint(rubbish, step=2)
            run.resume(step=rubbish)
    assert run.dropped == 3 * 7
    assert len(logged_messages(caplog)) == len({"metric", "value", "step", "values", "checkpoint", "resume"})
    assert [body["metric"] for what, body in list_posts(service) if what == "observations"] == ["kl"] * 3


def test_many_observations_travel_in_few_requests(server: FakeServer, service: FakeService) -> None:
    """What gathers while a request is under way goes with the next one, all of it and in order."""
    with open_run(server) as run:
        for step in range(5_000):
            run.log({"gold": float(step)}, step=step)
        run.log({f"layer {number}": 1.0 for number in range(2_500)}, step=5_000)
    assert [body["step"] for what, body in list_posts(service) if what == "observations"][:5_000] == list(range(5_000))
    assert len(service.find_run("a run").observations) == 7_500
    assert len(service.requests) < 500
    assert all(len(body.get("observations", [])) <= 1_000 for _, body in service.posts)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks where there is fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_child_reports_for_itself_and_does_not_finish_the_run(server: FakeServer, service: FakeService) -> None:
    """A child that logs gets threads of its own; nothing is sent twice, and leaving the block ends nothing."""
    with open_run(server) as run:
        run.log({"gold": 1.0}, step=1)
        assert run.flush()
        child = os.fork()
        if child == 0:
            try:
                run.log({"gold": 2.0}, step=2)
                run.__exit__(None, None, None)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert service.find_run("a run").status == "running"
        run.log({"gold": 3.0}, step=3)
    stored = service.find_run("a run")
    assert {step: value for (_, _, step), value in stored.observations.items()} == {1: 1.0, 2: 2.0, 3: 3.0}
    assert stored.duplicates == 0
    assert stored.status == "completed"


def test_two_runs_of_a_name_at_once_do_not_disturb_each_other(server: FakeServer, service: FakeService) -> None:
    """Two processes of a job may report to the same run: each has its own part of the spool."""
    with open_run(server) as one, open_run(server) as other:
        one.log({"gold": 1.0}, step=1)
        other.log({"kl": 1.0}, step=1)
        assert one.flush()
        assert other.flush()
        assert len(service.find_run("a run").observations) == 2


def test_a_second_start_is_a_run_of_its_own(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """A run of the name of one that has ended is another, which says how it is called; nothing touches the first."""
    with open_run(server) as first:
        first.log({"gold": 1.0}, step=1)
    with open_run(server) as second:
        assert second.flush()
        second.log({"gold": 2.0}, step=1)
        assert (first.name, second.name) == ("a run", "a run-2")
    assert list(service.find_run("a run").observations.values()) == [1.0]
    assert list(service.find_run("a run-2").observations.values()) == [2.0]
    (told,) = logged_messages(caplog)
    assert all(part in told for part in ("this run is called 'a run-2'", 'resume="allow"'))


@pytest.mark.parametrize("resume", ["allow", "must"])
def test_a_trainer_that_says_so_continues_an_ended_run(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture, resume: str
) -> None:
    """With `resume` the run of before is the run, and what follows the checkpoint takes the place of what was."""
    with open_run(server) as first:
        first.log({"gold": 1.0}, step=1)
    with open_run(server, resume=resume) as second:
        second.resume(step=0)
        second.log({"gold": 2.0}, step=1)
    assert second.id == first.id
    assert service.find_run("a run").observations == {(1, "gold", 1): 1.0, (2, "gold", 1): 2.0}
    assert logged_messages(caplog) == []


def test_resuming_nothing_is_an_error_in_the_log(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer that resumes without having opened its run so is told once what to write."""
    with open_run(server):
        pass
    with open_run(server) as second:
        second.resume(step=5)
        second.resume(step=6)
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "resumes from step 5 of nothing" in errors[0]
    assert 'resume="allow"' in errors[0]


def test_reporting_to_an_ended_run_is_an_error_in_the_log(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer whose run another process has ended learns it from the next answer, once."""
    with open_run(server) as one, open_run(server) as other:
        one.log({"gold": 1.0}, step=1)
        assert one.flush()
        assert other.flush()
        other.finish()
        for step in (2, 3):
            one.log({"gold": 1.0}, step=step)
            assert one.flush()
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "'a run' has ended (completed)" in errors[0]


def test_what_an_earlier_run_left_does_not_stop_the_next(server: FakeServer, service: FakeService) -> None:
    """The next run of a name sends what the last one left to the run of that, and does not take over its stop."""
    service.scripted_answers = [answer_on_path("/observations", Answer(503, {}))] * 1000
    first = open_run(server, limits=Limits(flush_seconds=0.2))
    first.log({"gold": 1.0}, step=7)
    first._close()
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


def test_calls_from_many_threads_all_arrive(server: FakeServer, service: FakeService) -> None:
    """log() may be called from any thread."""
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


def test_key_is_nowhere_in_the_log_or_the_spool(
    server: FakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The key is neither written to disk nor said in any message."""
    caplog.set_level(logging.DEBUG)
    with open_run(server, key="esk_telltale", limits=Limits(flush_seconds=1)) as run:
        run.log({"gold": 1.0}, step=1)
        assert "telltale" not in repr(run._settings)
    assert "telltale" not in caplog.text
    assert not any("telltale" in path.read_text() for path in (tmp_path / "spool").rglob("*.*") if path.is_file())


def test_a_changed_measurement_is_told_in_its_place(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """A change of the eval arrives between what was logged before it and after it; one without a reason is dropped."""
    metrics = {"gold": {"role": "eval", "version": "gsm8k-v1"}}
    with open_run(server, metrics=metrics) as run:
        run.log({"gold": 0.5}, step=1)
        run.eval_changed(step=2, why="a stricter grader", version="gsm8k-v2")
        run.eval_changed(step=2, why="")
        run.log({"gold": 0.4}, step=2)
    heard = [(what, body) for what, body in list_posts(service) if what not in ("runs", "finish")]
    assert [what for what, _ in heard] == ["observations", "eval-changes", "observations"]
    assert heard[1][1] == {"step": 2, "reason": "a stricter grader", "version": "gsm8k-v2"}
    assert any("eval_changed: step 2, why ''" in line for line in caplog.messages)


@pytest.mark.parametrize("metrics", [{"kl": {"role": "kl", "version": "2"}}, {"gold": {"role": "eval", "version": 2}}])
def test_only_an_eval_has_a_version(server: FakeServer, metrics: Any) -> None:
    """A version of another role, or one that is no text, is refused before anything is sent."""
    with pytest.raises(ConfigurationError, match="only the eval has one, a text"):
        open_run(server, metrics=metrics)
