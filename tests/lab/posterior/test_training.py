"""Training of the posterior's network on a small number of runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from evalstop_detectors.posterior.network import HIDDEN, decode_network, round_features
from evalstop_lab import cli
from evalstop_lab.posterior.train import draw_batches

pytestmark = pytest.mark.real  # PyTorch


def test_trained_network_is_readable_by_the_detector(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trained on 1,024 runs the network is better than an untrained one, and its file evaluates to finite numbers."""
    output = tmp_path / "small.int16"
    assert cli.main(["train-posterior", "--runs", "1024", "--output", str(output)]) == 0
    report = json.loads(output.with_suffix(".json").read_text(encoding="utf-8"))
    assert report["validation"]["turned"] < 1.031  # untrained it is 1.034
    assert json.loads(capsys.readouterr().out)["sha256"] == report["sha256"]
    network = decode_network(output.read_bytes())
    features = draw_batches(np.random.default_rng(2), 4, 4)[0].features
    hidden = np.zeros((HIDDEN, 4))
    for row in features:
        hidden = network.step(hidden, round_features(row.T))
    assert np.isfinite(network.read(hidden, round_features(features[-1].T))).all()
