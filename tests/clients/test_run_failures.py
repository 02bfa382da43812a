"""What a run does when the service is away, refuses it, or never answers: nothing is lost in silence, nothing waits."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from evalstop_client import Limits, Run

from tests.clients.fake_service import PROBLEM, Answer, FakeServer, FakeService
from tests.clients.programs import wait_until
from tests.clients.runs import METRICS, answer_on_path, list_posts, logged_messages, open_run

pytestmark = pytest.mark.usefixtures("ended_runs")


def test_trouble_of_the_service_is_waited_out(server: FakeServer, service: FakeService) -> None:
    """429, 500 and a foreign 404 lose nothing and change no order."""
    trouble = [
        Answer(503, "<html>"),
        Answer(429, {}, {"retry-after": "0"}),
        Answer(404, "<html>", {"content-type": "text/html"}),
        Answer(200, "<html>sign in</html>"),
    ]
    service.scripted_answers = [
        answer_on_path(path, answer) for path in ("/runs", "/observations", "/checkpoints") for answer in trouble
    ]
    with open_run(server) as run:
        run.log({"gold": 1.0}, step=1)
        run.checkpoint("file:///a", step=1)
    assert [what for what, _ in list_posts(service)] == ["runs", "observations", "checkpoints", "finish"]
    assert run.dropped == 0


def test_bad_key_is_said_once_and_tried_again(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is lost while the key is not accepted; once it is, everything arrives."""
    unknown = Answer(401, {"title": "who?"}, {"content-type": PROBLEM})
    service.scripted_answers = [unknown] * 4
    with open_run(server) as run:
        run.log({"gold": 1.0}, step=1)
        wait_until(lambda: not service.scripted_answers)
        run.log({"gold": 1.0}, step=2)
    assert len(service.find_run("a run").observations) == 2
    assert len([word for word in logged_messages(caplog) if "key" in word]) == 1


def test_an_answer_on_its_way_does_not_end_the_wait(server: FakeServer, service: FakeService) -> None:
    """Who begins to wait while a request is under way is not put off by its answer: the key is tried once more."""
    under_way = threading.Event()

    def late(_path: str, _body: Any) -> Answer:
        under_way.set()
        time.sleep(0.5)
        return Answer(401, {"title": "who?"}, {"content-type": PROBLEM})

    service.scripted_answers = [late]
    with open_run(server) as run:
        run.log({"gold": 1.0}, step=1)
        assert under_way.wait(20)
    assert len(service.find_run("a run").observations) == 1


def test_bad_key_does_not_hold_up_the_end(server: FakeServer, service: FakeService, tmp_path: Path) -> None:
    """With a key that nobody accepts the run ends soon, and its data waits on disk."""
    with open_run(server, key="esk_wrong", limits=Limits(flush_seconds=120)) as run:
        run.log({"gold": 1.0}, step=1)
    assert list((tmp_path / "spool").glob("*/*.jsonl"))
    assert service.posts == []


@pytest.mark.parametrize("names_bad_observations", [True, False])
def test_refused_points_are_laid_aside_and_the_rest_is_sent(
    server: FakeServer,
    service: FakeService,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    names_bad_observations: bool,
) -> None:
    """One bad point does not cost its batch, whether the service names it or not."""
    service.refuse_metric, service.names_bad_observations = "cursed", names_bad_observations
    with open_run(server) as run:
        for step in range(50):
            run.log({"gold": 1.0, **({"cursed": 1.0} if step % 20 == 7 else {})}, step=step)
    (rejected,) = (tmp_path / "spool").glob("*.rejected.jsonl")
    laid_aside = [json.loads(line) for line in rejected.read_text().splitlines()]
    steps = [point["step"] for entry in laid_aside for point in entry["body"]["observations"]]
    assert sorted(steps) == [7, 27, 47]
    assert all("422" in entry["reason"] for entry in laid_aside)
    assert len(service.find_run("a run").observations) == 50
    assert len([word for word in logged_messages(caplog) if "refused" in word]) == 1


def test_batch_too_large_is_halved(server: FakeServer, service: FakeService) -> None:
    """A proxy that lets less through than the service would gets smaller batches."""

    def at_most_ten(path: str, body: dict[str, Any]) -> Answer | None:
        return Answer(413, "<html>too large</html>") if len(body.get("observations", [])) > 10 else None

    service.scripted_answers = [at_most_ten] * 100
    with open_run(server) as run:
        run.log({f"m{number}": 1.0 for number in range(100)}, step=1)
    assert len(service.find_run("a run").observations) == 100


def test_refused_run_is_said_plainly_and_does_not_hold_up_the_end(
    server: FakeServer, service: FakeService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that exists with other metrics cannot be opened: training goes on, and what it logged is laid aside."""
    with open_run(server, metrics=METRICS):
        pass
    with open_run(server, metrics={"gold": {"role": "proxy"}}, resume="allow", limits=Limits(flush_seconds=60)) as run:
        run.log({"gold": 1.0}, step=1)
    assert any("NOT being watched" in word and "other metrics" in word for word in logged_messages(caplog))
    (rejected,) = (tmp_path / "spool").glob("*.rejected.jsonl")
    assert [json.loads(line)["to"] for line in rejected.read_text().splitlines()] == ["observations", "finish"]
    assert list((tmp_path / "spool").glob("*/*")) == []


def test_a_run_without_a_service_waits_for_no_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer without a url, as on a laptop, runs as ever and is told that nothing is reported."""
    monkeypatch.delenv("EVALSTOP_URL", raising=False)
    with Run("offline") as run:
        run.log({"eval": 1.0}, step=1)
    assert (repr(run), run.should_stop) == ("<Run offline: not reported>", False)
    assert logged_messages(caplog) == ["evalstop: no url is set (EVALSTOP_URL): the run is not reported"]


def test_run_that_the_service_lost_is_opened_again(server: FakeServer, service: FakeService) -> None:
    """A service restored from an older backup does not know the run any more: it is made anew."""
    with open_run(server) as run:
        run.log({"gold": 1.0}, step=1)
        assert run.flush()
        with service.lock:
            service.runs.clear()
        run.log({"gold": 1.0}, step=2)
    assert [step for _, _, step in service.find_run("a run").observations] == [2]


def test_names_that_are_no_text_hold_nothing_up(server: FakeServer, service: FakeService) -> None:
    """A path of bytes that are no UTF-8, as the system hands it over, is sent escaped."""
    with open_run(server) as run:
        run.checkpoint(os.fsdecode(b"/ckpt/\xff"), step=1)
        run.log({"\ud800": 1.0}, step=1)
    assert service.find_run("a run").checkpoints == {1: "/ckpt/\udcff"}
    assert len(service.find_run("a run").observations) == 1


def test_conflict_is_said_once(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """A step logged twice with different values is a mistake that the person should hear of."""
    with open_run(server) as run:
        for value in (1.0, 2.0, 3.0):
            run.log({"gold": value}, step=1)
    assert len([word for word in logged_messages(caplog) if "logged twice" in word]) == 1


def test_full_queue_drops_says_so_once_and_never_waits(
    server: FakeServer, service: FakeService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """When neither memory nor disk can take more, observations are dropped; checkpoints are not."""
    (tmp_path / "spool").write_text("a file where the folder should be")
    service.scripted_answers = [lambda path, body: Answer(503, {})] * 1_000
    with open_run(server, limits=Limits(queue_entries=10, flush_seconds=0)) as run:
        for step in range(500):
            run.log({"gold": 1.0}, step=step)
        run.checkpoint("file:///a", step=500)
        wait_until(lambda: run.dropped > 0)
        assert run.dropped < 500
    said = [word for word in logged_messages(caplog) if "dropped" in word]
    assert said, "nothing was said"
    assert len(said) == len(set(said)), "a kind of loss was said twice"


def test_a_service_that_never_answers_delays_nothing(server: FakeServer, service: FakeService) -> None:
    """The trainer logs, registers and asks while the first request hangs: all that waits is a thread of ours."""
    asked, answers = threading.Event(), threading.Event()

    def hang(path: str, body: dict[str, Any]) -> None:
        asked.set()
        answers.wait(60)

    service.scripted_answers.append(hang)
    with open_run(server) as run:
        assert asked.wait(60)
        for step in range(2_000):
            run.log({"gold": float(step)}, step=step)
            assert not run.should_stop
        run.checkpoint("/ckpt/1999", step=1999)
        assert not answers.is_set()  # nobody has been answered yet
        answers.set()
    assert run.dropped == 0
