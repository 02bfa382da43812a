"""The spool: order, torn tails, restarts, bounds and a disk that refuses."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from evalstop_client.settings import Limits
from evalstop_client.spool.segment import Entry
from evalstop_client.spool.spool import Spool
from evalstop_client.spool.warnings import WarningLog
from hypothesis import given, settings
from hypothesis import strategies as st

OPENING = {"name": "a run"}
LIMITS = Limits(batch_points=7, segment_bytes=200)

words = st.text(max_size=10)
points = st.fixed_dictionaries({"metric": words, "step": st.integers(0, 2**63 - 1), "value": st.floats(-1e9, 1e9)})
entries = st.one_of(
    st.lists(points, min_size=1, max_size=5).map(lambda some: Entry("observations", {"observations": some})),
    st.builds(lambda step, uri: Entry("checkpoints", {"step": step, "uri": uri}), st.integers(0, 99), words),
    st.builds(lambda step: Entry("resume", {"step": step}), st.integers(0, 99)),
)
appends = st.lists(st.lists(entries, max_size=5), max_size=6)


def spool_in(folder: Path, limits: Limits = LIMITS, opening: dict[str, Any] = OPENING) -> Spool:
    return Spool(folder, opening, limits, WarningLog())


@contextlib.contextmanager
def fresh_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "a-run"


def drained(spool: Spool, at_most: int = 10_000) -> list[Entry]:
    """What a sender would send, batch by batch."""
    sent: list[Entry] = []
    while len(sent) < at_most and (batch := spool.head()) is not None:
        assert sum(entry.observation_count for entry in batch.entries) <= LIMITS.batch_points or len(batch.entries) == 1
        assert len({entry.to for entry in batch.entries}) == 1
        assert len(batch.entries) == 1 or not batch.entries[0].is_control
        sent += batch.entries
        spool.advance(batch)
    return sent


def flat(chunks: list[list[Entry]]) -> list[Entry]:
    return [entry for chunk in chunks for entry in chunk]


@settings(deadline=None)  # every append waits for the disk
@given(appends)
def test_comes_out_as_it_went_in(chunks: list[list[Entry]]) -> None:
    """What is appended comes out whole and in order, in batches that one request can carry; then nothing is left."""
    with fresh_folder() as folder:
        spool = spool_in(folder)
        for chunk in chunks:
            spool.append(chunk)
        assert drained(spool) == flat(chunks)
        assert spool.is_empty
        spool.close()
        assert not folder.exists()


@settings(deadline=None)  # every append waits for the disk
@given(appends, st.integers(0, 12))
def test_next_process_goes_on_where_the_last_one_ended(chunks: list[list[Entry]], sent_before: int) -> None:
    """What a dead process had not sent comes out of the next spool first, once, and before what is new."""
    with fresh_folder() as folder:
        first = spool_in(folder)
        for chunk in chunks:
            first.append(chunk)
        already = drained(first, at_most=sent_before)
        first.abandon_in_child()  # the files are let go of with no farewell, as when a process is killed
        second = spool_in(folder)
        second.adopt()
        new = Entry("resume", {"step": 1})
        second.append([new])
        assert already + drained(second) == [*flat(chunks), new]
        second.close()
        assert not folder.exists()


def test_what_is_recorded_before_the_adoption_is_sent_after_it(tmp_path: Path) -> None:
    """The trainer may log before the folder has been looked through: the order is that of the making all the same."""
    first = spool_in(tmp_path / "a-run")
    first.append([Entry("resume", {"step": 1})])
    first.close()
    second = spool_in(tmp_path / "a-run")
    second.append([Entry("resume", {"step": 2})])
    second.adopt()
    second.append([Entry("resume", {"step": 3})])
    assert [entry.body["step"] for entry in drained(second)] == [1, 2, 3]


@settings(deadline=None)  # every append waits for the disk
@given(appends.filter(lambda chunks: flat(chunks) != []), st.data())
def test_torn_tail_costs_only_the_torn_line(chunks: list[list[Entry]], data: st.DataObject) -> None:
    """A file cut at any byte yields every line that was whole, in order."""
    with fresh_folder() as folder:
        first = spool_in(folder, Limits(batch_points=7))
        for chunk in chunks:
            first.append(chunk)
        first.abandon_in_child()
        (path,) = folder.glob("*.jsonl")
        whole = path.read_bytes()
        header = whole.index(b"\n") + 1
        cut = data.draw(st.integers(header, len(whole)))
        path.write_bytes(whole[:cut])
        second = spool_in(folder, Limits(batch_points=7))
        second.adopt()
        survivors = whole[header:cut].count(b"\n")
        assert drained(second) == flat(chunks)[:survivors]
        second.close()


def test_damaged_line_is_passed_over_and_counted(tmp_path: Path) -> None:
    """A line damaged in the middle is left out, the others arrive, and the loss is counted."""
    warnings = WarningLog()
    first = spool_in(tmp_path / "a-run")
    first.append([Entry("resume", {"step": 1}), Entry("resume", {"step": 2}), Entry("resume", {"step": 3})])
    first.abandon_in_child()
    (path,) = (tmp_path / "a-run").glob("*.jsonl")
    path.write_bytes(path.read_bytes().replace(b'"step":2', b'"st\xff\r":2'))
    second = Spool(tmp_path / "a-run", OPENING, LIMITS, warnings)
    second.adopt()
    assert [entry.body["step"] for entry in drained(second)] == [1, 3]
    assert warnings.dropped == 1


def test_living_process_keeps_its_segments(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A spool in use is not adopted by another, nor are its files touched."""
    first = spool_in(tmp_path / "a-run")
    first.append([Entry("resume", {"step": 1})])
    second = spool_in(tmp_path / "a-run")
    assert second.adopt() == 0
    assert caplog.records == []
    second.close()
    assert drained(first) == [Entry("resume", {"step": 1})]


def test_each_segment_remembers_how_its_run_was_opened(tmp_path: Path) -> None:
    """What an earlier process left is sent under the opening of that process."""
    first = spool_in(tmp_path / "a-run", opening={"name": "a run", "labels": {"job": "1"}})
    first.append([Entry("resume", {"step": 1})])
    first.close()
    second = spool_in(tmp_path / "a-run", opening={"name": "a run", "labels": {"job": "2"}})
    second.adopt()
    second.append([Entry("resume", {"step": 2})])
    openings = []
    while (batch := second.head()) is not None:
        openings.append(batch.opening["labels"]["job"])
        second.advance(batch)
    assert openings == ["1", "2"]


def test_full_spool_drops_observations_but_never_the_rest(tmp_path: Path) -> None:
    """At its bound the spool keeps checkpoints and resumes, drops observations, and counts them."""
    warnings = WarningLog()
    spool = Spool(tmp_path / "a-run", OPENING, Limits(spool_bytes=1, segment_bytes=10_000), warnings)
    spool.append([Entry("resume", {"step": 1})])
    observation = Entry("observations", {"observations": [{"metric": "eval", "step": 1, "value": 1.0}] * 3})
    spool.append([observation, Entry("checkpoints", {"step": 1, "uri": "file:///a"})])
    assert [entry.to for entry in drained(spool)] == ["resume", "checkpoints"]
    assert warnings.dropped == 3


def test_disk_that_refuses_is_replaced_by_memory(tmp_path: Path) -> None:
    """Where no folder can be made, entries wait in memory, in order; once it can, they wait on disk again."""
    blocker = tmp_path / "a-run"
    blocker.write_text("a file where the folder should be")
    spool = spool_in(blocker)
    spool.append([Entry("resume", {"step": 1})])
    spool.append([Entry("resume", {"step": 2})])
    blocker.unlink()
    spool.append([Entry("resume", {"step": 3})])
    assert [entry.body["step"] for entry in drained(spool)] == [1, 2, 3]
    spool.append([Entry("resume", {"step": 4})])
    assert len(list(blocker.glob("*.jsonl"))) == 1
    assert [entry.body["step"] for entry in drained(spool)] == [4]
    spool.close()


def test_rejected_entries_are_kept_with_the_words_of_the_refusal(tmp_path: Path) -> None:
    """What the service refused lies beside the spool, with the reason, one line each."""
    spool = spool_in(tmp_path / "a-run")
    path = spool.reject([Entry("resume", {"step": 1})], "because")
    assert path == tmp_path / "a-run.rejected.jsonl"
    assert json.loads(path.read_text()) == {"reason": "because", "to": "resume", "body": {"step": 1}}


def test_unreadable_segment_is_left_alone(tmp_path: Path) -> None:
    """A segment without a first line does not keep the others from being sent."""
    first = spool_in(tmp_path / "a-run")
    first.append([Entry("resume", {"step": 1})])
    first.close()
    broken = tmp_path / "a-run" / "0-broken.jsonl"
    broken.write_bytes(b'{"to":"op')
    second = spool_in(tmp_path / "a-run")
    second.adopt()
    assert drained(second) == [Entry("resume", {"step": 1})]
    assert broken.exists()
