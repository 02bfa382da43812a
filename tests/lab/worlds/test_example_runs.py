"""The example runs of `evalstop demo-data`."""

from __future__ import annotations

import gzip
import json
from importlib import resources
from pathlib import Path

from evalstop_lab.worlds import load_recorded_runs
from evalstop_lab.worlds.example_runs import draw_runs, encode_run

RECORDED = Path(__file__).parents[2] / "data" / "rlhf_runs_public.jsonl"


def test_packaged_example_runs_equal_the_labs() -> None:
    """The file in the service is the one that the lab writes."""
    file = resources.files("evalstop_service").joinpath("example_runs.json.gz")
    runs = json.loads(gzip.decompress(file.read_bytes()))["runs"]
    assert runs[:160:20] == [encode_run(world) for world in draw_runs(160)[::20]]
    assert runs[160:] == [encode_run(world) for world in load_recorded_runs(RECORDED)]
