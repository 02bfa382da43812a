"""The queue between the trainer and the disk: bounded, in order, and never full for what is rare."""

from __future__ import annotations

from pathlib import Path

import pytest
from evalstop_client.settings import Limits
from evalstop_client.spool.recorder import Recorder
from evalstop_client.spool.segment import Entry
from evalstop_client.spool.spool import Spool
from evalstop_client.spool.warnings import WarningLog


def observation(step: int) -> Entry:
    return Entry("observations", {"observations": [{"metric": "gold", "step": step, "value": 1.0}]})


def test_full_queue_drops_new_observations_but_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the disk standing still the queue fills up: later observations are lost and counted, a checkpoint is not."""
    warnings = WarningLog()
    spool = Spool(tmp_path / "a-run", {"name": "a run"}, Limits(), warnings)
    recorder = Recorder(spool, queue_entries=3, warnings=warnings)
    checkpoint = Entry("checkpoints", {"step": 5, "uri": "file:///5"})
    for step in range(5):
        recorder.put(observation(step))
    recorder.put(checkpoint)
    assert warnings.dropped == 2
    assert len(caplog.records) == 1
    recorder.start()  # the disk moves again
    assert recorder.wait_idle(20)
    recorder.close()
    recorded: list[Entry] = []
    while (batch := spool.head()) is not None:
        recorded += batch.entries
        spool.advance(batch)
    assert recorded == [observation(0), observation(1), observation(2), checkpoint]
    spool.close()


def test_what_only_memory_held_is_counted_as_lost_at_the_end(tmp_path: Path) -> None:
    """With a disk that refuses and a service that is away, the end of the process is a loss, and said to be one."""
    blocker = tmp_path / "a-run"
    blocker.write_text("a file where the folder should be")
    warnings = WarningLog()
    spool = Spool(blocker, {"name": "a run"}, Limits(), warnings)
    spool.append([observation(1), observation(2)])
    spool.close()
    assert warnings.dropped == 2
