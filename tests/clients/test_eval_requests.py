"""Answers to requests to evaluate, by a training loop and by an evaluator, with a real service."""

from __future__ import annotations

import json
import math
import os
import posixpath
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

import httpx
import numpy as np
import pytest
from evalstop_client import Limits, Run, Summary
from evalstop_client.errors import ConfigurationError
from evalstop_client.eval_request import answer_requests, compare_scores
from evalstop_client.receivers.evaluator import (
    EvaluationFailed,
    check_places,
    check_uri,
    evaluate,
    fill_command,
    read_scores,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.clients.programs import wait_until
from tests.clients.real_service import Project, find_eval_request
from tests.service.web.api.api_calls import create_eval_request, expect_json

SCORES = [min(at, 30.0) - 0.3 * max(0, at - 30) + 4.0 * ((at * at * 7) % 11) / 11 for at in range(60)]
SELDOM = Limits(poll_seconds=60)
SCRIPT = """\
import os, pathlib, sys, time
checkpoint, n, seed = sys.argv[1:]
log = pathlib.Path({log!r})
with log.open("a") as lines:
    lines.write(f"{{checkpoint}} {{n}} {{seed}}\\n")
if len(log.read_text().splitlines()) == 1:
    log.with_name("pid").write_text(str(os.getpid()))
    time.sleep(600)  # the first evaluation never ends
for prompt in range(int(n)):
    print(prompt % 7 - 2.0 * ("now" in checkpoint) + 0.1 * (prompt % 3))
"""


def test_scores_are_compared_by_prompt() -> None:
    """The standard error is that of the paired differences; of two means, that of independent means."""
    comparison = compare_scores([1.0, 5.0, 9.0, 2.0], [0.5, 4.0, 8.5, 1.0])
    assert comparison.difference == -0.75
    assert comparison.stderr == pytest.approx(math.sqrt(4 * 0.25**2 / 3 / 4))
    assert comparison.prompts == 4
    assert compare_scores(Summary(0.5, 0.03), Summary(0.4, 0.04)).stderr == pytest.approx(0.05)


def test_summary_of_numpy_numbers_is_sent_as_json() -> None:
    """Means in numpy's float32, which JSON cannot hold, become plain numbers."""
    best, current = (Summary(*np.array([mean, 0.5], dtype=np.float32)) for mean in (0.75, 0.25))
    assert json.loads(json.dumps(compare_scores(best, current)._asdict()))["difference"] == -0.5


@pytest.mark.parametrize("current", [[1.0], [1.0, math.nan], [1e308, 1e308], [10**400, 1.0], Summary(1.0, 0.1)])
def test_incomparable_evaluations_are_errors(current: Any) -> None:
    """Different prompts, scores that are not finite or too large, and a mean beside scores raise ValueError."""
    with pytest.raises(ValueError, match=r"scores|mean"):
        compare_scores([1.0, 2.0], current)


def test_training_loop_answers_a_request(api: httpx.Client, eval_project: Project) -> None:
    """A request arrives with the answer to a log, and is gone once it is answered."""
    options = eval_project.connection | {"policy": "early", "total_steps": 90, "evaluates": 0.001, "limits": SELDOM}
    answered = []
    with Run(name="loop", metrics={"eval": {"role": "eval"}}, **options) as run:
        run.checkpoint("file:///30", step=30)
        for step, score in enumerate(SCORES):
            run.log({"eval": score}, step=step)
            assert step < 30 or run.flush(30)
            for request in run.eval_requests():
                assert (request.best_step, request.best_uri) == (30, "file:///30")
                answered.append(request)
                scores = [math.sin(prompt * request.seed) for prompt in range(100 * request.multiplier)]
                request.answer(best=scores, current=[x - 2.0 + 0.1 * (i % 2) for i, x in enumerate(scores)])
                assert list(run.eval_requests()) == []
            if answered:
                break
        assert run.flush(30)
        (stored,) = expect_json(api.get(f"/runs/{run.id}/eval-requests"), 200)["items"]
        assert expect_json(api.get(f"/runs/{run.id}"), 200)["eval_share"] == 0.001
    assert stored["id"] == answered[0].id
    assert (stored["difference"], stored["prompts"]) == (pytest.approx(-1.95), 400)


def test_callback_answers_with_the_saved_checkpoint(api: httpx.Client, eval_project: Project) -> None:
    """answer_requests() evaluates both checkpoints; after an exception it tries again at the next one."""
    options = eval_project.connection | {"policy": "early", "total_steps": 90, "evaluates": True, "limits": SELDOM}
    calls: list[tuple[str, int, int]] = []

    def score(uri: str, multiplier: int, seed: int) -> list[float]:
        calls.append((uri, multiplier, seed))
        if len(calls) == 1:
            raise RuntimeError("out of memory")
        return [0.0, 1.0, 3.0] if uri == "file:///30" else [-1.0, 0.5, 1.0]

    with Run(name="callback", metrics={"eval": {"role": "eval"}}, **options) as run:
        run.checkpoint("file:///30", step=30)
        for step, value in enumerate(SCORES):
            run.log({"eval": value}, step=step)
            assert step < 30 or run.flush(30)
            answer_requests(run.eval_requests(), score, f"file:///{step}", step)
            if len(calls) == 3:
                break
        assert run.flush(30)
        (stored,) = expect_json(api.get(f"/runs/{run.id}/eval-requests"), 200)["items"]
    assert [uri for uri, _, _ in calls] == ["file:///30", "file:///30", f"file:///{step}"]
    assert stored["difference"] == pytest.approx(-7 / 6)


@pytest.mark.real
def test_restarted_evaluator_starts_over(api: httpx.Client, eval_project: Project, tmp_path: Path) -> None:
    """An evaluator killed during an evaluation evaluates both checkpoints after its restart, and answers."""
    run_id, request_id = create_eval_request(api)
    checkpoint = {"step": 59, "uri": "file:///models/now"}
    expect_json(api.post(f"/runs/{run_id}/checkpoints", json=checkpoint), 201)
    script, log = tmp_path / "eval.py", tmp_path / "log"
    log.touch()
    script.write_text(SCRIPT.format(log=str(log)))
    environment = os.environ | {"EVALSTOP_URL": eval_project.url, "EVALSTOP_KEY": eval_project.key}
    program = [sys.executable, "-m", "evalstop_client.receivers.cli", "evaluator", "--prompts", "50"]
    program += ["--prefix", "file:///", "--poll-seconds", "0.1", "--"]
    program += [sys.executable, str(script), "{checkpoint}", "{n}", "{seed}"]

    first = subprocess.Popen(program, env=environment)
    wait_until((tmp_path / "pid").exists)
    first.kill()
    first.wait()
    second = subprocess.Popen(program, env=environment)
    try:
        wait_until(lambda: find_eval_request(api, run_id, request_id)["answered_at"] is not None)
    finally:
        second.send_signal(signal.SIGTERM)
        assert second.wait(60) == 0
    stored = find_eval_request(api, run_id, request_id)
    assert (stored["difference"], stored["prompts"]) == (pytest.approx(-2.0), 200)
    fields = [line.split() for line in log.read_text().splitlines()]
    assert [line[0] for line in fields] == ["file:///30", "file:///30", "file:///models/now"]
    assert {tuple(line[1:]) for line in fields} == {("200", str(stored["seed"]))}
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # the first evaluation has outlived its evaluator


def run_python(code: str, timeout_seconds: float = 30.0) -> Any:
    return evaluate([sys.executable, "-c", code], dict(os.environ), timeout_seconds)


def test_child_of_an_eval_command_is_ended_with_it(tmp_path: Path) -> None:
    """A command may start a server that holds its output: the scores count at once, and the server ends."""
    pid = tmp_path / "pid"
    command = ["/bin/sh", "-c", f"sleep 300 & echo $! > {pid}; echo 1.0; echo 2.0"]
    assert evaluate(command, dict(os.environ), 60.0) == [1.0, 2.0]
    wait_until(lambda: not Path(f"/proc/{pid.read_text().strip()}").exists())


def test_scores_are_read_from_output() -> None:
    """Numbers, objects with a score, or one mean."""
    assert run_python("print('1\\n{\"score\": 2.5}\\n')") == [1.0, 2.5]
    assert read_scores('{"mean": 0.5, "stderr": 0.1}\n') == Summary(0.5, 0.1)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('a good run')", "line 1"),
        ("print(10**400)", "line 1"),
        ("raise SystemExit(3)", "ended with 3"),
    ],
)
def test_invalid_output_fails_the_evaluation(code: str, message: str) -> None:
    """Text and a failed exit fail the evaluation."""
    with pytest.raises(EvaluationFailed, match=message):
        run_python(code)


def test_evaluation_is_killed_after_its_timeout() -> None:
    """A program and its children are killed after the timeout."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with pytest.raises(EvaluationFailed, match="did not end"):
        run_python(code, timeout_seconds=0.5)


@pytest.mark.parametrize(
    "uri",
    [
        *(
            "--help",
            "s3://other/1",
            "file:///ours/../theirs",
            "file:///ours/a\nb",
            "",
            "s3://runs-evil/x",
            "s3://runs@evil/x",
        ),
        *("file:///ours/%2e%2E/theirs", "file:///ours/..%2ftheirs", "file:///ours/%252e%252e/theirs", "s3://runs%2f/x"),
        *(
            "file:///ours/%%32e%%32e/theirs",
            "file:///ours/.%5c/x",
            "file:///ours\\..\\x",
            "file:///ours/a%00",
            "S3://runs/x",
        ),
        *("file:///ours/%c0%ae%c0%ae/x", "file:///oursx", "s3://RUNS/x", "file://evil/ours/x", "http://s3://runs/x"),
    ],
)
def test_only_allowed_prefixes_are_loaded(uri: str) -> None:
    """Whoever reports a run names its checkpoints, and loading one may run its code."""
    with pytest.raises(EvaluationFailed, match=r"is not below|has a"):
        fill_command(["eval", "{checkpoint}"], uri, 1, 1, ["file:///ours/", "s3://runs"])
    assert fill_command(["eval", "--at={checkpoint}", "{n}x{seed}"], "file:///ours/{n}", 8, 7, ["file:///ours/"]) == [
        "eval",
        "--at=file:///ours/{n}",
        "8x7",
    ]


@given(
    st.lists(st.sampled_from(["..", ".", "/", "%", "2", "5", "e", "f", "E", "F", "C", "c", "\\", "x", "@", "%20", "~"]))
)
def test_allowed_checkpoint_stays_below_its_prefix_however_often_it_is_decoded(pieces: list[str]) -> None:
    """Neither the text nor what a program decodes from it names a place outside of the prefix."""
    uri = "file:///ours" + "".join(pieces)
    try:
        check_uri(uri, ["file:///ours"])
    except EvaluationFailed:
        return
    for _ in range(len(uri)):
        path = posixpath.normpath(url2pathname(urlsplit(uri.replace("\\", "/")).path))
        assert path == "/ours" or path.startswith("/ours/")
        uri = unquote(uri)


def test_checkpoint_placeholder_in_a_script_is_an_error() -> None:
    """A checkpoint's name in a shell script could run commands, so it has to be an argument."""
    check_places(["-c", 'python eval.py "$@"', "sh", "{checkpoint}", "{n}", "{seed}"])
    for arguments in (["-c", "python eval.py {checkpoint}", "{n}", "{seed}"], ["{checkpoint}", "{n}"]):
        with pytest.raises(ConfigurationError):
            check_places(arguments)
