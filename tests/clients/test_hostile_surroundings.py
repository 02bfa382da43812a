"""A run where a trainer's values, texts, settings and machine are not what one expects."""

from __future__ import annotations

import io
import json
import math
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import evalstop
import pytest
from evalstop_client import ConfigurationError, Limits, Run
from evalstop_client.config import flatten_config
from evalstop_client.settings import choose_spool_folder
from evalstop_service.web.api.runs import RunIn
from evalstop_service.web.limits import MAX_BODY_BYTES
from hypothesis import example, given
from hypothesis import strategies as st

from tests.clients.fake_service import KEY, FakeServer, FakeService
from tests.clients.runs import FAST_LIMITS, list_messages, open_run

pytestmark = pytest.mark.usefixtures("ended_runs")


class FailingText:
    """A value that has no text, such as that of an interpolation that cannot be resolved."""

    def __str__(self) -> str:
        raise RuntimeError("it cannot be resolved")

    __repr__ = __str__


class PartialMapping(Mapping[str, Any]):
    """A mapping, such as OmegaConf's, that raises where a value is missing."""

    def __getitem__(self, name: str) -> Any:
        if name == "missing":
            raise RuntimeError("Missing mandatory value")
        return 1

    def __iter__(self) -> Iterator[str]:
        return iter(["given", "missing"])

    def __len__(self) -> int:
        return 2


@dataclass(slots=True)
class SlottedConfig:
    lr: float = 0.5


def test_config_that_cannot_be_read_is_shown_as_far_as_it_can() -> None:
    """A value that is missing or has no text is a question mark; a dataclass with slots has its fields."""
    assert flatten_config({"ppo": PartialMapping(), "odd": FailingText()}) == {
        "ppo.given": "1",
        "ppo.missing": "?",
        "odd": "?",
    }
    assert flatten_config(SlottedConfig()) == {"lr": "0.5"}


@pytest.mark.parametrize("wrong", [{"flush_seconds": math.inf}, {"flush_seconds": math.nan}, {"poll_seconds": 0}])
def test_limits_that_no_thread_can_wait_for_are_errors(wrong: dict[str, Any]) -> None:
    """A time that is no number or has no end is a ConfigurationError at the start, not an exception at the end."""
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Run("a run", url="http://127.0.0.1:1", limits=Limits(**wrong))


def test_flush_may_wait_without_end(server: FakeServer) -> None:
    """flush(inf) waits for as long as it takes."""
    with open_run(server) as run:
        run.log({"score": 1.0}, step=1)
        assert run.flush(math.inf)


def test_flush_for_no_time_returns() -> None:
    """flush(nan) does not wait: it is neither a year nor an exception."""
    run = Run("a run", url="http://127.0.0.1:1", limits=Limits(flush_seconds=0))
    run.log({"score": 1.0}, step=1)
    assert not run.flush(math.nan)
    run.finish()


def test_values_that_raise_are_dropped(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """A mapping that raises, as one that another thread changes, is dropped with a warning."""
    with open_run(server) as run:
        run.log(PartialMapping(), step=1)
        assert run.dropped == 1
    assert "Missing mandatory value" in list_messages(caplog)[0]


def test_init_prints_where_it_can(server: FakeServer, service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that has no letters for a run's name does not keep the run from being watched."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    with evalstop.init("größe", url=server.url, key=KEY, limits=FAST_LIMITS):
        pass
    assert service.find_run("größe").status == "completed"


def test_machine_without_threads_trains_on(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """Where the system starts no more threads, the run accepts every call, and says that it is not reported."""
    before = threading.stack_size(2**46)  # more memory than a thread can get
    try:
        run = open_run(server, limits=Limits(flush_seconds=0))
    finally:
        threading.stack_size(before)
    with run:
        run.log({"score": 1.0}, step=1)
        assert not run.should_stop
    assert any("NOT being watched" in message for message in list_messages(caplog))


def test_machine_without_a_place_to_write_opens_runs() -> None:
    """Without a home and with full disks, no temporary folder can be used: a run opens all the same."""
    arguments = "'a run', url='http://127.0.0.1:1', limits=Limits(flush_seconds=0)"
    script = f"from evalstop_client import Limits, Run; print(Run({arguments}))"
    environment = {name: value for name, value in os.environ.items() if name not in ("EVALSTOP_SPOOL", "TMPDIR")}
    completed = subprocess.run(
        [sys.executable, "-c", script],
        env={**environment, "HOME": "/nonexistent"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
        capture_output=True,  # a file could not be written to
        text=True,
        check=True,
    )
    assert completed.stdout == "<Run a run: no answer yet>\n"


def test_spool_folder_stays_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty EVALSTOP_SPOOL is as none; a relative folder does not move with the trainer; `~` is the home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    default = choose_spool_folder(None, {}, None, "a run")
    assert choose_spool_folder(None, {"EVALSTOP_SPOOL": ""}, None, "a run") == default
    for folder in ("spool", "~/spool"):
        assert choose_spool_folder(None, {"EVALSTOP_SPOOL": folder}, None, "a run").parent == tmp_path / "spool"


def test_exit_waits_once_for_all_runs() -> None:
    """Runs that a process leaves open wait together for an absent service, not one after the other."""
    opening = "Run(f'run {i}', limits=Limits(flush_seconds=5))"
    script = f"from evalstop_client import Limits, Run; runs = [{opening} for i in range(60)]"
    environment = {**os.environ, "EVALSTOP_URL": "http://127.0.0.1:1"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=120)  # one by one: 300 s


TEXTS = st.builds(lambda text, times: text * times, st.text(max_size=12), st.sampled_from([1, 1, 1, 30, 3000]))


def open_offline(name: str = "a run", **arguments: Any) -> dict[str, Any]:
    """The body by which a run with these arguments is opened."""
    run = Run(name, **arguments)
    run.finish()
    return dict(run._settings.opening)


def validate_opening(opening: dict[str, Any]) -> RunIn:
    """The opening as the service reads it."""
    return RunIn.model_validate_json(json.dumps(opening))


@given(TEXTS.filter(bool), TEXTS, TEXTS, st.lists(TEXTS.filter(bool), max_size=60), TEXTS)
@example("x" * 257, "one\ntwo", "\ud800", ["x" * 101], "x" * 20_001)
def test_any_name_and_description_is_taken(name: str, owner: str, group: str, tags: list[str], notes: str) -> None:
    """A run is watched whatever it is called and however it is described."""
    validate_opening(open_offline(name, owner=owner, group=group, tags=tags, notes=notes))


def test_largest_opening_fits_a_body() -> None:
    """All that a trainer can give, in the characters that take most bytes, is within the service's limit."""
    value, name = "\N{SNAKE}" * 2000, "\N{SNAKE}" * 250
    opening = open_offline(
        name=name,
        owner=name,
        group=name,
        tags=[name] * 50,
        notes="\N{SNAKE}" * 20_000,
        labels={f"{name}{number}": value for number in range(28)},
        metrics={f"{name}{number}": {"role": "eval"} for number in range(32)},
        config={f"{name}{number}": value for number in range(1000)},
    )
    assert opening["params"]
    assert len(json.dumps(opening)) <= MAX_BODY_BYTES
    validate_opening(opening)


def test_long_names_that_begin_alike_differ() -> None:
    """Two runs of a sweep whose names differ late keep names of their own."""
    names = [open_offline("lr=" + "0" * 300 + end)["name"] for end in "12"]
    assert names[0] != names[1]
    assert open_offline("ä" * 256)["name"] == "ä" * 256
