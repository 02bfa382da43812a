"""The spool on disk and the queue before it: order, torn files, restarts, limits and a disk that refuses writes."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from evalstop_client.settings import Limits
from evalstop_client.spool.reporter import Recorder
from evalstop_client.spool.run_log import WarningLog
from evalstop_client.spool.segment import Entry
from evalstop_client.spool.spool import Spool
from hypothesis import given, settings
from hypothesis import strategies as st

OPENING = {"name": "a run"}
LIMITS = Limits(batch_observations=7, segment_bytes=200)

texts = st.text(max_size=10)
points = st.fixed_dictionaries({"metric": texts, "step": st.integers(0, 2**63 - 1), "value": st.floats(-1e9, 1e9)})
entries = st.one_of(
    st.lists(points, min_size=1, max_size=5).map(lambda some: Entry("observations", {"observations": some})),
    st.builds(lambda step, uri: Entry("checkpoints", {"step": step, "uri": uri}), st.integers(0, 99), texts),
    st.builds(lambda step: Entry("resume", {"step": step}), st.integers(0, 99)),
)
appends = st.lists(st.lists(entries, max_size=5), max_size=6)


def open_spool(folder: Path, limits: Limits = LIMITS, opening: dict[str, Any] = OPENING) -> Spool:
    return Spool(folder, opening, limits, WarningLog())


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "a-run"


def drain(spool: Spool, at_most: int = 10_000) -> list[Entry]:
    """What a sender would send, batch by batch."""
    sent: list[Entry] = []
    while len(sent) < at_most and (batch := spool.head()) is not None:
        assert (
            sum(entry.observation_count for entry in batch.entries) <= LIMITS.batch_observations
            or len(batch.entries) == 1
        )
        assert len({entry.to for entry in batch.entries}) == 1
        assert len(batch.entries) == 1 or not batch.entries[0].is_control
        sent += batch.entries
        spool.advance(batch)
    return sent


def flatten(chunks: list[list[Entry]]) -> list[Entry]:
    return [entry for chunk in chunks for entry in chunk]


@settings(deadline=None)  # every append waits for the disk
@given(appends)
def test_entries_are_sent_whole_and_in_order(chunks: list[list[Entry]]) -> None:
    """Appended entries are sent in order, in batches that fit one request, and then the spool is empty."""
    with temporary_folder() as folder:
        spool = open_spool(folder)
        for chunk in chunks:
            spool.append(chunk)
        assert drain(spool) == flatten(chunks)
        assert spool.is_empty
        spool.close(0)
        assert not folder.exists()


@settings(deadline=None)  # every append waits for the disk
@given(appends, st.integers(0, 12))
def test_next_process_sends_what_was_left(chunks: list[list[Entry]], sent_before: int) -> None:
    """Unsent entries of a killed process are sent once by the next spool, before its own."""
    with temporary_folder() as folder:
        first = open_spool(folder)
        for chunk in chunks:
            first.append(chunk)
        sent = drain(first, at_most=sent_before)
        first.abandon_in_child()  # closes the files as a killed process does
        second = open_spool(folder)
        second.adopt()
        new = Entry("resume", {"step": 1})
        second.append([new])
        assert sent + drain(second) == [*flatten(chunks), new]
        second.close(0)
        assert not folder.exists()


def test_adopted_entries_are_sent_first(tmp_path: Path) -> None:
    """Entries appended before the adoption are sent after the adopted ones."""
    first = open_spool(tmp_path / "a-run")
    first.append([Entry("resume", {"step": 1})])
    first.close(0)
    second = open_spool(tmp_path / "a-run")
    second.append([Entry("resume", {"step": 2})])
    second.adopt()
    second.append([Entry("resume", {"step": 3})])
    assert [entry.body["step"] for entry in drain(second)] == [1, 2, 3]
    second.close(0)


@settings(deadline=None)  # every append waits for the disk
@given(appends.filter(lambda chunks: flatten(chunks) != []), st.data())
def test_torn_file_loses_only_the_torn_line(chunks: list[list[Entry]], data: st.DataObject) -> None:
    """A file cut at any byte gives every whole line, in order."""
    with temporary_folder() as folder:
        first = open_spool(folder, Limits(batch_observations=7))
        for chunk in chunks:
            first.append(chunk)
        first.abandon_in_child()
        (path,) = folder.glob("*.jsonl")
        whole = path.read_bytes()
        header = whole.index(b"\n", whole.index(b"\n") + 1) + 1
        cut = data.draw(st.integers(header, len(whole)))
        path.write_bytes(whole[:cut])
        second = open_spool(folder, Limits(batch_observations=7))
        second.adopt()
        survivors = whole[header:cut].count(b"\n")
        assert drain(second) == flatten(chunks)[:survivors]
        second.close(0)


def test_damaged_line_is_skipped_and_counted(tmp_path: Path) -> None:
    """A damaged line is skipped and counted as dropped, and the others are sent."""
    warnings = WarningLog()
    first = open_spool(tmp_path / "a-run")
    first.append([Entry("resume", {"step": 1}), Entry("resume", {"step": 2}), Entry("resume", {"step": 3})])
    first.abandon_in_child()
    (path,) = (tmp_path / "a-run").glob("*.jsonl")
    path.write_bytes(path.read_bytes().replace(b'"step":2', b'"st\xff\r":2'))
    second = Spool(tmp_path / "a-run", OPENING, LIMITS, warnings)
    second.adopt()
    assert [entry.body["step"] for entry in drain(second)] == [1, 3]
    assert warnings.dropped == 1


def test_spool_in_use_is_not_adopted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A spool whose process runs is neither adopted nor changed."""
    first = open_spool(tmp_path / "a-run")
    first.append([Entry("resume", {"step": 1})])
    second = open_spool(tmp_path / "a-run")
    assert second.adopt() == 0
    assert caplog.records == []
    second.close(0)
    assert drain(first) == [Entry("resume", {"step": 1})]
    first.close(0)


def test_segments_keep_their_opening(tmp_path: Path) -> None:
    """What an earlier process left is sent with that process's opening."""
    first = open_spool(tmp_path / "a-run", opening={"name": "a run", "labels": {"job": "1"}})
    first.append([Entry("resume", {"step": 1})])
    first.close(0)
    second = open_spool(tmp_path / "a-run", opening={"name": "a run", "labels": {"job": "2"}})
    second.adopt()
    second.append([Entry("resume", {"step": 2})])
    openings = []
    while (batch := second.head()) is not None:
        openings.append(batch.segment.opening["labels"]["job"])
        second.advance(batch)
    assert openings == ["1", "2"]
    second.close(0)


def test_left_segment_is_not_adopted_again(tmp_path: Path) -> None:
    """What another key must send stays where it is, however often this process looks for what others left."""
    opening = {"name": "a run", "labels": {"job": "1"}}
    first = open_spool(tmp_path / "a-run", opening=opening)
    first.append([Entry("resume", {"step": 1})])
    first.close(0)
    second = open_spool(tmp_path / "a-run")
    assert second.adopt() == 1
    second.leave(opening)
    assert second.adopt() == 0
    third = open_spool(tmp_path / "a-run")
    assert third.adopt() == 1
    third.close(0)


def test_full_spool_drops_only_observations(tmp_path: Path) -> None:
    """A spool at its limit keeps checkpoints and resumes, and drops and counts observations."""
    warnings = WarningLog()
    spool = Spool(tmp_path / "a-run", OPENING, Limits(spool_bytes=1, segment_bytes=10_000), warnings)
    spool.append([Entry("resume", {"step": 1})])
    observation = Entry("observations", {"observations": [{"metric": "eval", "step": 1, "value": 1.0}] * 3})
    spool.append([observation, Entry("checkpoints", {"step": 1, "uri": "file:///a"})])
    assert [entry.to for entry in drain(spool)] == ["resume", "checkpoints"]
    assert warnings.dropped == 3
    spool.close(0)


def count_open_files() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def test_sent_segments_are_deleted(tmp_path: Path) -> None:
    """A spool is files of limited size; each is closed and deleted once all of it was sent, except the last."""
    before = count_open_files()
    spool = open_spool(tmp_path / "a-run")
    for step in range(30):
        spool.append([Entry("resume", {"step": step})])
    assert 5 < len(list((tmp_path / "a-run").glob("*.jsonl"))) < 15
    assert len(drain(spool)) == 30
    assert len(list((tmp_path / "a-run").glob("*.jsonl"))) == 1
    assert count_open_files() == before + 1, "the last file"
    spool.close(0)
    assert count_open_files() == before


def test_entries_after_the_end_are_counted(tmp_path: Path) -> None:
    """What is recorded once the spool is closed is lost: each observation and each other entry counts as dropped."""
    warnings = WarningLog()
    spool = Spool(tmp_path / "a-run", OPENING, LIMITS, warnings)
    spool.close(0)
    observation = Entry("observations", {"observations": [{"metric": "eval", "step": 1, "value": 1.0}] * 3})
    spool.append([observation, Entry("resume", {"step": 1})])
    assert warnings.dropped == 4
    assert not (tmp_path / "a-run").exists()


def test_entries_wait_in_memory_while_the_disk_fails(tmp_path: Path) -> None:
    """While the folder cannot be created entries wait in memory, in order; afterwards on disk again."""
    blocker = tmp_path / "a-run"
    blocker.write_text("a file where the folder should be")
    spool = open_spool(blocker)
    spool.append([Entry("resume", {"step": 1})])
    spool.append([Entry("resume", {"step": 2})])
    blocker.unlink()
    spool.append([Entry("resume", {"step": 3})])
    assert [entry.body["step"] for entry in drain(spool)] == [1, 2, 3]
    spool.append([Entry("resume", {"step": 4})])
    assert len(list(blocker.glob("*.jsonl"))) == 1
    assert [entry.body["step"] for entry in drain(spool)] == [4]
    spool.close(0)


def test_unreadable_segment_is_skipped(tmp_path: Path) -> None:
    """A segment without a first line is kept, and the others are sent."""
    first = open_spool(tmp_path / "a-run")
    first.append([Entry("resume", {"step": 1})])
    first.close(0)
    broken = tmp_path / "a-run" / "0-broken.jsonl"
    broken.write_bytes(b'{"to":"op')
    second = open_spool(tmp_path / "a-run")
    second.adopt()
    assert drain(second) == [Entry("resume", {"step": 1})]
    assert broken.exists()


def make_observation(step: int) -> Entry:
    return Entry("observations", {"observations": [{"metric": "score", "step": step, "value": 1.0}]})


def test_full_queue_drops_observations_but_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While the disk is stalled, later observations are dropped and counted; a checkpoint is kept."""
    warnings = WarningLog()
    spool = Spool(tmp_path / "a-run", {"name": "a run"}, Limits(), warnings)
    recorder = Recorder(spool, queue_entries=3, warnings=warnings)
    checkpoint = Entry("checkpoints", {"step": 5, "uri": "file:///5"})
    for step in range(5):
        recorder.put(make_observation(step))
    recorder.put(checkpoint)
    assert warnings.dropped == 2
    assert len(caplog.records) == 1
    recorder.start()  # the disk works again
    assert recorder.wait_idle(20)
    recorder.close()
    recorded: list[Entry] = []
    while (batch := spool.head()) is not None:
        recorded += batch.entries
        spool.advance(batch)
    assert recorded == [make_observation(0), make_observation(1), make_observation(2), checkpoint]
    spool.close(0)


def test_entries_in_memory_are_lost_at_the_end(tmp_path: Path) -> None:
    """Entries that could be neither written nor sent are counted as dropped when the spool closes."""
    blocker = tmp_path / "a-run"
    blocker.write_text("a file where the folder should be")
    warnings = WarningLog()
    spool = Spool(blocker, {"name": "a run"}, Limits(), warnings)
    spool.append([make_observation(1), make_observation(2)])
    spool.close(0)
    assert warnings.dropped == 2
