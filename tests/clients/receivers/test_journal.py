"""What a receiver remembers across its own end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from evalstop_client.errors import ConfigurationError
from evalstop_client.receivers.stop.instructions import Report
from evalstop_client.receivers.stop.job_control import Job, parse_stop_request
from evalstop_client.receivers.stop.journal import Journal
from evalstop_client.receivers.stop.state_machine import Phase, Stop
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.clients.webhooks import make_stop_event

REQUEST = parse_stop_request("msg_1", make_stop_event({"slurm_job_id": "7"}))
HOSTILE = parse_stop_request("msg_2", make_stop_event({}, "../../etc/passwd"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "memory"


def reopened(memory: Journal, folder: Path) -> Journal:
    memory.close()
    return Journal(folder)


def test_stop_is_remembered_as_it_stood(folder: Path) -> None:
    """Request and state come back whole."""
    stop = Stop(
        started_at=1.5, phase=Phase.CANCELLING, job=Job("7", {"user": "ann"}), asked_at=2.0, mark="m", cancelled_at=3.0
    )
    memory = Journal(folder)
    memory.begin(REQUEST, 1.5)
    memory.keep(REQUEST, stop)
    again = reopened(memory, folder)
    (remembered,) = again.unfinished()
    assert (remembered.request, remembered.stop) == (REQUEST, stop)
    assert again.begin(REQUEST, 9.0) is None
    again.close()


@settings(deadline=None, max_examples=50)  # it waits for the disk
@given(
    st.builds(
        Stop,
        started_at=st.floats(0, 1e10),
        phase=st.sampled_from(Phase),
        job=st.none() | st.builds(Job, st.text(), st.dictionaries(st.text(), st.text(), max_size=3)),
        asked_at=st.none() | st.floats(0, 1e10),
        mark=st.none() | st.text(),
        failure_reported=st.booleans(),
        report=st.none()
        | st.builds(
            Report, st.sampled_from(["confirmed", "failed"]), st.text(), st.dictionaries(st.text(), st.integers())
        ),
        away=st.integers(0, 100),
    )
)
def test_any_state_survives_the_disk(tmp_path_factory: pytest.TempPathFactory, stop: Stop) -> None:
    """Whatever a stop can be, the file brings it back."""
    folder = tmp_path_factory.mktemp("memory")
    memory = Journal(folder)
    memory.keep(REQUEST, stop)
    again = reopened(memory, folder)
    remembered = again.of(REQUEST.decision_id)
    assert remembered is not None
    assert remembered.stop == stop
    again.close()


@pytest.mark.parametrize(
    ("stop", "anew"),
    [
        (Stop(0, Phase.SAVING), False),
        (Stop(0, Phase.DONE, report=Report("confirmed", ""), told=True), False),
        (Stop(0, Phase.DONE, report=Report("failed", ""), told=True), True),
        (Stop(0, Phase.DONE, report=Report("confirmed", "")), True),
    ],
)
def test_only_what_failed_or_went_untold_is_begun_anew(folder: Path, stop: Stop, anew: bool) -> None:
    """A stop under way, or confirmed and told, is not begun again; one that failed is, when it is asked for again."""
    memory = Journal(folder)
    memory.keep(REQUEST, stop)
    assert (memory.begin(REQUEST, 5.0) is not None) is anew
    memory.close()


def test_others_jobs_are_not_hoarded(folder: Path) -> None:
    """What turned out to be another receiver's leaves no file."""
    memory = Journal(folder)
    memory.begin(REQUEST, 0.0)
    memory.keep(REQUEST, Stop(0, Phase.DONE, mine=False))
    assert list(folder.glob("*.json")) == []
    memory.close()


def test_old_stops_are_forgotten_and_open_ones_are_not(folder: Path) -> None:
    """Only what is done with is forgotten, however old."""
    memory = Journal(folder)
    memory.keep(REQUEST, Stop(0, Phase.DONE, told=True))
    memory.keep(HOSTILE, Stop(0, Phase.REPORTING, report=Report("failed", "")))
    memory.forget(before=10.0)
    assert [one.request for one in memory.unfinished()] == [HOSTILE]
    assert memory.of(REQUEST.decision_id) is None
    memory.close()


def test_decision_ids_cannot_lead_out_of_the_folder(folder: Path) -> None:
    """An id that is no plain name is filed under its digest."""
    memory = Journal(folder)
    memory.begin(HOSTILE, 0.0)
    (file,) = folder.glob("*.json")
    assert len(file.stem) == 64
    memory.close()


def test_two_receivers_cannot_share_a_memory(folder: Path) -> None:
    """The second one is told why it does not start."""
    memory = Journal(folder)
    with pytest.raises(ConfigurationError, match="another receiver"):
        Journal(folder)
    reopened(memory, folder).close()


def test_damaged_file_is_passed_over(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One file that cannot be read does not keep the receiver from the others."""
    memory = Journal(folder)
    memory.begin(REQUEST, 0.0)
    (folder / "broken.json").write_text("{")
    (folder / "later.json").write_text(json.dumps({"version": 99}))
    again = reopened(memory, folder)
    assert len(again.unfinished()) == 1
    assert "broken.json" in caplog.text
    assert "version 99" in caplog.text
    again.close()
