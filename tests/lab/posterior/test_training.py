"""Training of the posterior's network: its runs, their labels, and the network of a small number of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from evalstop_detectors.posterior.network import HIDDEN, decode_network, round_features
from evalstop_lab import cli
from evalstop_lab.posterior.train import draw_batches, to_batch
from evalstop_lab.worlds.prior import draw_run
from evalstop_lab.worlds.truth import LEAST_FALL


@pytest.mark.real  # PyTorch
def test_trained_network_is_readable_by_the_detector(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trained on 1,024 runs the network is better than an untrained one, and its file evaluates to finite numbers."""
    output = tmp_path / "small.int16"
    assert cli.main(["train-posterior", "--runs", "1024", "--output", str(output)]) == 0
    report = json.loads(output.with_suffix(".json").read_text(encoding="utf-8"))
    assert report["validation"]["turned"] < 1.031  # untrained it is 1.034
    assert json.loads(capsys.readouterr().out)["sha256"] == report["sha256"]
    network = decode_network(output.read_bytes())
    features = draw_batches(np.random.default_rng(2), 4, 4)[0].features
    hidden = np.zeros(HIDDEN)
    for row in features[:, 0]:
        hidden = network.step(hidden, round_features(row))
    assert np.isfinite(network.read(hidden, round_features(features[-1, 0]))).all()


@pytest.mark.parametrize("seed", range(60))
def test_labels_agree_with_the_curve(seed: int) -> None:
    """A run that turned ends more than a tenth of its gain or range below its peak, another does not."""
    run = draw_run(np.random.default_rng(seed))
    span = float(np.ptp(run.truth))
    gain = float(run.truth.max() - run.truth[0])
    fall = float(run.truth.max() - run.truth[-1]) / (gain if gain > 0.05 * span else span)
    assert fall > LEAST_FALL - 0.02 if run.turned else fall <= LEAST_FALL + 1e-9
    assert run.truth[run.peak] >= run.truth.max() - 0.05 * span or not run.turned
    assert np.isfinite(run.scores).all()


def test_batch_labels_follow_the_runs() -> None:
    """Up to its peak no run has turned, after it a turning one has; the last eval has weight 0."""
    runs = [draw_run(np.random.default_rng(seed), evals=30) for seed in range(16)]
    batch = to_batch(runs)
    for index, run in enumerate(runs):
        n = len(run.scores)
        assert not batch.turned_for_good[: run.peak + 1, index].any()
        assert batch.turned_for_good[run.peak + 1 : n, index].all() == (run.turned or run.peak + 1 >= n)
        assert (batch.will_turn[:n, index] == run.turned).all()
        assert (batch.weight[n - 1 :, index] == 0).all()
        assert (batch.weight[: n - 1, index] > 0).all()
    assert np.array_equal(batch.features * 256, np.floor(batch.features * 256))
