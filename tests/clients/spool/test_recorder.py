"""The queue between the trainer and the disk: bounded, in order, and never full for checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from evalstop_client.settings import Limits
from evalstop_client.spool.reporter import Recorder
from evalstop_client.spool.run_log import WarningLog
from evalstop_client.spool.segment import Entry
from evalstop_client.spool.spool import Spool


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
