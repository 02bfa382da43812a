"""The training job: the files that it writes, its reports, and its end; and what the demo measures of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from evalstop_client import Run
from evalstop_lab.cli import main
from evalstop_lab.rlhf import job
from evalstop_lab.rlhf.checkpoint import load_checkpoint, save_checkpoint
from evalstop_lab.rlhf.demo import continue_training
from evalstop_lab.rlhf.trainer import PRESETS, Config, Eval, Trainer, hasten_run
from rich.console import Console

EVAL_FIELDS = [item.name for item in fields(Eval)]
CONFIG = replace(hasten_run(PRESETS["overoptimizes"], 20), steps=60)


class RecordingRun(Run):
    """Records reports instead of posting them, and requests a stop after `stop_at` was logged."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__("a run")
        self.stop_at = stop_at
        self.logged: dict[int, tuple[Mapping[str, float], Mapping[str, float] | None]] = {}
        self.checkpoints: dict[int, str] = {}

    @property
    def should_stop(self) -> bool:
        return self.stop_at in self.logged

    def log(self, values: Mapping[str, Any], *, step: int, stderr: Mapping[str, Any] | None = None) -> None:
        self.logged[step] = (values, stderr)

    def checkpoint(self, uri: str | os.PathLike[str], *, step: int) -> None:
        self.checkpoints[step] = str(uri)


def train(run: RecordingRun, folder: Path, polls: bool = True, config: Config = CONFIG) -> list[dict[str, object]]:
    """Run a job to its end; return the events that it printed."""
    events: list[dict[str, object]] = []
    job.train(run, config, folder, events.append, polls=polls)
    return events


@contextmanager
def start_training(*arguments: str | Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run `evalstop-lab train --json` in its own process, which is killed at the end of the block."""
    command = [sys.executable, "-m", "evalstop_lab.cli", "train", "--json", *map(str, arguments)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EVALSTOP_")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**clean, **environment})
    with process:
        try:
            yield process
        finally:
            process.kill()


def read_events(process: subprocess.Popen[str]) -> list[dict[str, object]]:
    assert process.stdout is not None
    return [json.loads(line) for line in process.stdout]


def select_evals(events: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{name: event[name] for name in EVAL_FIELDS} for event in events if event["event"] == "eval"]


def test_every_eval_is_reported_printed_and_saved(tmp_path: Path) -> None:
    """Each eval is reported with its standard errors, printed, and has an existing checkpoint."""
    run, evals = RecordingRun(), list(Trainer(CONFIG).evals())
    assert select_evals(train(run, tmp_path)) == [asdict(logged) for logged in evals]
    for logged in evals:
        values, stderr = run.logged[logged.step]
        assert values == {"proxy": logged.proxy, "gold": logged.gold, "kl": logged.kl}
        assert stderr == {"proxy": logged.proxy_stderr, "gold": logged.gold_stderr}
        uri = urlsplit(run.checkpoints[logged.step])
        assert uri.scheme == "file"
        assert load_checkpoint(Path(uri.path)).state.step == logged.step


def test_job_that_polls_ends_when_a_stop_is_requested(tmp_path: Path) -> None:
    """After the eval at which the service answers should_stop, the job ends."""
    run = RecordingRun(stop_at=20)
    *_, end = train(run, tmp_path)
    assert list(run.logged) == [0, 20]
    assert (end["how"], end["step"]) == ("stopped", 20)


def test_job_under_a_receiver_ignores_should_stop(tmp_path: Path) -> None:
    """A job that is stopped by a signal keeps training, whatever the service answers."""
    run = RecordingRun(stop_at=20)
    *_, end = train(run, tmp_path, polls=False)
    assert list(run.logged) == [0, 20, 40, 60]
    assert end["how"] == "completed"


def test_last_step_is_saved(tmp_path: Path) -> None:
    """The last step has a checkpoint even if it has no eval."""
    run = RecordingRun()
    train(run, tmp_path, config=replace(CONFIG, steps=25))
    assert list(run.logged) == [0, 20]
    assert list(run.checkpoints) == [0, 20, 25]


@pytest.mark.real
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_run_continues_from_the_checkpoint_of_its_end_bit_for_bit(tmp_path: Path, number: signal.Signals) -> None:
    """SIGTERM or SIGINT ends the process with 128 + its number; its checkpoint has all that the run depends on."""
    with start_training("--seed", "5", "--checkpoints", tmp_path) as process:
        assert process.stdout is not None
        events = [json.loads(process.stdout.readline()) for _ in range(2)]
        assert [event["event"] for event in events] == ["begin", "eval"]
        process.send_signal(number)
        events += read_events(process)
    end = events[-1]
    assert process.returncode == 128 + number
    assert end["how"] == number.name
    saved = load_checkpoint(Path(str(end["checkpoint"])))
    assert saved.state.step == end["step"]
    until = (saved.state.step // 400 + 1) * 400
    rest = Trainer(replace(saved.config, steps=until), saved.state).evals()
    whole = Trainer(replace(PRESETS["overoptimizes"], seed=5, steps=until)).evals()
    assert [*select_evals(events), *map(asdict, rest)] == [asdict(logged) for logged in whole]


@pytest.mark.real
def test_number_of_threads_changes_no_bit(tmp_path: Path) -> None:
    """With one BLAS thread and with four, a run has the same evals bit for bit."""
    runs = []
    for threads in ("1", "4"):
        arguments = ("--hasten", "40", "--steps", "40", "--preset", "healthy", "--checkpoints", tmp_path)
        with start_training(*arguments, OPENBLAS_NUM_THREADS=threads) as process:
            runs.append(select_evals(read_events(process)))
    assert runs[0] == runs[1]
    assert len(runs[0]) == 5


def test_without_json_a_table_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row is printed for each eval, and the last line names the last checkpoint."""
    arguments = ["train", "--hasten", "40", "--steps", "20", "--checkpoints", str(tmp_path)]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("overoptimizes-seed0: an eval every 10 of 20 steps")
    assert [line.split()[0] for line in lines[2:-1]] == ["0", "10", "20"]
    assert lines[-1].endswith("step-000020.npz")


def test_steps_between_the_last_eval_and_the_stop_are_not_saved(tmp_path: Path) -> None:
    """A run that is stopped between two evals continues from the step at which it was stopped."""
    config = replace(hasten_run(PRESETS["overoptimizes"], 20), steps=40)
    trainer = Trainer(config)
    while trainer.state.step < 25:
        trainer.train_step()
        if trainer.state.step in (20, 25):
            save_checkpoint(tmp_path / "checkpoints", trainer)
    stopped_at, later_evals = continue_training(tmp_path, Console(quiet=True))
    assert stopped_at == 25
    assert [item.step for item in later_evals] == [40]
