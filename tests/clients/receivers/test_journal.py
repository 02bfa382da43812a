"""The journal in which a receiver stores its stops across restarts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from evalstop_client.errors import ConfigurationError
from evalstop_client.receivers.stop.job_control import Job, parse_stop_request
from evalstop_client.receivers.stop.journal import Journal
from evalstop_client.receivers.stop.state_machine import Phase, Report, Stop
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.clients.webhooks import make_stop_event

REQUEST = parse_stop_request("msg_1", make_stop_event({"slurm_job_id": "7"}))
OTHER = parse_stop_request("msg_2", make_stop_event({}, "decision-2"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def reopen(journal: Journal, folder: Path) -> Journal:
    journal.close()
    return Journal(folder)


@settings(deadline=None, max_examples=50)  # it waits for the disk
@given(
    st.builds(
        Stop,
        started_at=st.floats(0, 1e10),
        phase=st.sampled_from(Phase),
        job=st.none() | st.builds(Job, st.text(), st.dictionaries(st.text(), st.text(), max_size=3)),
        checkpoint_requested_at=st.none() | st.floats(0, 1e10),
        known_checkpoint=st.none() | st.text(),
        cancelled_at=st.none() | st.floats(0, 1e10),
        failure_reported=st.booleans(),
        taken_back_at=st.none() | st.floats(0, 1e9),
        report_due_at=st.floats(0, 1e9),
        report=st.none()
        | st.builds(
            Report, st.sampled_from(["confirmed", "failed"]), st.text(), st.dictionaries(st.text(), st.integers())
        ),
        failures=st.integers(0, 100),
    )
)
def test_any_state_survives_reopening(tmp_path_factory: pytest.TempPathFactory, stop: Stop) -> None:
    """The request and any state of a stop are read back as they were written."""
    folder = tmp_path_factory.mktemp("journal")
    journal = Journal(folder)
    journal.record_stop(REQUEST, stop)
    reopened = reopen(journal, folder)
    entry = reopened.find_entry(REQUEST.decision_id)
    assert entry is not None
    assert (entry.request, entry.stop) == (REQUEST, stop)
    reopened.close()


@pytest.mark.parametrize(
    ("stop", "begins"),
    [
        (Stop(0, Phase.SAVING), False),
        (Stop(0, Phase.DONE, report=Report("confirmed", ""), report_answered=True), False),
        (Stop(0, Phase.DONE, report=Report("failed", ""), report_answered=True), True),
        (Stop(0, Phase.DONE, report=Report("confirmed", "")), True),
    ],
)
def test_begin_repeats_only_failed_or_unreported_stops(folder: Path, stop: Stop, begins: bool) -> None:
    """A stop in progress, or confirmed and reported, does not begin again; one that failed or was not reported does."""
    journal = Journal(folder)
    journal.record_stop(REQUEST, stop)
    assert (journal.begin_stop(REQUEST, 5.0) is not None) is begins
    journal.close()


def test_stop_of_another_receiver_leaves_no_file(folder: Path) -> None:
    """A stop that turns out to be another receiver's is not stored."""
    journal = Journal(folder)
    journal.begin_stop(REQUEST, 0.0)
    journal.record_stop(REQUEST, Stop(0, Phase.DONE, is_ours=False))
    assert list(folder.glob("*.json")) == []
    journal.close()


def test_forget_keeps_unfinished_stops(folder: Path) -> None:
    """Old stops are deleted only when they are done."""
    journal = Journal(folder)
    journal.record_stop(REQUEST, Stop(0, Phase.DONE, report_answered=True))
    journal.record_stop(OTHER, Stop(0, Phase.REPORTING, report=Report("failed", "")))
    journal.delete_finished(before=10.0)
    assert [entry.request for entry in journal.list_unfinished()] == [OTHER]
    assert journal.find_entry(REQUEST.decision_id) is None
    journal.close()


def test_second_receiver_cannot_open_the_journal(folder: Path) -> None:
    """A journal that another receiver has open is refused with the reason."""
    journal = Journal(folder)
    with pytest.raises(ConfigurationError, match="another receiver"):
        Journal(folder)
    reopen(journal, folder).close()


def test_unreadable_file_is_skipped(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged file, or one of another version, is logged and does not keep the others from being read."""
    journal = Journal(folder)
    journal.begin_stop(REQUEST, 0.0)
    (folder / "broken.json").write_text("{")
    (folder / "later.json").write_text(json.dumps({"stops": []}))
    reopened = reopen(journal, folder)
    assert len(reopened.list_unfinished()) == 1
    assert "broken.json" in caplog.text
    assert "later.json" in caplog.text
    reopened.close()
