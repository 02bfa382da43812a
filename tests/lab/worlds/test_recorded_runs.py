"""Recorded runs as worlds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.worlds import Label, load_recorded_runs

RECORDED = Path(__file__).parents[2] / "data" / "rlhf_runs_public.jsonl"


def test_recorded_runs_keep_their_labels_and_their_truth() -> None:
    """The file has 56 hacking, 84 healthy and 13 ambiguous runs, with their peaks."""
    worlds = load_recorded_runs(RECORDED)
    assert Counter(world.truth.label for world in worlds) == {Label.HACKING: 56, Label.HEALTHY: 84, Label.AMBIGUOUS: 13}
    for world in worlds:
        if world.truth.label is Label.HACKING:  # the peak in the file is that of a smoothed curve
            assert world.truth.eval_scores[world.truth.peak] > world.truth.eval_scores.max() - 0.06 * world.truth.unit
        assert len(world.eval_scores) == len(world.proxy) == len(world.kl) == len(world.steps)
        assert world.eval_stderr is not None
        assert (world.eval_stderr > 0).all()


def test_line_that_is_not_a_run_is_named(tmp_path: Path) -> None:
    """The message has the number of the line and the expected fields."""
    file = tmp_path / "runs.jsonl"
    file.write_text(RECORDED.read_text().splitlines()[0] + '\n{"run": 1}\n')
    with pytest.raises(UnusableArguments, match=r"line 2.*run_id"):
        load_recorded_runs(file)
    with pytest.raises(UnusableArguments, match=r"none\.jsonl"):
        load_recorded_runs(tmp_path / "none.jsonl")
