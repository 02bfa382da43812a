"""The runs that the service shows to newcomers."""

from __future__ import annotations

import gzip
import json
from importlib import resources
from pathlib import Path

from evalstop_lab.worlds import load
from evalstop_lab.worlds.example_runs import document_of, drawn

RECORDED = Path(__file__).parents[2] / "data" / "rlhf_runs_public.jsonl"


def test_the_packed_runs_are_those_of_the_lab() -> None:
    """The service carries along what `evalstop-lab example-runs` makes of the worlds and of the recorded runs."""
    file = resources.files("evalstop_service").joinpath("example_runs.json.gz")
    runs = json.loads(gzip.decompress(file.read_bytes()))["runs"]
    assert runs[:160:20] == [document_of(world) for world in drawn(160)[::20]]
    assert runs[160:] == [document_of(world) for world in load(RECORDED)]
